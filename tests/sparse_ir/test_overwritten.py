"""A statement that sets a whole result becomes the init of the reduction after it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from programs import copied
from random_schedules import schedule_at_random
from schedule_common import opened
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.schedule.loops import find_iteration, loops_of

BLOCKED = """
@T.prim_func
def f(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, indptr: T.handle,
      indices: T.handle, m: T.int32, blocks: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    IO = T.dense_fixed({count})
    JO = T.sparse_variable(IO, (n, nnz), (indptr, indices))
    II = T.dense_fixed(4)
    N = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    ONE = T.dense_fixed(1)
    A = T.match_sparse_buffer(a, (IO, JO, II), "float32")
    B = T.match_sparse_buffer(b, (N, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    D = T.match_sparse_buffer(d, (I, K), "float32")
    E = T.match_sparse_buffer(e, (ONE,), "float32")
    with T.sp_iter({over}, "{kinds}", "set") as {coords}:
        {first}
{between}    with T.sp_iter([IO, JO, II, K], "SRSS", "it") as [io, jo, ii, k]:
        C[{row}, k] = C[{row}, k] + A[io, jo, ii] * B[jo, k]
"""
SEEDS = 20
WHOLE = {
    "count": "(m + 3) // 4", "over": "[I, K]", "kinds": "SS", "coords": "[i, k]",
    "first": "C[i, k] = 2.5", "between": "", "row": "io * 4 + ii",
}  # fmt: skip
# The iteration between reads what was set, or sets it again.
READ = '    with T.sp_iter([ONE], "S", "look") as [o]:\n        E[o] = C[0, 0]\n'


def blocked(**fields: str) -> tuple[Any, dict[str, Any]]:
    """Rows in blocks of four, some rows of the last of which are missing, and arguments."""
    rng = np.random.default_rng(0)
    indptr = np.array([0, 2, 2, 5], "int32")
    arguments = {
        "a": rng.random((5, 4), dtype="float32"), "b": rng.random((6, 8), dtype="float32"),
        "c": rng.random((10, 8), dtype="float32"), "d": rng.random((10, 8), dtype="float32"),
        "e": np.zeros(1, "float32"), "indptr": indptr,
        "indices": np.array([1, 4, 0, 2, 5], "int32"), "m": 10, "blocks": 3, "n": 6, "nnz": 5,
        "feat": 8,
    }  # fmt: skip
    return sparsetir.from_source(BLOCKED.format(**{**WHOLE, **fields})), arguments


def precomputed(func: Any, tail: str = "exact", tile: int = 4) -> Any:
    sch, it, (io, jo, ii, k) = opened(func, "it")
    k0, k1 = sch.split(k, [None, tile], tail=tail)
    sch.sparse_reorder(it, [io, k0, jo, ii, k1])
    sch.precompute("C", k0, [ii, k1])
    return sch


def check(func: Any, arguments: dict[str, Any], sch: Any) -> None:
    """The interpreter and the kernel give what the function gave before."""
    text = sch.func.script()
    assert tvm_ffi.structural_equal(sparsetir.from_source(text), sch.func, map_free_vars=True)

    def ran(run: Any) -> Any:
        mine = copied(arguments)
        run(mine)
        return mine["c"], mine["e"]

    wanted = ran(lambda mine: sparsetir.interpret(func, mine))
    for run in (
        lambda mine: sparsetir.interpret(sch.func, mine),
        lambda mine: sparsetir.build(sch)(**mine),
    ):
        for result, want in zip(ran(run), wanted, strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-5)


@pytest.mark.parametrize(("tail", "tile"), [("exact", 4), ("guard", 3), ("shift", 3), ("guard", 8)])
def test_what_is_set_before_is_where_sums_begin(tail: str, tile: int) -> None:
    func, arguments = blocked()
    sch = precomputed(func, tail, tile)
    text = sch.func.script()
    assert '"set"' not in text and "C_ws[ii, k1] = T.float32(2.5)" in text
    assert "= C[" not in text
    check(func, arguments, sch)


KEPT = {
    "fewer blocks than rows may have": {"count": "blocks"},
    "rows between blocks": {"row": "io * 5 + ii"},
    "rows that blocks share": {"row": "io * 3 + ii"},
    "rows that begin later": {"row": "io * 4 + ii + 1"},
    "a part of what is added to": {
        "over": "[IO, K]", "coords": "[i, k]", "first": "C[i, k] = 2.5",
    },
    "one row": {"over": "[K]", "kinds": "S", "coords": "[k]", "first": "C[0, k] = 2.5"},
    "what is looked at in between": {"between": READ},
    "what is changed in between": {
        "between": READ.replace("E[o] = C[0, 0]", "C[o, o] = 7.0"),
    },
    "what depends on the result": {"first": "C[i, k] = C[i, k] * 2.0"},
}  # fmt: skip


@pytest.mark.parametrize("fields", KEPT.values(), ids=KEPT)
def test_what_is_not_all_of_it_stays_and_is_added_to(fields: dict[str, str]) -> None:
    func, arguments = blocked(**fields)
    sch = precomputed(func)
    text = sch.func.script()
    assert '"set"' in text and "C_ws[ii, k1] = T.float32(0.0)" in text
    assert "] + C_ws[ii, k1]" in text
    check(func, arguments, sch)


@pytest.mark.parametrize("row", ["io * 4 + ii", "io * 3 + ii"])
def test_random_schedules_mean_the_same(row: str) -> None:
    """A workspace at any place, after other primitives."""
    func, arguments = blocked(row=row, first="C[i, k] = D[i, k]")
    wanted = arguments["c"].copy()
    sparsetir.interpret(func, {**arguments, "c": wanted})
    taken = 0
    for seed in range(SEEDS):
        choose = random.Random(seed).choice
        sch = schedule_at_random(func, arguments, choose, 4, finite=True)
        with contextlib.suppress(sparsetir.ScheduleError):
            it = sch.get_sparse_iteration("it")
            loops, place = sch.get_sp_iters(it), choose(range(5))
            kinds = [loop.kinds for loop in loops_of(find_iteration(sch.func, "it"))]
            spatial = [x for x, kind in zip(loops, kinds, strict=True) if "S" in kind]
            outer = spatial[:place]
            sch.sparse_reorder(it, [*outer, *(x for x in loops if x not in outer)])
            sch.precompute("C", [it, *outer][-1], spatial[place:], scope="global")
        result = arguments["c"].copy()
        sparsetir.interpret(sch.func, {**arguments, "c": result})
        np.testing.assert_allclose(result, wanted, rtol=1e-5, err_msg=sch.func.script())
        taken += "set" not in {it.name for it in sparse_iterations(sch.func)}
    assert bool(taken) == (row == "io * 4 + ii")


CHUNKED = (
    BLOCKED.replace("(IO, JO, II)", "(IO, JO)")
    .replace(
        '[IO, JO, II, K], "SRSS", "it") as [io, jo, ii, k]',
        '[IO, JO, K], "SRS", "it") as [io, jo, k]',
    )
    .replace("A[io, jo, ii]", "A[io, jo]")
)


@pytest.mark.parametrize("first", ["C[i, k] = 2.5", "C[i, k] = D[i, k]"])
def test_rows_of_chunks_begin_with_what_is_set_before(first: str) -> None:
    """Also where their features are in tiles."""
    _, arguments = blocked()
    arguments |= {"a": arguments["a"][:, 0].copy(), "c": arguments["c"][:3], "m": 3}
    arguments["d"] = arguments["d"][:3]
    func = sparsetir.from_source(
        CHUNKED.format(**{**WHOLE, "count": "m", "first": first, "row": "io"})
    )
    sch, it, (io, jo, k) = opened(func, "it")
    k0, k1 = sch.split(k, [None, 3], tail="shift")
    sch.sparse_reorder(it, [io, jo, k0, k1])
    chunks, pieces, elements = sch.split(sch.sparse_fuse(it, [io, jo]), [None, 2])
    sch.sparse_reorder(it, [chunks, pieces, k0, elements, k1])
    sch.precompute("C", k0, [k1])
    sch.parallelize(chunks, "cpu", race="temporary")
    assert '"set"' not in sch.func.script()
    check(func, arguments, sch)
