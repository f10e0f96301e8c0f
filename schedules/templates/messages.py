"""Messages of edges and their reduction at the targets, on CPUs and GPUs.

As in :mod:`sparsetir.schedules.templates.spmm`, a tile of features of a row is reduced in
registers, and threads get rows with equal numbers of elements.
"""

from __future__ import annotations

from sparsetir.schedules.operators.messages import Messages, program
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.templates.message_tiles import (
    Tile,
    features_in_tiles,
    finish,
    rows_in_blocks,
)
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
    finish(sch, config, [found.iteration for found in results], steps)


def _tiled(sch: Schedule, found: RowReduction, config: Tile) -> list[SparseIterationRef]:
    """Reduce a tile of features in registers, in rows over threads; the steps of a tile."""
    tiles, *vectors = features_in_tiles(sch, found.features, config)
    rows = rows_in_blocks(sch, found.rows, config)
    order = [*rows, *found.heads, tiles, *found.columns, *vectors]
    sch.sparse_reorder(found.iteration, order)
    wide = accumulator(found.dtype) if found.reduces else None
    steps = sch.precompute(found.result, tiles, vectors, dtype=wide, hoist=found.reduces)
    if config.parallel:
        sch.parallelize(rows[:1])
    return steps
