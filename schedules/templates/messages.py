"""Messages of edges and their reduction at the targets, on CPUs and GPUs.

As in :mod:`sparsetir.schedules.templates.spmm`, a tile of features of a row is reduced in
registers, and threads get rows with equal numbers of elements.
"""

from __future__ import annotations

from sparsetir.schedules.operators.messages import Messages, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.message_tiles import ROW_COST, Tile, bind_threads
from sparsetir.schedules.templates.shapes import RowReduction, row_results
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef

__all__ = ["Messages", "apply", "program"]


def apply(sch: Schedule, config: Tile) -> None:
    """Schedule a program that reduces over what rows store, for one or more results.

    Before (stage I), and after for threads of a CPU::

        with T.sp_iter([I, H, J, K], "SSRS", "gspmm") as [i, h, j, k]: ...

        with T.sp_iter([I_parts, T.part(I, I_part), H, K0], "SSSS", "gspmm") as [..]:
            ...  # gspmm_start, gspmm_reduce, gspmm_write over vectors of a tile
    """
    results = row_results(sch, "messages")
    steps = [step for found in results for step in _tiled(sch, found, config)]
    stage_two = sch.lower()
    if config.gpu:
        for found in results:
            bind_threads(stage_two, f"{found.iteration.name}0")
        return
    for step in steps:
        in_vectors(stage_two, step)


def _tiled(sch: Schedule, found: RowReduction, config: Tile) -> list[SparseIterationRef]:
    """Reduce a tile of features in registers, in rows over threads; the steps of a tile."""
    tiles, *vectors = sch.split(found.features, [None, config.vectors, config.lanes], tail="shift")
    outer, rows = [], found.rows
    if config.parallel:
        block, rows = sch.divide(rows, config.blocks, by="work", cost=ROW_COST)
        outer.append(block)
    inner = [rows, *found.heads, tiles]
    sch.sparse_reorder(found.iteration, [*outer, *inner, *found.columns, *vectors])
    wide = accumulator(found.dtype) if found.reduces else None
    steps = sch.precompute(found.result, tiles, vectors, dtype=wide, hoist=found.reduces)
    if config.parallel:
        sch.parallelize(outer)
    return steps
