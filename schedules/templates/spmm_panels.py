"""Sparse times dense on a CPU, of matrices of which a fifth and more is stored: pruned weights.

Rows go in panels of a few, in each the columns that hold the same of its rows together
(:mod:`sparsetir.sparse_ir.schedule.patterns`): each pattern has a loop of its own, in which a row
of B is loaded once for all its rows. The sums of a panel, its rows by some vectors of features,
stay in registers over all patterns. (Albakri and Cheshmi, enumerate-and-sparse-coarsen, section 3:
`rows` is their UFi, the vectors of a tile their WarpTile. A panel is one worker's: no atomics.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    InOrder,
    Spmm,
    accumulator,
)
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.cases import cases
from sparsetir.schedules.passes.one_by_one import one_by_one
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.shapes import RowReduction, row_reduction
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.sparse_ir.computed import buffers_made_by, parameters_made_by
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.recipes.general import constant
from sparsetir.sparse_ir.recipes.patterns import pattern_counts
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef

MOST_ROWS = 6  # of a panel: 63 loops
MOST_COMPACT = 8
ROWS_UNPACKED = 4  # from which on values are read by their places


@dataclass(frozen=True)
class PanelRows(register_tile.RegisterTile):
    """How a CPU kernel is made.

    rows : of a panel, 2 to 6, or with `compact` to 8; the code has 2**rows - 1 loops
    compact : code by the number of a pattern's rows, `rows` loops instead of 2**rows - 1 (section
        3.5), which compile sooner. Sums are in registers for a pattern at a time and added to the
        result, so that tiles must be whole, and results no narrower than sums
    others : as of :class:`RegisterTile`
    """

    rows: int = number(4, least=None)
    tile: int = number(64, most=register_tile.MAX_TILE)
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    blocks: int = number(1, compiled=1)
    parallel: bool = True
    packed: bool = True
    compact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MOST_COMPACT if self.compact else MOST_ROWS
        wanted = f"2 to {most}" + ("" if self.compact else f", or with compact=True {MOST_COMPACT}")
        expect(self, "rows", 2 <= self.rows <= most, wanted)
        whole = self.feat is None or self.feat % self.tile == 0
        wanted = f"a divisor of feat = {self.feat}, as results of overlapping tiles cannot be added"
        expect(self, "tile", whole or not self.compact, wanted)
        expect(self, "packed", self.packed or not self.compact, "True with 'compact'")

    @property
    def unpacked(self) -> PanelRows | RowBlocks:
        """For values that come with each run, in the order of the matrix.

        To read the place of a value takes less than the sums that follow, and what is left of the
        gain pays where panels have four rows and more (see
        :mod:`sparsetir.schedules.search.choose_panels`).
        """
        by_places = self.rows >= ROWS_UNPACKED and not self.compact
        return replace(self, packed=False) if by_places else self.by_rows

    @property
    def by_rows(self) -> RowBlocks:
        """For patterns whose columns are not in order, or there more than once: rows alone."""
        return RowBlocks(
            self.tile, self.lanes, self.feat, self.pack, self.pack, 0, 1, self.blocks, self.parallel
        )  # fmt: skip


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
    total = accumulator(found.dtype)
    if config.compact and total != found.dtype:
        raise ScheduleError(
            f"PanelRows: argument 'config': expected compact=False for {found.dtype}, which would "
            "be rounded with each pattern that is added, got compact=True"
        )
    values = register_tile.packed_values(sch, found) if config.packed else ()
    by = "count" if config.compact else "pattern"
    panels, patterns, entries, rows = sch.patterns(found.rows, found.columns[0], config.rows, by=by)
    tables = buffers_made_by(sch.func, pattern_counts)
    blocks, panels = register_tile.in_blocks(sch, panels, config, by="positions")
    # Of a panel are its own rows, also where a table says which of them.
    steps = register_tile.in_registers(
        sch, found, config, [panels], [patterns, entries], shared=[*found.heads, *blocks],
        held=[rows], tiles_at=len(found.heads), at=patterns if config.compact else panels,
        pack=config.pack, race="ignore" if config.compact else "none", dtype=total,
    )  # fmt: skip
    (start, _), (reduce, _), *_ = steps
    for name in values:
        sch.pack(name, reduce)
    if config.compact:
        steps.append((_set_before(sch, found, config), 2))
    stage_two = register_tile.straight_code(sch, steps)
    if not config.compact:
        loops = stage_two.get_loops(stage_two.get_sblock(f"{reduce.name}0"))
        stage_two.unroll(loops[-1])
    (step,) = parameters_made_by(sch.func, constant)
    sch.rewrite(one_by_one, reduce, step)
    if config.compact:
        block = register_tile.block_around(stage_two, f"{start.name}0")
        sch.rewrite(cases, block, tables[0], range(1, config.rows + 1))


def _set_before(sch: Schedule, found: RowReduction, config: PanelRows) -> SparseIterationRef:
    """The init of all rows before they are added to, in vectors."""
    init = sch.get_sparse_iteration(f"{found.iteration.name}_init")
    *outer, features = sch.get_sp_iters(init)
    tiles, vectors = register_tile.in_tiles(sch, features, config)
    sch.sparse_reorder(init, [*outer, tiles, *vectors])
    if config.parallel:
        sch.parallelize(outer)
    return init


def arrange(matrix: CsrPattern, problem: Spmm, config: PanelRows) -> Arranged:
    """CSR as it is, in as many blocks of panels."""
    del problem
    blocks = max(1, min(config.blocks, -(-matrix.shape[0] // config.rows)))
    return Arranged(InOrder(matrix, not config.packed), matrix.arguments(), {"blocks": blocks})


register(Template(PanelRows, Spmm, program, apply, arrange))
