"""Sparse times dense on a CPU, of matrices of which a fifth and more is stored: pruned weights.

Rows go in panels of a few, in each the columns that hold the same of its rows together
(:mod:`sparsetir.sparse_ir.schedule.patterns`): each pattern has a loop of its own, in which a row
of B is loaded once for all its rows. The sums of a panel, its rows by some vectors of features,
stay in registers over all patterns. (Albakri and Cheshmi, enumerate-and-sparse-coarsen, section 3:
`rows` is their UFi, the vectors of a tile their WarpTile. A panel is one worker's: no atomics.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetir.schedules.arguments import expect, expect_at_least, expect_integers
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    InOrder,
    Spmm,
    accumulator,
)
from sparsetir.schedules.passes.one_by_one import one_by_one
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.feature_tiles import Tiled, in_tiles
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.sparse_ir.schedule import Schedule

__all__ = ["PanelRows", "apply", "arrange"]

MOST_ROWS = 6  # of a panel: 63 loops
ROWS_UNPACKED = 4  # from which on values are read by their places


@dataclass(frozen=True)
class PanelRows(Tiled):
    """How a CPU kernel is made.

    rows : of a panel, 2 to 6; the code has 2**rows - 1 loops
    tile, lanes, feat : features, as in :class:`sparsetir.schedules.templates.spmm.RowBlocks`
    pack : copy the tile's features of B together before, in the type of the sums
    blocks : parts of the panels; they and the tiles are divided among the threads; not compiled in
    parallel : use all threads; to wake them takes as long as a small product
    packed : values come in the order of the panels, in an array of their own; else each is read
        where it is in the matrix, by its place, and needs no preparation
    """

    rows: int = 4
    tile: int = 64
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    blocks: int = 1
    parallel: bool = True
    packed: bool = True

    def __post_init__(self) -> None:
        expect_integers(self, "rows", "blocks")
        expect_at_least(self, blocks=1)
        expect(self, "rows", 2 <= self.rows <= MOST_ROWS, f"2 to {MOST_ROWS}")
        _ = self.by_rows  # which checks the others

    @property
    def unpacked(self) -> PanelRows | RowBlocks:
        """For values that come with each run, in the order of the matrix.

        To read the place of a value takes less than the sums that follow, and what is left of the
        gain pays where panels have four rows and more (see
        :mod:`sparsetir.schedules.search.choose_panels`).
        """
        return replace(self, packed=False) if self.rows >= ROWS_UNPACKED else self.by_rows

    @property
    def by_rows(self) -> RowBlocks:
        """For patterns whose columns are not in order, or there more than once: rows alone."""
        return RowBlocks(
            self.tile, self.lanes, self.feat, self.pack, self.pack, 0, 1, self.blocks, self.parallel
        )  # fmt: skip

    @property
    def compiled(self) -> PanelRows:
        """What a kernel depends on: the same for all numbers of blocks."""
        return replace(self, blocks=1)


def apply(sch: Schedule, config: PanelRows) -> None:
    """Schedule a program that reduces over what rows store, by primitives of both stages.

    Before (stage I), and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I_panels], "SS", "spmm") as [k0, i_panel]:
            with T.sp_iter([I_rows, K1, K2], "SSS", "spmm_start") as [i_row, k1, k2]: ...
            ...  # spmm_reduce over [I_patterns, I_entries, I_rows, K1, K2], "RRSSS": loops over
                 # patterns, rows of a panel and vectors are unrolled
            with T.sp_iter([I_rows, K1, K2], "SSS", "spmm_write") as [i_row, k1, k2]: ...
    """
    found = row_reduction(sch, "PanelRows")
    over = {b.name: [a.name for a in b.axes or ()] for b in sch.func.buffers}
    elements = [found.rows.axes[0], found.columns[0].axes[0]]
    panels, patterns, entries, rows = sch.patterns(found.rows, found.columns[0], config.rows)
    tiles, vectors = in_tiles(sch, found.features, config)
    outer = [*found.heads, tiles]
    if config.parallel:
        blocks, panels = sch.divide(panels, "blocks", by="positions", default=1)
        outer.append(blocks)
    order = [*outer, panels, patterns, entries, rows, *vectors]
    sch.sparse_reorder(found.iteration, order)
    total = accumulator(found.dtype)
    held = [rows, *vectors]
    start, reduce, write = sch.precompute(found.result, panels, held, dtype=total)
    for name in [name for name, axes in over.items() if config.packed and axes == elements]:
        sch.pack(name, reduce)
    copies = []
    if config.pack and found.gathered is not None:
        whole = [found.gathered_axis, *vectors]
        copies = sch.precompute(found.gathered, outer[-1], whole, scope="global", dtype=total)
    if config.parallel:
        sch.parallelize(outer)
    stage_two = sch.lower()
    for step in (start, reduce, write):
        in_vectors(stage_two, step, len(held))
    for step in copies:
        in_vectors(stage_two, step, len(vectors))
    loops = stage_two.get_loops(stage_two.get_sblock(f"{reduce.name}0"))
    stage_two.unroll(loops[-1])
    sch.rewrite(one_by_one, reduce, "I_step")


def arrange(matrix: CsrPattern, problem: Spmm, config: PanelRows) -> Arranged:
    """CSR as it is, in as many blocks of panels."""
    del problem
    blocks = max(1, min(config.blocks, -(-matrix.shape[0] // config.rows)))
    return Arranged(InOrder(matrix, not config.packed), matrix.arguments(), {"blocks": blocks})
