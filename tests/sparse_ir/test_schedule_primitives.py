"""Stage-I primitives: what their docstrings show, and what they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from programs import PROGRAMS
from schedule_common import gives, keeps_meaning, opened, program, steps
from small import text_of

GOLDEN = Path(__file__).parents[1] / "golden"


TILES = """k0, k1 = split(k, [None, 64], tail="exact"); sparse_reorder(it, [k0, i, j, k1])
"""
# By golden text, which the docstrings of the primitives show in part.
SHOWN = {
    "split": 'bound(k, 128, "exact"); split(k, [None, 4, 16])',
    "divide_work": 'divide(i, 16, by="work")',
    "divide_coordinates": 'divide(j, 4, by="coordinates")',
    "bound": 'bound(k, 64, "exact")',
    "precompute_result": f'{TILES}precompute("C", i, [k1])',
    "precompute_operand": f"""{TILES}precompute("C", i, [k1])
precompute("B", k0, ["J_", k1], scope="global")""",
    "steps": "strip_mine_rows(j, 32)",
    "parallelize": f'{TILES}parallelize([k0, i], "cpu")',
}


@pytest.mark.parametrize("name", SHOWN)
def test_golden(name: str) -> None:
    sch, it, _ = opened()
    steps(SHOWN[name], sch, it)[1]()
    assert sch.func.script() == (GOLDEN / f"schedule_{name}.txt").read_text()


# -- what they make -------------------------------------------------------------------------------


def run(sch: Any, name: str = "spmm", *cases: str) -> str:
    """The meaning stays in these cases, or one; the text of what is compiled."""
    return str(keeps_meaning(sch, name, cases=cases or ["small"]).stages["III"].script())


UPDATES = {
    "sum": ("0.0", "OUT[i, j] + X[i, k] * Y[j, k]"),
    "product": ("1.0", "OUT[i, j] * (X[i, k] + Y[j, k])"),
    "max": ('T.min_value("{dtype}")', "T.max(OUT[i, j], X[i, k] * Y[j, k])"),
    "min": ('T.max_value("{dtype}")', "T.min(OUT[i, j], X[i, k] * Y[j, k])"),
    "max that keeps NaN": (
        'T.min_value("{dtype}")',
        "T.Select(X[i, k] > OUT[i, j] or T.isnan(X[i, k]), X[i, k], OUT[i, j])",
    ),
}
UPDATED = text_of("f", """
with T.sp_iter([I, J, K], "SSR", "it") as [i, j, k]:
    with T.init():
        OUT[i, j] = {init}
    OUT[i, j] = {update}
