"""Sparse times dense on a CPU, for a matrix in dense blocks: BSR and DBSR.

A loaded row of B serves all rows of a block, a value of A all features of a tile: some rows of a
block by some vectors of features are accumulated in registers over all blocks of a row. The
gathered part of B, a tile of its features at a time, is packed before, in the type of the sums; so
are values of A of a narrower type, a block at a time. (SparseTIR, sections 3.3 and 4.3.2.)

The default schedule of a program over full blocks takes 1.14 of its time on average (110 shapes of
blocks and numbers of features on one thread, 0.73 to 2.9) and three times as long to compile; this
one has one tile and one order of loops, and its parameters can be searched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.formats import BSR, DBSR
from sparsetir.schedules.arguments import choice, expect, number
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, accumulator
from sparsetir.schedules.registers import feat_field, tasks
from sparsetir.schedules.template import SearchInput, Template, Tried, around, register
from sparsetir.schedules.templates import decomposed, register_tile
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.register_tile import Straight
from sparsetir.schedules.templates.row_shapes import block_reduction
from sparsetir.schedules.templates.shapes import refuse_shape
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule, SpIter


@dataclass(frozen=True)
class BlockRows(register_tile.RegisterTile):
    """Schedule of a CPU kernel for blocks.

    format : BSR or DBSR
    rows : rows of a block that are accumulated in registers at a time, each over the vectors of a
        tile; a divisor of the block's rows
    filled : as in :class:`Decomposed`
    blocks : 1 for DBSR
    others : as in :class:`RegisterTile`
    """

    format: BSR | DBSR
    rows: int = number(4, tries=(2, 4, 8))
    tile: int = number(64, most=register_tile.MAX_TILE)
    lanes: int = 16
    feat: int | None = None
    filled: bool = True
    pack: bool = choice(True, False)
    blocks: int = number(1, compiled=1)
    parallel: bool = True

    def __post_init__(self) -> None:
        expect(self, "format", isinstance(self.format, BSR | DBSR), "BSR or DBSR")
        super().__post_init__()
        whole = self.format.rows % self.rows == 0
        expect(self, "rows", whole, f"a divisor of the {self.format.rows} rows of a block")
        alone = self.blocks == 1 or isinstance(self.format, BSR)
        expect(self, "blocks", alone, "1 for DBSR, whose rows are not cut into parts")


def program(problem: Spmm, config: BlockRows) -> SparseFunc:
    """The stage-I function: SpMM decomposed by the format, as by `decomposed.program`."""
    return decomposed.program(problem, _stored(config))


def apply(sch: Schedule, config: BlockRows) -> None:
    """Schedule a program that sums over blocks of rows and columns (CPU).

    Before (stage I), and after::

        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_bsr") as [io, jo, ii, ji, k]: ...

        with T.sp_iter([K0, IO_parts, T.part(IO, IO_part)], "SSS", "spmm_bsr") as [...]:
            B_ws[n, k1, k2] = ...                     # of a tile; before the rows of a part
            with T.sp_iter([II0], "S", ...) as [ii0]:
                ...                                   # spmm_bsr_start: C_ws[ii1, k1, k2] = 0.0
                with T.sp_iter([JO], "R", ...) as [jo]:
                    A_ws[ii1, ji] = ...               # of 16-bit types
                    ...                               # spmm_bsr_reduce over [JI, II1, K1, K2]
                ...                                   # spmm_bsr_write
    """
    nest = block_reduction(sch, "BlockRows")
    if nest.gathered is None or len(nest.columns) < 2:
        refuse_shape("BlockRows", sch.func, "sums over blocks of rows and columns")
    heads = [x for x in nest.heads if x not in nest.block]
    blocks, rows = ([], nest.rows) if heads else register_tile.in_blocks(sch, nest.rows, config)
    total = accumulator(nest.dtype)

    def sums(around: list[SpIter], columns: list[SpIter], held: list[SpIter]) -> Straight:
        return register_tile.in_registers(
            sch, nest, config, around, columns, shared=blocks, held=held, tiles_at=0,
            pack=config.pack, dtype=total,
        )  # fmt: skip

    steps = register_tile.of_blocks(sch, nest, config.rows, total, sums, [*heads, rows])
    register_tile.straight_code(sch, steps)


def _stored(config: BlockRows) -> Decomposed:
    """The config of the format only, for the program and its arguments."""
    return Decomposed(config.format, config.filled)


def arrange(matrix: CsrPattern, problem: Spmm, config: BlockRows) -> Arranged:
    """The arguments of :func:`program` that only depend on the pattern.

    Raises ScheduleError for a pattern that takes too much space, or does not fill its blocks.
    """
    arranged = decomposed.arrange(matrix, problem, _stored(config))
    most = max(1, -(-matrix.shape[0] // config.format.rows))
    return arranged._replace(overrides={"blocks": max(1, min(config.blocks, most))})


def choices(search: SearchInput) -> Tried | None:
    """Full blocks of the largest size and of a half of it, around the candidate, if there is one.

    blocks : as for row blocks, the rows of DBSR in one piece
    """
    configs, stats = search.own(BlockRows), search.given
    if not configs:
        return None
    (default,) = configs
    sizes = sorted({stats.block, max(2, stats.block // 2)})
    formats = {f.name: f for kind in (BSR, DBSR) for f in (kind(n, n) for n in sizes)}
    lanes, feat = default.lanes, stats.feat

    def make(format: str, tile: int, blocks: int, **others: Any) -> BlockRows | None:
        fmt = formats[format]
        if isinstance(fmt, DBSR) and blocks > 1:
            return None
        parts = tasks(stats.threads, -(-feat // tile), blocks)
        return replace(
            default, format=fmt, tile=tile, feat=feat_field(feat, tile, lanes), parallel=blocks > 0,
            blocks=parts if isinstance(fmt, BSR) else 1, **others,
        )  # fmt: skip

    tried, _ = around(configs, tile=(min(feat, v * lanes) for v in (2, 4)))
    return {
        "format": tuple(formats), "tile": tried["tile"], "rows": tried["rows"],
        "pack": tried["pack"], "blocks": stats.block_counts,
    }, make  # fmt: skip


register(Template(BlockRows, Spmm, program, apply, arrange, choices=choices, turn=2))
