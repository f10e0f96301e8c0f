"""Schedules for GPUs of Senanayake's thesis (appendix A), line by line beside their originals.

As `thesis_schedules.py`, which has the programs and those for CPUs. Two things differ throughout:

- A row's first value, which TACO sets by a `memset` before the kernel, is an iteration of its own.
- Of loops over blocks and warps the thesis ignores races where the loop over threads inside has
  atomics. Here `race` is said of the loops whose visits meet; of others it is proven.

    python examples/thesis_gpu_schedules.py --only A.2 --stage III

prints what one becomes; no GPU is needed for that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from thesis_schedules import mttkrp3, spmm, spmv

import sparsetir
from sparsetir import Schedule

WARP_SIZE = 32
BLOCK_SIZE = 512


def a2_spmv(sch: Schedule) -> None:
    """A.2, "SPMV GPU"."""
    NNZ_PER_THREAD = 7
    it = sch.get_sparse_iteration("spmv")
    i, j = sch.get_sp_iters(it)
    # IndexExpr precomputedExpr = A(i, j) * x(j);
    # (the expression is not named: it is what is added to y)
    # stmt.fuse(i, j, f)
    f = sch.sparse_fuse(it, [i, j])
    #     .pos(f, fpos, A(i, j))
    # (TACO makes i_blockStarts, and searches between two of them, by itself)
    fpos = sch.positions(f, rows="blocks")
    #     .split(fpos, block, fpos1, NNZ_PER_TB)
    #     .split(fpos1, warp, fpos2, NNZ_PER_WARP)
    #     .split(fpos2, thread, thread_nz, NNZ_PER_THREAD)
    warps = BLOCK_SIZE // WARP_SIZE
    block, warp, thread, thread_nz = sch.split(
        fpos, [None, warps, WARP_SIZE, NNZ_PER_THREAD], tail="repeat"
    )
    #     .order({block, warp, thread, thread_nz})
    sch.sparse_reorder(it, [block, warp, thread, thread_nz])
    #     .precompute(precomputedExpr, thread_nz, thread_nz_pre, precomputed)
    start, reduce, write = sch.precompute("Y", thread, [thread_nz], name="precomputed")
    # (no counterpart: TACO adds up the elements of a row in a register by itself)
    sch.segment_accumulate(*sch.get_sp_iters(write))
    #     .parallelize(block, ParallelUnit::GPUBlock, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(block, "block", race="atomics")
    #     .parallelize(warp, ParallelUnit::GPUWarp, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(warp, "warp", race="atomics")
    #     .parallelize(thread, ParallelUnit::GPUThread, OutputRaceStrategy::Atomics)
    sch.parallelize(thread, "thread", race="atomics")
    #     .unroll(thread_nz_pre, NNZ_PER_THREAD)
    # (unrolling is stage II)
    unroll(sch, start, reduce)


def a4_spmm(sch: Schedule) -> None:
    """A.4, "SPMM GPU", for 128 columns."""
    NUM_COLS = 128
    NNZ_PER_WARP = 16
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    # stmt.order({i, j, k})
    #   .fuse(i, j, f)
    f = sch.sparse_fuse(it, [i, j])
    #   .pos(f, fpos, A(i, j))
    # (TACO makes i_blockStarts, and searches between two of them, by itself)
    fpos = sch.positions(f, rows="blocks")
    #   .split(fpos, block, fpos1, NNZ_PER_TB)
    #   .split(fpos1, warp, nnz, NNZ_PER_WARP)
    warps = BLOCK_SIZE // WARP_SIZE
    block, warp, nnz = sch.split(fpos, [None, warps, NNZ_PER_WARP], tail="repeat")
    #   .split(k, dense_val_unbounded, thread, WARP_SIZE)
    #   .bound(dense_val_unbounded, dense_val, NUM_COLS / WARP_SIZE, BoundType::MaxExact)
    sch.bound(k, NUM_COLS, "exact")
    dense_val, thread = sch.split(k, [None, WARP_SIZE])
    #   .order({block, warp, dense_val, thread, nnz})
    sch.sparse_reorder(it, [block, warp, dense_val, thread, nnz])
    # (no counterpart: TACO adds up the elements of a row in a register by itself)
    sch.segment_accumulate(nnz)
    #   .parallelize(block, ParallelUnit::GPUBlock, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(block, "block", race="atomics")
    #   .parallelize(warp, ParallelUnit::GPUWarp, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(warp, "warp", race="atomics")
    #   .parallelize(thread, ParallelUnit::GPUThread, OutputRaceStrategy::Atomics)
    sch.parallelize(thread, "thread", race="none")


def a8_mttkrp3(sch: Schedule) -> None:
    """A.8, "MTTKRP GPU", for 32 columns."""
    NUM_COLS = 32
    NNZ_PER_WARP = 4
    it = sch.get_sparse_iteration("mttkrp")
    i, *kl, j = sch.get_sp_iters(it)
    # stmt.order({i,k,l,j})
    #     .fuse(k, l, kl)
    #     .fuse(i, kl, f)
    f = sch.sparse_fuse(it, [i, *kl])
    #     .pos(f, fpos, B(i, k, l))
    # (TACO makes i_blockStarts, and searches between two of them, by itself)
    fpos = sch.positions(f, rows="blocks")
    #     .split(fpos, block, fpos1, NNZ_PER_TB)
    #     .split(fpos1, warp, nnz, NNZ_PER_WARP)
    warps = BLOCK_SIZE // WARP_SIZE
    block, warp, nnz = sch.split(fpos, [None, warps, NNZ_PER_WARP], tail="repeat")
    #     .split(j, dense_val_unbounded, thread, WARP_SIZE)
    #     .bound(dense_val_unbounded, dense_val, NUM_COLS / WARP_SIZE, BoundType::MaxExact)
    sch.bound(j, NUM_COLS, "exact")
    dense_val, thread = sch.split(j, [None, WARP_SIZE])
    #     .order({block, warp, dense_val, thread, nnz})
    sch.sparse_reorder(it, [block, warp, dense_val, thread, nnz])
    # (no counterpart: TACO adds up the elements of a row in a register by itself)
    sch.segment_accumulate(nnz)
    #     .parallelize(block, ParallelUnit::GPUBlock, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(block, "block", race="atomics")
    #     .parallelize(warp, ParallelUnit::GPUWarp, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(warp, "warp", race="atomics")
    #     .parallelize(thread, ParallelUnit::GPUThread, OutputRaceStrategy::Atomics)
    sch.parallelize(thread, "thread", race="none")


def a9_spmv_row(sch: Schedule) -> None:
    """A.9, "SpMV Thread per Row on GPU"."""
    ROWS_PER_TB = BLOCK_SIZE
    it = sch.get_sparse_iteration("spmv")
    i, j = sch.get_sp_iters(it)
    # (no counterpart: TACO adds up a row in a register by itself)
    sch.precompute("Y", i, [])
    # stmt.split(i, block, thread, ROWS_PER_TB)
    #     .parallelize(block, ParallelUnit::GPUBlock, OutputRaceStrategy::NoRaces)
    #     .parallelize(thread, ParallelUnit::GPUThread, OutputRaceStrategy::NoRaces)
    sch.parallelize(i, "thread", race="none", per_block=ROWS_PER_TB)


def a10_spmv_warp(sch: Schedule) -> None:
    """A.10, "SpMV Warp per Row on GPU"."""
    it = sch.get_sparse_iteration("spmv")
    i, j = sch.get_sp_iters(it)
    #     .pos(j, jpos, A(i, j))
    #     .split(jpos, thread_nz, thread, WARP_SIZE)
    thread_nz, thread = sch.strip_mine_rows(j, WARP_SIZE)
    #     .order({block, warp, warp_row, thread, thread_nz})
    sch.sparse_reorder(it, [i, thread, thread_nz])
    # (no counterpart: TACO adds up what a thread has in a register by itself)
    sch.precompute("Y", thread, [])
    # stmt.split(i, block, block_row, ROWS_PER_TB)
    #     .split(block_row, warp_row, warp, BLOCK_SIZE / WARP_SIZE)
    #     .parallelize(block, ParallelUnit::GPUBlock, OutputRaceStrategy::IgnoreRaces)
    #     .parallelize(warp, ParallelUnit::GPUWarp, OutputRaceStrategy::IgnoreRaces)
    # (a warp has one row, so that there is no loop over warp_row)
    sch.parallelize(i, "warp", race="none", per_block=BLOCK_SIZE // WARP_SIZE)
    #     .parallelize(thread, ParallelUnit::GPUThread, OutputRaceStrategy::Temporary)
    sch.parallelize(thread, "thread", race="temporary")


def a11_spmv(sch: Schedule) -> None:
    """A.11, "SpMV on GPU with no Unrolling"."""
    NNZ_PER_THREAD = 7
    it = sch.get_sparse_iteration("spmv")
    i, j = sch.get_sp_iters(it)
    # stmt.fuse(i, j, f)
    f = sch.sparse_fuse(it, [i, j])
    #     .pos(f, fpos, A(i, j))
    # (TACO makes i_blockStarts, and searches between two of them, by itself)
    fpos = sch.positions(f, rows="blocks")
    #     .split(fpos, block, fpos1, NNZ_PER_TB)
    #     .split(fpos1, warp, fpos2, NNZ_PER_WARP)
    #     .split(fpos2, thread, thread_nz, NNZ_PER_THREAD)
    warps = BLOCK_SIZE // WARP_SIZE
    block, warp, thread, thread_nz = sch.split(
        fpos, [None, warps, WARP_SIZE, NNZ_PER_THREAD], tail="repeat"
    )
    #     .order({block, warp, thread, thread_nz})
    sch.sparse_reorder(it, [block, warp, thread, thread_nz])
    # (no counterpart: TACO adds up the elements of a row in a register by itself)
    sch.segment_accumulate(thread_nz)
    #     .parallelize(block, ParallelUnit::GPUBlock, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(block, "block", race="atomics")
    #     .parallelize(warp, ParallelUnit::GPUWarp, OutputRaceStrategy::IgnoreRaces)
    sch.parallelize(warp, "warp", race="atomics")
    #     .parallelize(thread, ParallelUnit::GPUThread, OutputRaceStrategy::Atomics)
    sch.parallelize(thread, "thread", race="atomics")


def unroll(sch: Schedule, *steps: Any) -> None:
    """Stage II: the innermost loops of some steps, unrolled."""
    stage_two = sch.lower()
    for step in steps:
        stage_two.unroll(stage_two.get_loops(stage_two.get_sblock(f"{step.name}0"))[-1])


# (name in the appendix, program, schedule)
GPU_SCHEDULES: list[tuple[str, Callable[..., Any], Callable[[Schedule], None]]] = [
    ("A.2", spmv, a2_spmv),
    ("A.4", spmm, a4_spmm),
    ("A.8", mttkrp3, a8_mttkrp3),
    ("A.9", spmv, a9_spmv_row),
    ("A.10", spmv, a10_spmv_warp),
    ("A.11", spmv, a11_spmv),
]


def main() -> None:
    """Print what each becomes."""
    parser = argparse.ArgumentParser(description="Schedules of Senanayake's thesis for GPUs.")
    parser.add_argument("--stage", choices=("I", "II", "III"), default="I", help="(default: I)")
    parser.add_argument("--only", metavar="NAME", help="one of them, such as A.2")
    options = parser.parse_args()
    target = {"kind": "cuda", "arch": "sm_90"}
    for name, program, schedule in GPU_SCHEDULES:
        if options.only in (None, name):
            print(f"# {name}, {schedule.__name__}")
            print(sparsetir.lower(program(), schedule, target=target)[options.stage].script())


if __name__ == "__main__":
    main()
