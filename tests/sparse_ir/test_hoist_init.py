"""The init of a reduction: in front of its loops, once for each element that a row stores."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
from tvm import s_tir

import sparsetir
from programs import PROGRAMS
from small import text_of
from sparsetir.sparse_ir.hoist_init import hoist_init
from sparsetir.sparse_ir.nodes import sparse_iterations, walk
from sparsetir.sparse_ir.script.parser import from_source
from sparsetir.sparse_ir.separate_init import init_runs_in_place
from stage2 import golden, only, plain_text, schedule


def hoisted(program, steps=lambda sch: None):
    """A scheduled program, and the same with its inits in their places."""
    sch = schedule(PROGRAMS[program].make("float32", "int32"), steps)
    return sch, hoist_init(only(sch))


def blocks(func):
    """The realize of each block, by name."""
    realizes = {}

    def visit(node):
        if isinstance(node, s_tir.SBlockRealize):
            realizes[str(node.block.name_hint)] = node

    walk(func.body, visit)
    return realizes


def test_golden():
    _, func = hoisted("spmm")
    assert plain_text(func) == golden("spmm_stage2_hoisted")


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_init_is_left_without_threads(program):
    _, func = hoisted(program)
    assert all(realize.block.init is None for realize in blocks(func).values())


def sums(body: str, idtype: str = "int32") -> Any:
    """A program that adds A[i, j] to C; O visits rows several times."""
    axes = "O = T.dense_fixed(times)\nTWO = T.dense_fixed(2)\nONE = T.dense_fixed(1)\n"
    axes += "S = T.dense_fixed(size)"
    return from_source(text_of("sums", body, axes, idtype=idtype, A="I J", C="S"))


def adding(over: str, coords: str, index: str, name: str = "sums", at: str = "") -> str:
    """Sums that begin at an index."""
    return f"""
with T.sp_iter({over}, "{name}") as [{coords}]:
    with T.init():
        C[{index}] = 0.0
    C[{at or index}] = C[{at or index}] + A[i, j]
"""


# The statement, and whether its init may stay in the reduction's block.
BODIES = {
    "outer axis not stored": ('[O, I, J], "SSR"', "o, i, j", "i", False),
    "inner axis not stored": ('[I, O, J], "SSR"', "i, o, j", "i", False),
    "innermost axis not stored": ('[I, J, O], "SRS"', "i, j, o", "i", False),
    "constant axis not stored": ('[TWO, I, J], "SSR"', "o, i, j", "i", False),
    "axis of one coordinate": ('[ONE, I, J], "SSR"', "o, i, j", "i", True),
    "sums that meet": ('[I, O, J], "SSR"', "i, o, j", "i + o", False),
    "sums that differ": ('[I, TWO, J], "SSR"', "i, o, j", "i * 2 + o", True),
    "sums that differ by a parameter": ('[I, O, J], "SSR"', "i, o, j", "i * times + o", True),
    "multiples of another parameter": ('[I, O, J], "SSR"', "i, o, j", "i * n + o", False),
    "stored": ('[I, J], "SR"', "i, j", "i", True),
}


def arguments(idtype: str) -> dict[str, Any]:
    """Rows of 2, 0 and 3 elements, an output longer than them."""
    return {
        "a": np.arange(1, 6, dtype="float32"),
        "c": np.full(40, np.nan, "float32"),
        "indptr": np.array([0, 2, 2, 5], idtype),
        "indices": np.array([0, 3, 1, 2, 3], idtype),
        "m": 3, "n": 4, "nnz": 5, "times": 2, "size": 40,
    }  # fmt: skip


def as_interpreted(func: Any, args: dict[str, Any]) -> np.ndarray:
    """The interpreter's `c`, which kernels with a schedule and without one give as well."""
    want = args | {"c": args["c"].copy()}
    sparsetir.interpret(func, want)
    for scheduled in (func, sparsetir.lower_sparse_iter(func)):
        have = args | {"c": args["c"].copy()}
        sparsetir.build(scheduled, "llvm")(**have)
        np.testing.assert_array_equal(have["c"], want["c"])
    return want["c"]


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("case", BODIES)
def test_each_element_is_initialised_once(case: str, idtype: str) -> None:
    axes, coords, index, in_place = BODIES[case]
    func = sums(adding(axes, coords, index), idtype)
    (it,) = sparse_iterations(func)
    assert init_runs_in_place(it, func) == in_place
    c = as_interpreted(func, arguments(idtype))
    if index == "i":
        times = 1 if in_place else 2
        np.testing.assert_array_equal(c[:3], np.array([3, 0, 12]) * times)
    else:
        assert not np.isnan(c[0])


