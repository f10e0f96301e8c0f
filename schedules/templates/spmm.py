"""Sparse times dense on a CPU: C[i, k] = reduce over the stored j of A[i, j] * B[j, k].

What makes it fast, in order of effect: all features of a tile are summed up in registers; what is
gathered stays in cache (tiles of features outermost, then parts of the columns; both copied
together where rows of B are far apart); gathered rows are asked for ahead; threads get rows with
equal numbers of non-zeros. (SparseTIR, section 4.2.1; Senanayake et al., section 8.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import s_tir

from sparsetir.schedules.arguments import (
    expect,
    expect_at_least,
    expect_integers,
    is_power_of_two,
)
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, accumulator
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.templates.feature_tiles import Tiled, in_tiles
from sparsetir.schedules.templates.shapes import row_reduction
from sparsetir.sparse_ir.schedule import Schedule

__all__ = ["RowBlocks", "apply", "arrange"]

MAX_TILE = 256
ROW_COST = 2


@dataclass(frozen=True)
class RowBlocks(Tiled):
    """How a CPU kernel is made.

    tile : features summed up in registers at a time, 1 to 256
    lanes : of a vector, a power of two, at most `tile`
    feat : None for a kernel that serves every multiple of `tile`; else the one feature size it
        serves, at least `tile`: the last tile, and the last vector of each, then begin earlier
        where they would reach too far
    tiles_first : go through all rows for a tile of features, then for the next one; else through
        all tiles for a row
    pack : copy the tile's features of B together before they are gathered, in the accumulator's
        type
    prefetch : how many non-zeros ahead rows of B are asked for; 0 for never
    parts : parts of the columns that are gone through one after the other; how many is not
        compiled in
    blocks : blocks of rows; they and the tiles are divided among the threads; not compiled in
    parallel : use all threads; to wake them takes as long as a small product
    ahead : elements that the first block has more than the others: what the thread that calls does
        while others wake; not compiled in
    """

    tile: int = 128
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    tiles_first: bool = True
    prefetch: int = 8
    parts: int = 1
    blocks: int = 1
    parallel: bool = True
    ahead: int = 0

    def __post_init__(self) -> None:
        tile, lanes, feat = self.tile, self.lanes, self.feat
        expect_integers(self, "tile", "lanes", "prefetch", "parts", "blocks", "ahead")
        expect(self, "tile", 1 <= tile <= MAX_TILE, f"1 to {MAX_TILE}")
        fits = is_power_of_two(lanes) and lanes <= tile
        expect(self, "lanes", fits, f"a power of two up to tile = {tile}")
        wanted = f"a multiple of lanes = {lanes} where 'feat' is not given"
        expect(self, "tile", feat is not None or tile % lanes == 0, wanted)
        expect(self, "feat", feat is None or feat >= tile, f"at least tile = {tile}")
        expect_at_least(self, prefetch=0, parts=1, blocks=1, ahead=0)
        expect(self, "pack", self.tiles_first or not self.pack, "False without 'tiles_first'")
        whole = feat is None or feat % tile == 0
        wanted = f"1 where tiles of {tile} features overlap, as {feat} is no multiple"
        expect(self, "parts", whole or self.parts == 1, wanted)

    @property
    def compiled(self) -> RowBlocks:
        """What a kernel depends on: the same for all numbers of blocks, and of several parts."""
        return replace(self, parts=min(self.parts, 2), blocks=1, ahead=0)


def apply(sch: Schedule, config: RowBlocks) -> None:
    """Schedule a program that reduces over what rows store, by primitives of both stages.

    Before (stage I), and after with tiles first::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I_parts, T.part(I, I_part)], "SSS", "spmm") as [k0, i_parts, i]:
            ...  # spmm_start, spmm_reduce, spmm_write over vectors of a tile
    """
    found = row_reduction(sch, "RowBlocks")
    tiles, vectors = in_tiles(sch, found.features, config)
    rows, columns, outer = found.rows, found.columns, [*found.heads]
    if config.parallel:
        blocks, rows = sch.divide(
            rows, "blocks", by="work", cost=ROW_COST, default=1, ahead="ahead"
        )
        outer.append(blocks)
    if config.tiles_first:
        outer.insert(len(found.heads), tiles)
        inner = [rows]
    else:
        inner = [rows, tiles]
    if config.parts > 1:
        parts, *columns = [*sch.divide(columns[0], "parts", by="coordinates"), *columns[1:]]
        inner.insert(1, parts)
    sch.sparse_reorder(found.iteration, [*outer, *inner, *columns, *vectors])
    total = accumulator(found.dtype)
    steps = sch.precompute(found.result, inner[-1], vectors, dtype=total, hoist=True)
    if config.pack and found.gathered is not None:
        whole = [found.gathered_axis, *vectors]
        where = outer[-1] if outer else found.iteration
        steps += sch.precompute(found.gathered, where, whole, scope="global", dtype=total)
    if config.parallel:
        sch.parallelize(outer)
    stage_two = sch.lower()
    if config.parts > 1:
        # Parts hang under rows in stage I; here one part of all rows of a block comes first.
        row, part = _loops_around(stage_two, f"{steps[0].name}0")[-len(inner) :][:2]
        stage_two.reorder(part, row)
    for step in steps:
        in_vectors(stage_two, step, len(vectors))
    if config.prefetch:
        gathered = f"{found.gathered}_ws" if config.pack else found.gathered
        sch.rewrite(prefetch_gathered, steps[1], gathered, config.prefetch, config.tile)


def _loops_around(stage_two: Any, block: str) -> list[Any]:
    """The loops of the block that a block is in."""
    ref = stage_two.get_sref(stage_two.get_sblock(block)).parent
    while not isinstance(ref.stmt, s_tir.SBlock):
        ref = ref.parent
    return list(stage_two.get_loops(stage_two.get_sblock(ref.stmt.name_hint)))


def arrange(matrix: CsrPattern, problem: Spmm, config: RowBlocks) -> Arranged:
    """CSR as it is, in as many blocks of rows and parts of the columns."""
    del problem
    blocks = max(1, min(config.blocks, matrix.shape[0]))
    numbers = {"blocks": blocks, "parts": config.parts, "ahead": config.ahead}
    return Arranged(matrix, matrix.arguments(), numbers)
