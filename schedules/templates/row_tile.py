"""Rows of any storage reduced into tiles of dense features (CPU): C[i, k] += A[i, j] * B[j, k].

The optimisations, in order of effect: all features of a tile are accumulated in registers; gathered
operands stay in cache (tiles of features outermost, then parts of the columns; both packed if rows
of B are far apart); gathered rows are prefetched; threads get rows with equal numbers of nonzeros.
(SparseTIR, section 4.2.1; Senanayake et al., section 8.)

Rows may be visited in other orders:

- by length (`window`, :mod:`sparsetir.sparse_ir.schedule.sort_rows_by_length`), for matrices with
  many short rows: a mispredicted end of a row costs as much time as some elements
- in row panels of a few (`rows`), in each the columns with the same set of its rows together
  (:mod:`sparsetir.sparse_ir.schedule.group_columns_by_pattern`), for pruned weights: each pattern
  has its own loop, in which a row of B is loaded once for all of its rows, and the sums of a panel
  stay in registers over all patterns. (Albakri and Cheshmi, enumerate-and-sparse-coarsen,
  section 3: `rows` is their UFi, the vectors of a tile their WarpTile. A panel belongs to one
  worker: no atomics.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, Stored, summed
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.opaque_step_loop import opaque_step_loop
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.registers import feat_field, tasks
from sparsetir.schedules.search.shared_columns import SHARED
from sparsetir.schedules.template import SearchInput, Template, Tried, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.register_tile import Straight
from sparsetir.schedules.templates.shapes import RowReduction, row_reduction
from sparsetir.sparse_ir.computed import parameters_made_by
from sparsetir.sparse_ir.recipes.general import constant
from sparsetir.sparse_ir.schedule import Schedule, SpIter

MOST_ROWS = 6  # per panel: 63 loops
ROWS_UNPACKED = 4  # the least for which values are read by position

# For a search: vectors per tile; rows that are sorted together; the most accumulator vectors of a
# panel, since more spill; the least share of places with an element for which panels are tried.
VECTORS = (1, 2, 4, 8, 16)
WINDOWS = (512, 4096)
MOST_SUMS = 30
LEAST = 0.05


@dataclass(frozen=True)
class RowTile(register_tile.RegisterTile):
    """Schedule of a CPU kernel.

    tiles_first : visit all rows for a tile of features, then for the next one; else all tiles for a
        row
    prefetch : nonzeros by which rows of B are prefetched; 0 for never
    parts : parts of the columns that are visited one after the other; their number is not compiled
        in
    blocks : as in :class:`RegisterTile`; 0 if threads take row by row
    window : rows that are sorted by length together; 0 for the order of the matrix
    rows : per panel, 2 to 6; the code has 2**rows - 1 loops. 1 for single rows
    others : as in :class:`RegisterTile`
    """

    tile: int = number(128, most=register_tile.MAX_TILE)
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    tiles_first: bool = True
    prefetch: int = number(0, least=0)
    parts: int = number(1, compiled=2)
    blocks: int = number(1, least=0, compiled=1)
    parallel: bool = True
    ahead: int = number(0, least=0, compiled=0)
    window: int = number(0, least=0)
    rows: int = number(1, most=MOST_ROWS)
    packed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "pack", self.tiles_first or not self.pack, "False without 'tiles_first'")
        one_by_one = self.in_order and self.parts == 1 and not self.pack
        wanted = "1 or more for copies, parts, rows by length and row panels"
        expect(self, "blocks", self.blocks > 0 or one_by_one, wanted)
        whole = self.tail == "exact"
        wanted = f"1 where tiles of {self.tile} features overlap, as {self.feat} is no multiple"
        expect(self, "parts", whole or self.parts == 1, wanted)
        if self.in_row_panels:
            for name, alone in (("parts", 1), ("window", 0), ("prefetch", 0), ("ahead", 0)):
                wanted = f"{alone} with panels of rows"
                expect(self, name, getattr(self, name) == alone, wanted)
            expect(self, "tiles_first", self.tiles_first, "True with panels of rows")
        alone = not self.window or self.parts == 1
        expect(self, "parts", alone, "1 where rows are sorted by length")

    @property
    def in_row_panels(self) -> bool:
        """Whether rows form panels: groups that are visited together, not copies of B."""
        return self.rows > 1

    @property
    def in_order(self) -> bool:
        """Whether elements are visited in the order of the matrix."""
        return not self.window and not self.in_row_panels

    @property
    def unpacked(self) -> RowTile:
        """The config for values passed in each call, in the order of the matrix.

        Reading the position of a value takes less time than the sums that follow, and the remaining
        gain of panels pays if they have at least four rows (see
        :func:`sparsetir.schedules.search.visit_orders.row_panels_pay`).
        """
        if self.in_order:
            return self
        by_places = self.window or self.rows >= ROWS_UNPACKED
        return replace(self, packed=False) if by_places else self.by_rows

    @property
    def by_rows(self) -> RowTile:
        """The config for patterns whose columns are unsorted or duplicated: single rows."""
        return replace(self, rows=1, packed=True, tiles_first=self.pack)


def apply(sch: Schedule, config: RowTile) -> None:
    """Schedule a program that reduces over the elements of rows, by primitives of both stages.

    Before (stage I), and after with tiles first, and with panels of rows::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I_parts, T.part(I, I_part)], "SSS", "spmm") as [k0, i_parts, i]:
            ...  # spmm_start, spmm_reduce, spmm_write over vectors of a tile

        with T.sp_iter([K0, I_panels], "SS", "spmm") as [k0, i_panel]:
            with T.sp_iter([I_rows, K1, K2], "SSS", "spmm_start") as [i_row, k1, k2]: ...
            ...  # spmm_reduce over [I_patterns, I_entries, I_rows, K1, K2], "RRSSS": loops over
                 # patterns, rows of a panel and vectors are unrolled
            with T.sp_iter([I_rows, K1, K2], "SSS", "spmm_write") as [i_row, k1, k2]: ...
    """
    steps, finish = in_tiles(sch, row_reduction(sch, "RowTile"), config, named=True, hoist=True)
    finish(register_tile.straight_code(sch, steps))


# Steps that become straight-line code, and the remaining step for stage II.
Half = tuple[Straight, Callable[[Any], None]]


def in_tiles(
    sch: Schedule, nest: RowReduction, config: RowTile, *, named: bool = False, hoist: bool = False
) -> Half:
    """Schedule one iteration of a program in stage I.

    named : whether numbers that are not compiled in are computed parameters of kernels: `blocks`,
        `parts` and `ahead`
    hoist : as for `precompute`
    """
    if config.in_row_panels:
        return _panels(sch, nest, config, named)
    return _rows(sch, nest, config, named, hoist)


def _blocks(
    sch: Schedule, rows: SpIter | None, config: RowTile, named: bool, **how: Any
) -> tuple[list[SpIter], list[SpIter]]:
    """The loops over rows that threads share, and those that each of them visits."""
    if rows is None:
        return [], []
    if config.parallel and not config.blocks:
        return [rows], []
    count = "blocks" if named else config.blocks
    shared, rows = register_tile.in_blocks(sch, rows, config, count, **how)
    return shared, [rows]


def _rows(sch: Schedule, nest: RowReduction, config: RowTile, named: bool, hoist: bool) -> Half:
    """Single rows, in the order of the matrix or of their lengths."""
    rows, columns = nest.rows, nest.columns
    values = register_tile.packed_values(sch, nest) if config.window and config.packed else ()
    if config.window:
        rows, column = sch.sort_rows_by_length(rows, columns[0], config.window)
        columns = [column]
    shared, loops = _blocks(sch, rows, config, named, **({"ahead": "ahead"} if named else {}))
    loops += nest.inside
    if config.parts > 1:
        count = "parts" if named else config.parts
        parts, *within = sch.divide(columns[0], count, by="coordinates")
        loops, columns = [*loops, parts], [*within, *columns[1:]]
    steps = register_tile.in_registers(
        sch, nest, config, loops, columns, shared=[*nest.heads, *shared], pack=config.pack,
        tiles_at=len(nest.heads) if config.tiles_first else None,
        dtype=summed(nest.dtype), hoist=hoist,
    )  # fmt: skip
    for name in values:
        sch.pack(name, steps[1][0])

    def finish(stage_two: Any) -> None:
        if config.parts > 1:
            # In stage I parts are below rows; here one part of all rows of a block comes first.
            name = register_tile.block_around(stage_two, steps[0][0].block)
            of_block = stage_two.get_loops(stage_two.get_sblock(name))
            row, part = of_block[-2 - (not config.tiles_first) :][:2]
            stage_two.reorder(part, row)
        if config.prefetch and nest.gathered is not None:
            gathered = f"{nest.gathered}_ws" if config.pack else nest.gathered
            sch.rewrite(prefetch_gathered, steps[1][0], gathered, config.prefetch, config.tile)

    return steps, finish


def _panels(sch: Schedule, nest: RowReduction, config: RowTile, named: bool) -> Half:
    """Rows in panels, by the patterns of columns in them."""
    values = register_tile.packed_values(sch, nest) if config.packed else ()
    panels, patterns, entries, rows = sch.group_columns_by_pattern(
        nest.rows, nest.columns[0], config.rows
    )
    shared, loops = _blocks(sch, panels, config, named, by="positions")
    steps = register_tile.in_registers(
        sch, nest, config, loops, [patterns, entries], shared=[*nest.heads, *shared],
        held=[rows], tiles_at=len(nest.heads), pack=config.pack, dtype=summed(nest.dtype),
    )  # fmt: skip
    reduce = steps[1][0]
    for name in values:
        sch.pack(name, reduce)

    def finish(stage_two: Any) -> None:
        stage_two.unroll(stage_two.get_loops(stage_two.get_sblock(reduce.block))[-1])
        (step,) = parameters_made_by(sch.func, constant)
        sch.rewrite(opaque_step_loop, reduce, step)

    return steps, finish


def arrange(matrix: CsrPattern, problem: Spmm, config: RowTile) -> Arranged:
    """CSR unchanged, in as many blocks of rows or row panels and parts of the columns."""
    del problem
    stored = Stored(keeps_order=config.in_order or not config.packed)
    return Arranged(stored, matrix.arguments(), numbers(config, matrix.shape[0]))


def numbers(config: RowTile, rows: int | None = None) -> dict[str, int]:
    """The numbers that a kernel leaves open; rows : of the matrix, if known."""
    most = config.blocks if rows is None else -(-rows // config.rows)
    return {
        "blocks": max(1, min(config.blocks, most)), "parts": config.parts, "ahead": config.ahead,
    }  # fmt: skip


def choices(search: SearchInput) -> Tried:
    """Tiles of whole vectors, and those of the candidates.

    order : "rows", all tiles of a row, then the next row; "tiles", all rows for a tile; "packed",
        the same with the tile's features of B packed
    blocks : of rows, per thread; 0 for a kernel on one thread
    visit : "rows", "sorted 512" or "panels 4". Rows are sorted if those of a candidate are.
    """
    problem, stats, listed = search.problem, search.given, search.own(RowTile)
    lanes, feat = listed[0].lanes, stats.feat
    widths = {min(feat, v * lanes, register_tile.MAX_TILE) for v in VECTORS}
    visits = ["rows"]
    if any(config.window for config in listed):
        visits += [f"sorted {window}" for window in WINDOWS]
    dense = stats.nnz >= LEAST * stats.m * stats.n or stats.shared >= SHARED
    dense = dense and lanes <= feat
    if dense and problem.reduce == "sum" and not problem.batched:
        visits += [f"panels {rows}" for rows in range(2, MOST_ROWS + 1)]

    def make(
        tile: int, order: str, prefetch: int, parts: int, blocks: int, visit: str
    ) -> RowTile | None:
        kind, _, by = visit.partition(" ")
        tiles = -(-feat // tile)
        pack = order == "packed"
        in_turn = pack or (order == "tiles" and tiles > 1)
        config = RowTile(
            tile=tile, lanes=lanes, feat=feat if tile == feat else feat_field(feat, tile, lanes),
            pack=pack, tiles_first=in_turn, prefetch=prefetch, parts=parts, parallel=blocks > 0,
            blocks=tasks(stats.threads, tiles if in_turn else 1, blocks),
            ahead=stats.ahead if blocks > 0 and (order == "rows" or tiles == 1) else 0,
        )  # fmt: skip
        if kind == "sorted":
            return replace(config, window=int(by))
        if kind == "rows":
            return config
        if order == "rows" or int(by) * -(-tile // lanes) > MOST_SUMS:
            return None
        return replace(
            config, feat=feat_field(feat, tile, lanes), tiles_first=True,
            blocks=tasks(stats.threads, tiles, blocks), ahead=0, rows=int(by),
        )  # fmt: skip

    tried = {
        "tile": tuple(sorted(widths | {c.tile for c in listed})),
        "order": ("rows", "tiles", "packed"),
        "prefetch": (0, 8, 16),
        "parts": (1, 4),
        "blocks": stats.block_counts,
        "visit": tuple(visits),
    }
    return tried, make


register(Template(RowTile, Spmm, program, apply, arrange, choices=choices, turn=1))
