"""SpMM over CSR on a GPU: a thread block holds a few rows, its threads the features.

A row of threads (`threadIdx.x`) computes a tile of features of one row of C. Each thread keeps
`coarsen` vectors of neighbouring features in registers: B is read, and C written, in vectors that
are contiguous across neighbouring threads. (GE-SpMM, section 3.) There are no atomics, since each
row of C belongs to one row of threads.

    blockIdx.x, threadIdx.y    rows
    blockIdx.y                 tiles of threads * coarsen * vector features
    blockIdx.z                 heads of a batch
    threadIdx.x                vectors within a tile

All threads of a row need the same column indices and values. By default each loads them itself: all
from one address, which the L1 cache serves at once. With `row_cache`, each thread loads one element
of a chunk into shared memory for all of them (GE-SpMM's coalesced row caching). That needs barriers
inside a loop as long as the row, which only threads of one row execute equally often: a block then
has one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import s_tir, tirx

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.gpu.features import (
    MAX_OCCUPANCY,
    MAX_SUMS,
    MAX_THREADS,
    GpuTiled,
    bound_rows,
    in_registers,
    occupy,
    over_blocks,
    reads_of_elements,
    row_sums,
    vector_width,
)
from sparsetir.schedules.gpu.passes.row_loops import opaque_row_index
from sparsetir.schedules.passes.nests import with_buffer
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.template import SearchInput, Tried, around
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.tir import as_dtype, dtype_of


@dataclass(frozen=True)
class RowSplit(GpuTiled):
    """The distribution of rows and features over threads.

    threads : threads per row
    rows_per_block : rows of a thread block
    row_cache : stage column indices and values in shared memory; with one row per block
    Other fields as in :class:`sparsetir.schedules.gpu.features.GpuTiled`.
    """

    threads: int = number(32)
    rows_per_block: int = number(4)
    vector: int = number(4)
    coarsen: int = number(1)
    feat: int | None = number(None, optional=True)
    row_cache: bool = False
    occupancy: int | None = number(1024, most=MAX_OCCUPANCY, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_product("rows_per_block", MAX_THREADS, "threads", "rows_per_block")
        self.check_product("coarsen", MAX_SUMS, "coarsen", "vector")
        alone = not self.row_cache or self.rows_per_block == 1
        wanted = "rows_per_block = 1, since barriers lie in the loop over a row"
        expect(self, "row_cache", alone, wanted, self.rows_per_block)

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32") -> RowSplit:
        """A configuration for a feature size, without idle threads if the size allows it.

        The size is a constant of the kernel, which saves a third of its instructions.
        """
        vector = vector_width(feat, dtype)
        vectors = feat // vector
        threads = max(t for t in range(1, 129) if vectors % t == 0)
        if threads < 16 < vectors:  # e.g. a prime number
            threads = 32
        return cls(threads, max(1, 128 // threads), vector, feat=feat)


def apply(sch: Schedule, config: RowSplit) -> None:
    """Schedule a reduction over the elements of rows, by primitives of both stages.

    :func:`sparsetir.schedules.gpu.features.row_sums` shows the part in stage I.
    Raises ScheduleError for a program of another form, and for vectors of more than 16 bytes.
    """
    reduction = row_reduction(sch, "RowSplit")
    config.check_vector(reduction.dtype)
    bound_rows(sch, reduction)
    sums = row_sums(sch, reduction, config)
    tiles, *heads, rows, threads = sch.get_sp_iters(reduction.iteration)
    sch.sparse_reorder(reduction.iteration, [*heads, tiles, rows, threads])
    over_blocks(sch, heads, tiles)
    if config.rows_per_block > 1:
        sch.parallelize(rows, "thread", per_block=config.rows_per_block)
    else:
        sch.parallelize(rows, "block")
    sch.parallelize(threads, "thread")
    loops = sch.lower()
    for step in sums.scalars + sums.vectors:
        in_registers(loops, loops.get_sblock(step.block), vectors=step in sums.vectors)
    block = reduction.iteration.block
    chunk = _cache_rows(loops, block, sums.reduce.block) if config.row_cache else None
    sch.rewrite(opaque_row_index, block)
    occupy(sch, config, config.threads * config.rows_per_block)
    if chunk is not None:
        sch.rewrite(_in_chunks, chunk)


def _cache_rows(loops: Any, rows: str, elements: str) -> int:
    """Let each thread of a row load one element of every chunk into shared memory.

    rows, elements : blocks
    Returns the number of elements per chunk.
    """
    threads = loops.get_loops(loops.get_sblock(rows))[-1]
    chunk = int(loops.get(threads).extent)
    block = loops.get_sblock(elements)
    chunks, _ = loops.split(loops.get_loops(block)[0], [None, chunk])
    for read in reads_of_elements(loops, block):
        copy = loops.cache_read(block, read, "shared")
        loops.compute_at(copy, chunks)
        run_in_parallel(loops, loops.get_loops(copy)[-1], "threadIdx.x")
    return chunk


def _in_chunks(func: tirx.PrimFunc, chunk: int) -> tirx.PrimFunc:
    """Shorten the cached rows to a chunk: TVM makes them as long as the row."""
    blocks = nodes_of(s_tir.SBlock, func.body)
    arrays = [b for x in blocks for b in x.alloc_buffers if b.ty.storage_scope == "shared"]
    for array in arrays:
        small = buffer_var([chunk], array.ty.dtype, array.name, "shared")
        func = with_buffer(func, array, small, partial(_within, chunk))
    return func


def _within(chunk: int, indices: list[Any]) -> list[Any]:
    return [tirx.floormod(indices[-1], as_dtype(chunk, dtype_of(indices[-1])))]


def choices(search: SearchInput) -> Tried:
    """The choices around the candidates."""
    configs = search.own(RowSplit)
    vector = configs[0].vector
    return around(
        configs, threads=(t for t in (8, 16, 32, 64) if t <= 2 * (search.given.feat // vector)),
        rows_per_block=(1, 2, 4, 8), vector=[max(1, vector // 2)], coarsen=(1, 2),
        row_cache=(False, True), occupancy=(None, 1024),
    )  # fmt: skip
