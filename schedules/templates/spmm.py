"""Sparse times dense on a CPU: C[i, k] = reduce over the stored j of A[i, j] * B[j, k].

What makes it fast, in order of effect: all features of a tile are summed up in registers; what is
gathered stays in cache (tiles of features outermost, then parts of the columns; both copied
together where rows of B are far apart); gathered rows are asked for ahead; threads get rows with
equal numbers of non-zeros. (SparseTIR, section 4.2.1; Senanayake et al., section 8.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, accumulator
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.registers import served, tasks
from sparsetir.schedules.template import Asked, Template, Tried, register
from sparsetir.schedules.templates import register_tile
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.sparse_ir.schedule import Schedule

VECTORS = (1, 2, 4, 8, 16)  # of a tile that a search tries


@dataclass(frozen=True)
class RowBlocks(register_tile.RegisterTile):
    """How a CPU kernel is made.

    tiles_first : go through all rows for a tile of features, then for the next one; else through
        all tiles for a row
    prefetch : how many non-zeros ahead rows of B are asked for; 0 for never
    parts : parts of the columns that are gone through one after the other; how many is not
        compiled in
    others : as of :class:`RegisterTile`
    """

    tile: int = number(128, most=register_tile.MAX_TILE)
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    tiles_first: bool = True
    prefetch: int = number(8, least=0)
    parts: int = number(1, compiled=2)
    blocks: int = number(1, compiled=1)
    parallel: bool = True
    ahead: int = number(0, least=0, compiled=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "pack", self.tiles_first or not self.pack, "False without 'tiles_first'")
        whole = self.feat is None or self.feat % self.tile == 0
        wanted = f"1 where tiles of {self.tile} features overlap, as {self.feat} is no multiple"
        expect(self, "parts", whole or self.parts == 1, wanted)


def apply(sch: Schedule, config: RowBlocks) -> None:
    """Schedule a program that reduces over what rows store, by primitives of both stages.

    Before (stage I), and after with tiles first::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I_parts, T.part(I, I_part)], "SSS", "spmm") as [k0, i_parts, i]:
            ...  # spmm_start, spmm_reduce, spmm_write over vectors of a tile
    """
    found = row_reduction(sch, "RowBlocks")
    blocks, rows = register_tile.in_blocks(sch, found.rows, config, ahead="ahead")
    loops, columns = [rows], found.columns
    if config.parts > 1:
        parts, *within = sch.divide(columns[0], "parts", by="coordinates")
        loops, columns = [rows, parts], [*within, *columns[1:]]
    steps = register_tile.in_registers(
        sch, found, config, loops, columns, shared=[*found.heads, *blocks], pack=config.pack,
        tiles_at=len(found.heads) if config.tiles_first else None,
        dtype=accumulator(found.dtype), hoist=True,
    )  # fmt: skip
    stage_two = sch.lower()
    if config.parts > 1:
        # Parts hang under rows in stage I; here one part of all rows of a block comes first.
        tiles = not config.tiles_first
        block = stage_two.get_sblock(register_tile.block_around(stage_two, f"{steps[0][0].name}0"))
        row, part = stage_two.get_loops(block)[-2 - tiles :][:2]
        stage_two.reorder(part, row)
    register_tile.straight_code(sch, steps)
    if config.prefetch:
        gathered = f"{found.gathered}_ws" if config.pack else found.gathered
        sch.rewrite(prefetch_gathered, steps[1][0], gathered, config.prefetch, config.tile)


def arrange(matrix: CsrPattern, problem: Spmm, config: RowBlocks) -> Arranged:
    """CSR as it is, in as many blocks of rows and parts of the columns."""
    del problem
    blocks = max(1, min(config.blocks, matrix.shape[0]))
    numbers = {"blocks": blocks, "parts": config.parts, "ahead": config.ahead}
    return Arranged(matrix, matrix.arguments(), numbers)


def choices(asked: Asked) -> Tried:
    """Tiles of whole vectors, and those of the candidates.

    order : "rows", all tiles of a row, then the next row; "tiles", all rows for a tile; "packed",
        the same with the tile's features of B copied together
    blocks : of rows, for each thread; 0 for a kernel on one thread
    """
    given, own = asked.given, asked.own(RowBlocks)
    lanes, feat = own[0].lanes, given.feat
    widths = {min(feat, v * lanes, register_tile.MAX_TILE) for v in VECTORS}

    def make(tile: int, order: str, prefetch: int, parts: int, blocks: int) -> RowBlocks:
        tiles = -(-feat // tile)
        pack = order == "packed"
        in_turn = pack or (order == "tiles" and tiles > 1)
        return RowBlocks(
            tile=tile, lanes=lanes, feat=feat if tile == feat else served(feat, tile, lanes),
            pack=pack, tiles_first=in_turn, prefetch=prefetch, parts=parts, parallel=blocks > 0,
            blocks=tasks(given.threads, tiles if in_turn else 1, blocks),
            ahead=given.ahead if blocks > 0 and (order == "rows" or tiles == 1) else 0,
        )  # fmt: skip

    tried = {
        "tile": tuple(sorted(widths | {c.tile for c in own})),
        "order": ("rows", "tiles", "packed"),
        "prefetch": (0, 8, 16),
        "parts": (1, 4),
        "blocks": given.block_counts,
    }
    return tried, make


register(Template(RowBlocks, Spmm, program, apply, arrange, choices=choices, turn=1))
