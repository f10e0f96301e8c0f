"""Passes over what a schedule has lowered: vectors and prefetching, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

import sparsetir
from schedule_common import opened, program, says, table
from sparsetir.schedules.passes.parallel_loops import in_vectors, run_in_parallel
from sparsetir.schedules.passes.prefetch import prefetch_gathered
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
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    says(code, words, globals(), ScheduleError)
