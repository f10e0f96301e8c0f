"""Passes over what a schedule has lowered: vectors and prefetching, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from programs import PROGRAMS
from schedule_common import opened, program, says, table
from small import small
from sparsetir.schedules.passes.drop_identity_order import drop_identity_order  # noqa: F401
from sparsetir.schedules.passes.opaque_step_loop import opaque_step_loop
from sparsetir.schedules.passes.parallel_loops import in_vectors, run_in_parallel
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.passes.unroll_known_tiles import unroll_known_tiles  # noqa: F401
from sparsetir.sparse_ir.errors import ScheduleError


def tiled(vectors: int | None = 2) -> tuple[Any, Any]:
    """A schedule of spmm with sums in registers, or as it is, and the iteration that reduces."""
    sch, it, (i, j, k) = opened()
    if vectors is None:
        return sch, it
    tiles, *straight = sch.split(k, [None, vectors, 4], tail="exact")
    sch.sparse_reorder(it, [i, tiles, j, *straight])
    return sch, sch.precompute("C", tiles, straight)[1]


def with_lanes() -> tuple[Any, Any, Any]:
    """A schedule of sddmm with sums in lanes, and its steps that add them up and write."""
    sch, _, (_, j, k) = opened(program("sddmm"), "sddmm")
    _, lanes = sch.split(k, [None, 4], tail="exact")
    _, _, sums, write = sch.precompute("OUT", j, [], lanes=[lanes])
    return sch, sums, write


def vectors_of(sch: Any) -> int:
    return sparsetir.lower(sch)["II scheduled"].script().count("T.vectorized(")


def test_a_schedule_goes_on_from_a_rewrite() -> None:
    sch, reduce = tiled()
    loops = sch.lower()
    (rows, *_) = loops.get_loops(loops.get_sblock("spmm0"))
    assert sch.rewrite(prefetch_gathered, reduce, "B", 8, 8) is loops is sch.stage_two
    for step in ("spmm_start", reduce, "spmm_write"):
        in_vectors(loops, step)
    assert vectors_of(sch) == 3
    text = sch.trace.as_python()
    assert "sch2 = sch.rewrite(prefetch_gathered, v" in text  # the iteration's handle
    assert text.count("sch2.unroll(") == 3
    again = sch.trace.apply(program())
    assert again.trace.as_python() == text
    assert vectors_of(again) == 3
    with pytest.raises(IndexError, match="Cannot find corresponding LoopRV"):
        loops.unroll(rows)


def test_a_schedule_that_went_on_to_stage_two_is_taken_itself() -> None:
    sch, reduce = tiled()
    with pytest.raises(ScheduleError) as error:
        in_vectors(sch, reduce)
    expected = "argument 'sch': expected a schedule of stage II; call its lower() before"
    assert str(error.value) == f"in_vectors: {expected}"
    loops = sch.lower()
    in_vectors(sch, reduce)
    run_in_parallel(sch, loops.get_loops(loops.get_sblock("spmm0"))[0], "parallel")
    assert vectors_of(sch) == 1
    assert "T.parallel(" in sparsetir.lower(sch)["II scheduled"].script()


def with_a_sum_for_each_lane() -> Any:
    """A schedule of spmm whose tile of sums is added to through one more workspace."""
    sch, reduce = tiled()
    sch.precompute("C_ws", sch.get_sp_iters(reduce)[-1], [], dtype="float64")
    return sch


def fused_products() -> tuple[Any, Any]:
    """Sampled products over elements in stage II, in no tiles and no order, and their length."""
    func = PROGRAMS["sddmm_fused"].make("float32", "int32")
    (feat,) = (axis.length for axis in func.axes if axis.name == "K")
    return sparsetir.lower_sparse_iter(func), feat


REFUSED = """
in_vectors(with_a_sum_for_each_lane().lower(), "spmm_reduce", 1)
    in_vectors: loop 'k2' as vectorized: block 'spmm_reduce0' has 'C_ws_ws' for each visit .. in for