""", dtype="{dtype}", X="I K", Y="N K", OUT="I J")  # fmt: skip


def updated(kind: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """A reduction in another operator, and arguments for it."""
    init, update = UPDATES[kind]
    text = UPDATED.format(dtype=dtype, init=init.format(dtype=dtype), update=update)
    rng = np.random.default_rng(1)
    arguments = {
        "x": rng.uniform(-1, 1, (5, 7)).astype(dtype),
        "y": rng.uniform(-1, 1, (4, 7)).astype(dtype),
        "out": np.full(8, np.nan, dtype), "indptr": np.array([0, 2, 2, 5, 8, 8], "int32"),
        "indices": np.array([0, 3, 0, 1, 2, 1, 2, 3], "int32"), "m": 5, "n": 4, "nnz": 8, "feat": 7,
    }  # fmt: skip
    if "NaN" in kind:
        arguments["x"][2, 3] = np.nan
    return sparsetir.from_source(text), arguments


@pytest.mark.parametrize("tail", ["guard", "shift", "repeat"])
@pytest.mark.parametrize("kind", UPDATES)
def test_lanes_and_wider_types_in_every_operator(kind: str, tail: str) -> None:
    func, arguments = updated(kind, "float16")
    expected = {**arguments, "out": arguments["out"].copy()}
    sparsetir.interpret(func, expected)
    sch, it, (i, j, k) = opened(func, "it")
    _, lane = sch.split(k, [None, 4], tail=tail)
    handles = sch.precompute("OUT", j, [], lanes=[lane], dtype="float32")
    assert [h.name for h in handles] == ["it_start", "it_reduce", "it_sums", "it_write"]
    gives(sch, arguments, {"out": expected["out"]}, 4e-3, 4e-3)


def test_iterations_that_are_divided_alike_share_their_parts() -> None:
    sch = sparsetir.Schedule(program("normalized_rows"))
    for name in ("degree", "divide"):
        i, _ = sch.get_sp_iters(sch.get_sparse_iteration(name))
        parts, _ = sch.divide(i, 4, by="work")
        sch.parallelize(parts)
    text = sch.func.script()
    assert text.count("T.sp_iter([I_parts, T.part(I, I_part), J]") == 2
    assert text.count("equal_work") == 1 and "_1 =" not in text
    assert tvm_ffi.structural_equal(sparsetir.from_source(text), sch.func, map_free_vars=True)
    assert "T.parallel" in run(sch, "normalized_rows", "small", "empty", "dense_row")


def test_a_reduction_over_tiles_that_begin_earlier_keeps_its_terms_once() -> None:
    sch, it, (i, j, f) = opened(program("sddmm"), "sddmm")
    f0, f1 = sch.split(f, [None, 4], tail="shift")
    assert "T.Select(" in run(sch, "sddmm")
    sch, it, (i, j, f) = opened(program("sddmm"), "sddmm")
    f0, f1 = sch.split(f, [None, 4], tail="shift")
    sch.precompute("OUT", j, [])  # begins anew around all tiles, not for each
    assert "T.Select(" in run(sch, "sddmm")


def test_the_last_element_is_computed_again_without_guards_on_loads() -> None:
    sch, it, (i, j, f) = opened(program("sddmm"), "sddmm")
    elements = sch.positions(sch.sparse_fuse(it, [i, j]))
    groups, group = sch.split(elements, [None, 3], tail="repeat")
    f0, f1 = sch.split(f, [None, 64], tail="repeat")  # longer than the axis
    sch.precompute("OUT", groups, [group], lanes=[f1])
    assert "if T.tail(ij0 * 3 + ij1, nnz, ij0 * 3 + ij1):" in sch.func.script()
    sch.parallelize(groups)
    text = run(sch, "sddmm", "small", "empty", "dense_row", "single_column")
    assert "if_then_else" not in text
    assert text.count("T.Select(") == 1 and "T.Select(vk0 * 64 + vk1 < feat, " in text
    assert text.count("if vij0 * 3 + vij1 < nnz:") == 1  # around the store


def test_tiles_do_not_add_to_what_others_hold_in_a_workspace() -> None:
    """A loop whose visits add nothing to the same element would still race as vectors."""
    sch, it, (io, jo, ii, ji, k) = opened(program("spmm_bsr"))
    _, reduce, _ = sch.precompute("C", jo, [ii, k], scope="global")
    sch.split(sch.get_sp_iters(reduce)[0], [None, 64], tail="repeat")
    assert "T.Select(" not in run(sch, "spmm_bsr")


def test_a_loop_around_fused_ones_of_mixed_kind_builds_for_gpus() -> None:
    """TVM reorders no loops around a block whose axis is neither spatial nor reduced."""
    sch, it, (i, j, k) = opened()
    sch.sparse_reorder(it, [k, i, j])
    sch.sparse_fuse(it, [i, j])
    assert "blockIdx.x" in sparsetir.lower(sch, target={"kind": "cuda"})["III"].script()


def test_the_first_part_of_equal_work_begins_ahead() -> None:
    """The plan decides by how much; parts of equal length have no work to be ahead by."""
    sch = sparsetir.Schedule(PROGRAMS["spmm"].make("float32", "int32"))
    rows, columns, features = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    sch.divide(rows, 2, by="work", cost=0, ahead="more")
    kernel = sparsetir.build(sch)
    args = {"indptr": np.arange(0, 41, 4, "int32"), "m": 10, "n": 4, "feat": 1, "nnz": 40}
    for ahead, first in ((None, 5), (8, 6), (100, 10)):
        computed = kernel.compute(args, {} if ahead is None else {"more": ahead})
        assert computed["I_ptr"].tolist() == [0, first, 10]