def test_an_index_that_is_a_number() -> None:
    """TVM's schedules divide by the zero that `j - j` is."""
    body = adding('[T.fuse(I, J)], "RS"', "i, j", "j, j - j + 1")
    func = from_source(text_of("columns", body, A="I J", C="N K"))
    args = arguments("int32") | {"c": np.ones((4, 2), "float32"), "feat": 2}
    args = {name: value for name, value in args.items() if name not in ("times", "size")}
    np.testing.assert_array_equal(as_interpreted(func, args), [[1, x] for x in (1, 3, 4, 7)])


@pytest.mark.parametrize("index", ["i", "i * 2 + o", "i + o"])
def test_nested_reductions(index: str) -> None:
    """The init of a nested iteration runs at each visit of the one around it."""
    inner = textwrap.indent(adding('[O, J], "SR"', "o, j", index), "    ")
    rows = f"""
with T.sp_iter([I], "S", "rows") as [i]:
    T.sp_iter_attr({{"ordered": 1}}){inner}"""
    func = sums(rows)
    nested = next(it for it in sparse_iterations(func) if it.name == "sums")
    assert init_runs_in_place(nested, func) == (index != "i")
    c = as_interpreted(func, arguments("int32"))
    want = {"i": [6, 0, 24], "i * 2 + o": [3, 3, 0, 0, 12, 12], "i + o": [3, 0, 12, 12]}[index]
    np.testing.assert_array_equal(c[: len(want)], want)


PROGRAM = text_of("sums", """
with T.sp_iter([{axes}], "{kinds}", "sums") as [{names}]:
    with T.init():
        OUT[i, j, {at}] = T.float32(0)
    OUT[i, j, {at}] = OUT[i, j, {at}] + A[i, j, k]
""", """
J = T.sparse_variable(I, (n, nnz), (indptr, indices), unique=False)
K = T.dense_fixed(5)
P = T.dense_fixed(2)
""", A="I J K", OUT="I J P")  # fmt: skip


@pytest.mark.parametrize("at", ["0", "1", "i % 2"])
@pytest.mark.parametrize(
    ("axes", "kinds", "names"),
    [("I, J, K", "SSR", "i, j, k"), ("T.fuse(I, J), K", "SSR", "i, j, k"),
     ("I, K, J", "SRS", "i, k, j")],
)  # fmt: skip
def test_each_of_them_is_initialised(axes, kinds, names, at):
    program = from_source(PROGRAM.format(axes=axes, kinds=kinds, names=names, at=at))
    indptr = np.array([0, 4, 4, 7], np.int32)
    indices = np.array([1, 1, 3, 1, 2, 0, 2], np.int32)
    given = {"a": np.random.default_rng(0).random((7, 5), np.float32), "indptr": indptr}
    given |= {"indices": indices, "m": 3, "n": 4, "nnz": 7}
    expected, out = (np.full((7, 2), np.nan, np.float32) for _ in range(2))
    sparsetir.interpret(program, given | {"out": expected})
    rows = np.repeat(np.arange(3), np.diff(indptr))
    where = rows % 2 if at == "i % 2" else np.full(7, int(at))
    np.testing.assert_allclose(expected[np.arange(7), where], given["a"].sum(1), rtol=1e-6)
    assert np.isnan(expected[np.arange(7), 1 - where]).all()
    for scheduled in (program, sparsetir.Schedule(program)):
        out[:] = np.nan
        sparsetir.build(scheduled)(**given, out=out)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
