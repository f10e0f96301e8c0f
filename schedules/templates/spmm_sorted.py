"""Sparse times dense on a CPU, of matrices with many short rows and few features: graphs.

Rows go in the order of their lengths (:mod:`sparsetir.sparse_ir.schedule.by_length`): where a
processor has not foreseen the end of a row, it loses as much time as some elements take. For other
matrices :class:`sparsetir.schedules.templates.spmm.RowBlocks` has less to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetir.schedules.arguments import expect_at_least, expect_integers
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    InOrder,
    Spmm,
    accumulator,
)
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.feature_tiles import Tiled, in_tiles
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.schedules.templates.spmm import ROW_COST, RowBlocks
from sparsetir.sparse_ir.schedule import Schedule

__all__ = ["SortedRows", "apply", "arrange"]


@dataclass(frozen=True)
class SortedRows(Tiled):
    """How a CPU kernel is made.

    tile, lanes, feat : features, as in :class:`sparsetir.schedules.templates.spmm.RowBlocks`
    window : rows that are sorted together
    blocks, parallel, ahead : threads, as there
    packed : values come in the order of the rows, in an array of their own; else each is read where
        it is in the matrix, by its place, and needs no preparation
    """

    tile: int = 32
    lanes: int = 16
    feat: int | None = None
    window: int = 4096
    blocks: int = 1
    parallel: bool = True
    packed: bool = True
    ahead: int = 0

    def __post_init__(self) -> None:
        expect_integers(self, "window", "blocks", "ahead")
        expect_at_least(self, window=1, blocks=1, ahead=0)
        _ = RowBlocks(self.tile, self.lanes, self.feat)  # which checks the others

    @property
    def unpacked(self) -> SortedRows:
        """For values that come with each run, in the order of the matrix."""
        return replace(self, packed=False)

    @property
    def compiled(self) -> SortedRows:
        """What a kernel depends on: the same for all numbers of blocks."""
        return replace(self, blocks=1, ahead=0)


def apply(sch: Schedule, config: SortedRows) -> None:
    """Schedule a program that reduces over what rows store, by primitives of both stages.

    Before (stage I), and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([I_sorted, K0], "SS", "spmm") as [i_sorted, k0]:
            ...  # spmm_start, spmm_reduce over I_elements, spmm_write, over vectors of a tile
    """
    found = row_reduction(sch, "SortedRows")
    over = {b.name: [a.name for a in b.axes or ()] for b in sch.func.buffers}
    elements = [found.rows.axes[0], found.columns[0].axes[0]]
    rows, columns = sch.by_length(found.rows, found.columns[0], config.window)
    tiles, vectors = in_tiles(sch, found.features, config)
    outer = [*found.heads]
    if config.parallel:
        blocks, rows = sch.divide(
            rows, "blocks", by="work", cost=ROW_COST, default=1, ahead="ahead"
        )
        outer.append(blocks)
    sch.sparse_reorder(found.iteration, [*outer, rows, tiles, columns, *vectors])
    total = accumulator(found.dtype)
    steps = sch.precompute(found.result, tiles, vectors, dtype=total, hoist=True)
    for name in [name for name, axes in over.items() if config.packed and axes == elements]:
        sch.pack(name, steps[1])
    if config.parallel:
        sch.parallelize(outer)
    stage_two = sch.lower()
    for step in steps:
        in_vectors(stage_two, step, len(vectors))


def arrange(matrix: CsrPattern, problem: Spmm, config: SortedRows) -> Arranged:
    """CSR as it is, in as many blocks of rows."""
    del problem
    blocks = max(1, min(config.blocks, matrix.shape[0]))
    numbers = {"blocks": blocks, "ahead": config.ahead}
    return Arranged(InOrder(matrix, not config.packed), matrix.arguments(), numbers)
