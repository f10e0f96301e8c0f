"""SpMM over blocks of 16-bit floats in tiles of the CPU (Intel's AMX, AVX-512, ARM's `bfmmla`).

The sums of a row of blocks, with AMX for 32 features at a time, stay in four tiles; a step loads
two tiles of the block and two of B, and multiplies each by each (SparseTIR, section 4.3.1, for a
CPU). The dense operand is stored in tiles first, once per call, or by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetir.formats import BSR, Pattern
from sparsetir.formats.blocks import find_blocks
from sparsetir.schedules.arguments import Config, expect, expect_one_of, number
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    Spmm,
    refuse_unsupported,
    unsupported,
)
from sparsetir.schedules.passes.tile_isas import TILE_ISAS, TileISA, TileShape, intrinsics, isa_of
from sparsetir.schedules.passes.tile_nests import (
    keep_narrow,
    restrict_reads,
    sums_in_tiles,
    write_groups,
)
from sparsetir.schedules.targets import allowed
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.decomposed import in_format
from sparsetir.schedules.templates.row_shapes import block_reduction, product_of_blocks
from sparsetir.schedules.templates.shapes import RowReduction, refuse_shape
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule

NAME = "MatrixTiles"
BLOCKS = (BSR(32, 32), BSR(16, 16))  # block sizes that fill tiles
BLOCKS_OF_A_THREAD = 2  # so that the last one ends soon after the others


@dataclass(frozen=True)
class MatrixTiles(Config):
    """A product with blocks in tiles of a matrix engine.

    format : BSR, of blocks that tiles divide: with AMX of 2 to 32 rows, and of 4, 6, .. 32 columns
        of 16-bit floats (8, 12, .. 64 of int8), with NEON of 2, 4, 6 or 8 rows, and of 8 or 16
        columns (16 or 32), with AVX-512 of any rows and an even number of columns. Blocks of 16
        and 32 fill them
    features : per step, 8 with NEON, else 16 or 32; any feature size is supported
    isa : the instruction set of the tiles, one of TILE_ISAS
    finite : whether the dense operand holds no infinity and no NaN, so that blocks may have places
        without an element, whose products are zero; else patterns must fill all of their blocks
    given : whether the caller passes B in tiles (see :func:`in_tiles`), instead of a copy per call
    blocks : of rows of blocks, which threads share; not compiled in
    parallel : whether to use all threads; waking them takes as long as a small product
    """

    format: BSR
    features: int = number(32, least=None)
    isa: str = "amx"
    finite: bool = False
    given: bool = False
    blocks: int = number(1, compiled=1)
    parallel: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "format", isinstance(self.format, BSR), "BSR")
        expect_one_of(self, isa=tuple(TILE_ISAS))
        widths = TILE_ISAS[self.isa]["bfloat16"].widths
        expect(self, "features", self.features in widths, " or ".join(map(str, widths)))

    @property
    def compiled(self) -> MatrixTiles:
        """The config that a kernel depends on: the same whatever the dense operand holds."""
        return replace(super().compiled, finite=False)

    def tiles(self, feat: int) -> int:
        """The number of steps that cover `feat` features.

        Raises ScheduleError if the caller is to pass B in tiles: plans take it unchanged.
        """
        if self.given:
            raise ScheduleError(
                "MatrixTiles.tiles: argument 'given': plans take B as it is, got a config for B in "
                "tiles; build a kernel of matrix_tiles.program and matrix_tiles.apply"
            )
        return -(-feat // self.features)


def program(problem: Spmm, config: MatrixTiles) -> SparseFunc:
    """The stage-I function: SpMM over CSR, decomposed to blocks.

    b : (n, feat); out : (m, feat), written
    m, n, feat : sizes
    and the arguments of BSR's rule, among them the values `a_<rule>`

    Raises ScheduleError for batches, means and maxima, and types without such products.
    """
    refuse_unsupported("matrix_tiles.program", config, problem, _types(config))
    return in_format(problem, config.format, filled=True)


def _types(config: MatrixTiles) -> set[str]:
    return TILE_ISAS[config.isa].keys() - {"int8"}


def apply(sch: Schedule, config: MatrixTiles) -> None:
    """Schedule a program that sums products of blocks with rows of a dense operand.

    Before (stage I), and after; the loops of the first two steps then become tensor intrinsics::

        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm") as [io, jo, ii, ji, k]:
            C[io * 32 + ii, k] += A[io, jo, ii, ji] * B[jo * 32 + ji, k]

        with T.sp_iter([B_K0, B_N0, B_N1, B_N2, B_K1, B_N3], "SSSSSS", "B_tiles_copy") as [...]: ...
        with T.sp_iter([IO_parts, T.part(IO, IO_part), K0], "SSS", "spmm") as [io_parts, io, k0]:
            with T.sp_iter([II, K1], "SS", "spmm_start") as [ii, k1]:
                C_ws[ii, k1] = 0.0
            with T.sp_iter([JO, JI0, II, K1, JI1, JI2], "RRSSRR", "spmm_reduce") as [...]:
                C_ws[ii, k1] += A[io, jo, ii, ..] * B_tiles[k0, jo, ji0, ji1, k1, ji2]
            with T.sp_iter([II, K1], "SS", "spmm_write") as [ii, k1]:
                C[io * 32 + ii, k0 * 32 + k1] = C_ws[ii, k1]

    Raises ScheduleError for a program of another form, or of types without such products.
    """
    total, isas = _found(sch), TILE_ISAS[config.isa]
    left_name, right_name, dtype = product_of_blocks(sch, total, NAME, isas)
    rows, (blocks, inner), (within,) = total.rows, total.columns, total.block
    high, width = (int(sch.func.axis(x.name).length) for x in (within, inner))
    shape = _shape(high, width, config.features, isas[dtype])
    group = shape.isa.group
    tiles, columns = sch.split(total.features, [None, config.features])
    steps, pairs, lanes = sch.split(inner, [None, shape.depth // group, group])
    outer, held = [rows, tiles], [within, columns]
    if shape.rows < high:
        pieces, within = sch.split(within, [None, shape.rows])
        outer, held = [*outer, pieces], [within, columns]
    sch.sparse_reorder(total.iteration, [*outer, blocks, steps, *held, pairs, lanes])
    refs = sch.precompute(
        total.result, outer[-1], held, dtype=shape.isa.types[1], name=f"{total.result}_ws"
    )
    if len(refs) != 3 or len(list(sparse_iterations(sch.func))) != 4:
        raise ScheduleError(f"{NAME}: expected sums that one iteration sets and adds up")
    whole = sch.get_sparse_iteration(total.iteration.name)
    buffer = sch.func.buffer(right_name)
    down, across = (axis.name for axis in buffer.axes or [])
    sizes = {down: [width // shape.depth, shape.depth // group, group],
             across: [config.features]}  # fmt: skip
    order = [f"{across}0", *(f"{down}{n}" for n in range(3)), f"{across}1", f"{down}3"]
    copy = sch.tiles(right_name, whole, sizes, order=order, given=config.given)
    if config.parallel:
        parts, _ = sch.divide(sch.get_sp_iters(whole)[0], "blocks", by="work", default=1)
        sch.parallelize(parts)
        if copy is not None:
            sch.parallelize(sch.get_sp_iters(copy)[:2])
    _in_stage_two(sch, shape, refs, copy, [f"{total.result}_ws", left_name, f"{right_name}_tiles"])


def _in_stage_two(
    sch: Schedule, shape: TileShape, refs: list[Any], copy: Any, operands: list[str]
) -> None:
    start, reduce, write = (ref.block for ref in refs)
    sch.lower()
    loops = sch.rewrite(restrict_reads, reduce, operands)
    zero, product = intrinsics(shape)
    loops.tensorize(loops.get_loops(loops.get_sblock(start))[-2], zero)
    loops.tensorize(loops.get_loops(loops.get_sblock(reduce))[-4], product)
    sch.rewrite(sums_in_tiles, write, shape)
    if copy is not None:
        sch.rewrite(write_groups, copy.block)
        sch.rewrite(keep_narrow, operands[-1])


def in_tiles(b: np.ndarray, config: MatrixTiles) -> np.ndarray:
    """A dense operand in the form that kernels of configs with `given` take.

    b : (n, feat) of elements of 2 bytes, of any type, such as the bits of bfloat16

    Shape (features' tiles, blocks, steps of a block, groups, features, elements of a group); what
    is beyond is zero.
    """
    (n, feat), features, cols = b.shape, config.features, config.format.cols
    shape = _shape(config.format.rows, cols, features, TILE_ISAS[config.isa]["bfloat16"])
    depth, group = shape.depth, shape.isa.group
    padded = np.zeros((-(-n // cols) * cols, -(-feat // features) * features), b.dtype)
    padded[:n, :feat] = b
    steps = (cols // depth, depth // group, group)
    parts = padded.reshape(-1, *steps, padded.shape[1] // features, features)
    return np.ascontiguousarray(parts.transpose(4, 0, 1, 2, 5, 3))


def arrange(matrix: CsrPattern, problem: Spmm, config: MatrixTiles) -> Arranged:
    """The arguments of :func:`program` that only depend on the pattern.

    Raises ScheduleError for a pattern that does not fill its blocks, unless `finite`.
    """
    refuse_unsupported("matrix_tiles.arrange", config, problem, _types(config))
    if not config.finite and not fills_blocks(matrix.coordinates, config.format):
        raise ScheduleError(
            f"matrix_tiles.arrange: argument 'config': expected a pattern that fills blocks of "
            f"{config.format.rows} x {config.format.cols}, or finite=True, where B holds no "
            "infinity and no NaN"
        )
    converted = matrix.stored_in(config.format, problem.operand)
    m, n = matrix.shape
    blocks = max(1, min(config.blocks, -(-m // config.format.rows)))
    (part,) = converted.parts
    return Arranged(converted, {**part.indices, "m": int(m), "n": int(n)}, {"blocks": blocks})


def configs(
    problem: Any, matrix: CsrPattern, stats: Any, target: Any, formats: Sequence[Any] = BLOCKS
) -> list[MatrixTiles]:
    """Configs worth measuring, the best guess first; none for an unsuitable CPU or pattern.

    stats : :class:`sparsetir.schedules.search.choose.Statistics`
    formats : candidates, tried in order; those of blocks that tiles do not divide, or that the
        pattern does not fill, are skipped. With blocks of 32 rows each loaded tile is used twice,
        so by default they come before those of 16
    """
    name = isa_of(target, problem.dtype)
    if name is None or unsupported(problem) is not None:
        return []
    isa, fitting = TILE_ISAS[name][problem.dtype], []
    for fmt in formats:
        if not isinstance(fmt, BSR) or not all(_sizes(fmt.rows, fmt.cols, isa)):
            continue
        # Except for blocks that exceed the matrix, elements come in whole blocks.
        sticks_out = matrix.shape[0] % fmt.rows or matrix.shape[1] % fmt.cols
        whole = sticks_out or matrix.nnz % (fmt.rows * fmt.cols) == 0
        if matrix.nnz and whole and fills_blocks(matrix.coordinates, fmt):
            parallel = stats.parallel
            features = isa.widths[-1 if stats.feat > isa.widths[0] else 0]
            blocks = BLOCKS_OF_A_THREAD * stats.threads if parallel else 1
            fitting.append(MatrixTiles(fmt, features, name, blocks=blocks, parallel=parallel))
    return fitting


def engine(
    problem: Any, matrix: CsrPattern, stats: Any, target: Any, fmt: Any
) -> list[MatrixTiles]:
    """The result of :func:`configs` for one format, or all, if this machine supports them."""
    isa = isa_of(target, problem.dtype)
    if isa is None or allowed(TILE_ISAS[isa][problem.dtype].features):
        return []
    return configs(problem, matrix, stats, target, BLOCKS if fmt is None else (fmt,))


def fills_blocks(pattern: Pattern, fmt: BSR) -> bool:
    """Whether each block has an element in all places inside the matrix."""
    m, n = pattern.shape
    blocks = find_blocks(pattern, fmt.rows, fmt.cols)
    first = np.repeat(np.arange(blocks.grid[0]), np.diff(blocks.indptr)) * fmt.rows
    rows = np.minimum(fmt.rows, m - first)
    columns = np.minimum(fmt.cols, n - blocks.indices.astype(np.int64) * fmt.cols)
    return int((rows * columns).sum()) == pattern.nnz


def _sizes(rows: int, columns: int, isa: TileISA) -> tuple[list[int], list[int]]:
    """Rows and columns of tiles that divide blocks."""
    return [r for r in isa.rows if rows % r == 0], [d for d in isa.depths if columns % d == 0]


def _shape(rows: int, columns: int, features: int, isa: TileISA) -> TileShape:
    """The largest tiles for blocks; raises ScheduleError if there are none."""
    heights, depths = _sizes(rows, columns, isa)
    if not depths or not heights:
        raise ScheduleError(
            f"{NAME}: expected blocks whose rows {_one_of(isa.rows)} divides, and whose columns "
            f"{_one_of(isa.depths)}, in {isa.types[0]}, got {rows} x {columns}"
        )
    return TileShape(isa, max(heights), features, max(depths))


def _one_of(sizes: range) -> str:
    kind = "a number" if sizes.step == 1 else f"a multiple of {sizes.step}"
    return f"{kind} from {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def _found(sch: Schedule) -> RowReduction:
    """The sums over blocks; raises ScheduleError if the program has other sums, too."""
    sums = block_reduction(sch, NAME)
    if sums.heads != sums.block or len(sums.columns) != 2:
        refuse_shape(NAME, sch.func, "one iteration that sums up blocks, such as of BSR")
    return sums


TEMPLATE = register(
    Template(MatrixTiles, Spmm, program, apply, arrange, configs=configs, engine=engine)
)