in_vectors(tiled()[0].lower(), "spmm_redcue")
    in_vectors: expected a sparse iteration among ['spmm', 'spmm_start', .. got 'spmm_redcue'
in_vectors(tiled()[0].lower(), "spmm_reduce", 3)
    'loops': expected constant extents of the innermost 3 .. got J_indptr[vi + 1] - J_indptr[vi] of
in_vectors(tiled(None)[0].lower(), "spmm", 1)
    'loops': expected constant extents of the innermost 1 of block 'spmm1', got feat of 'k'; split
in_vectors(with_lanes()[0].lower(), "sddmm_write")
    'block': block 'sddmm_write0' is in no loop of its own, so that it has no lanes; leave it out
in_vectors(with_lanes()[0].lower(), "sddmm_sums")
    loop 'k1' as vectorized: block 'sddmm_sums0': 'vk1' is no free variable (reduction): .. in for
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce0", "B", 8, 8)
    prefetch_gathered: expected a sparse iteration among .. got 'spmm_reduce0'
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce", "A", 8, 8)
    prefetch_gathered: argument 'buffer': block 'spmm_reduce0' reads no 'A' at an index that it
tiled()[0].rewrite(prefetch_gathered, "spmm", "B", 8, 8)
    'iteration': expected one with a loop of its own over what 'J_indices' is read at .. the second
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce", "B", -8, 8)
    prefetch_gathered: argument 'distance': expected a positive integer, got -8
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce", "B", 8, 0)
    prefetch_gathered: argument 'span': expected a positive integer, got 0
drop_identity_order(fused_products()[0], "I_J_order")
    drop_identity_order: argument 'order': expected an array that is loaded from, got
unroll_known_tiles(*fused_products(), 16, 3)
    unroll_known_tiles: argument 'tile': expected a loop over tiles of 16 of feat, got none
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    says(code, words, globals(), ScheduleError)


def one_at_a_time(sch):
    i, _ = sch.get_sp_iters(sch.get_sparse_iteration("spmv"))
    _, reduce, _ = sch.precompute("Y", i, [])
    sch.lower()
    sch.rewrite(opaque_step_loop, reduce)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_rows_of_any_length(idtype):
    program = PROGRAMS["spmv"].make("float64", idtype)
    kernel = sparsetir.build(program, schedule=one_at_a_time)
    text = kernel.stages["III"].script()
    assert "while j_at[0] < J_indptr[vi + 1]" in text.replace("T.int64(1)", "1"), text
    for counts in ([], [0], [3], [0, 1, 0, 7, 40, 0, 2], [0, 0, 0]):
        rng = np.random.default_rng(len(counts))
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(idtype)
        indices = np.concatenate(
            [np.sort(rng.choice(50, count, replace=False)) for count in counts] or [[]]
        ).astype(idtype)
        a, x, y = rng.random(indptr[-1]), rng.random(50), np.full(len(counts), np.nan)
        kernel(a=a, x=x, y=y, indptr=indptr, indices=indices)
        np.testing.assert_allclose(y, sp.csr_array((a, indices, indptr), (len(counts), 50)) @ x)


def test_refused_step_loops():
    sch = sparsetir.Schedule(PROGRAMS["spmv"].make("float32", "int32"))
    i, _ = sch.get_sp_iters(sch.get_sparse_iteration("spmv"))
    sch.precompute("Y", i, [])
    sch.lower()
    with pytest.raises(sparsetir.ScheduleError, match="'step': expected a parameter, got 'steps'"):
        sch.rewrite(opaque_step_loop, "spmv_reduce", "steps")
    with pytest.raises(sparsetir.ScheduleError, match="expected a block in a loop, got 'spmv_st"):
        sch.rewrite(opaque_step_loop, "spmv_start")
    with pytest.raises(sparsetir.ScheduleError, match="expected a sparse iteration among"):
        sch.rewrite(opaque_step_loop, "spmm")


def test_an_init_in_the_loop_is_refused():
    sch = sparsetir.Schedule(PROGRAMS["spmv"].make("float32", "int32"))
    sch.lower()
    with pytest.raises(sparsetir.ScheduleError, match="'spmv1', whose init is in the loop"):
        sch.rewrite(opaque_step_loop, "spmv")


def test_loops_of_no_visits_are_not_tiled() -> None:
    """Whose extent nothing may be divided by."""
    sums = small("sums", """
with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
    with T.init():
        Y[i, k] = 0.0
    Y[i, k] = Y[i, k] + A[i, j] * X[j, k]
""", "K = T.dense_fixed(0)", A="I J", X="N K", Y="I K")  # fmt: skip
    assert "T.vectorized" not in sparsetir.build(sums).stages["III"].script()
