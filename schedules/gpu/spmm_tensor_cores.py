"""SpMM of blocks on the tensor cores of a GPU. (SparseTIR, sections 4.3.1 and 4.3.2.)

A thread block computes a tile of C: the rows of a row of blocks, or of a row of tiles of SR-BCRS,
by some features. It iterates over the row's blocks: the values of a step, and the corresponding
rows of B, are copied to shared memory some steps ahead, while tensor cores multiply those of the
current step. Accumulators stay in registers, in float32 (int32 for int8), until the row is
complete.

    blockIdx.x                 rows of blocks
    blockIdx.y                 tiles of features
    threadIdx.y, threadIdx.x   warps, and the 32 threads of one

Any pattern and any size is supported: empty rows of blocks, blocks that exceed the matrix, any
feature size. All places of a block are multiplied. If a block stores a zero as padding, an
infinity or NaN in its row of B makes the sums of the block's rows NaN, unlike a missing element:
padding is assumed to be multiplied by finite numbers. So the template is used on request, and for
patterns that fill their blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tvm import DataType

from sparsetir.formats import BSR, DBSR, SRBCRS, Format, Pattern
from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.passes.cooperative_copy import cooperative_copy
from sparsetir.schedules.gpu.passes.on_tensor_cores import COLUMNS, ROWS, on_tensor_cores
from sparsetir.schedules.gpu.passes.ptx import COPY_BYTES, PRODUCTS
from sparsetir.schedules.gpu.passes.shared_tiles import shared_tiles
from sparsetir.schedules.gpu.passes.software_pipeline import (
    DYNAMIC_BYTES,
    MAX_SHARED,
    one_shared_array,
    software_pipeline,
)
from sparsetir.schedules.operators import block_spmm
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    Spmm,
    refuse_unsupported,
    unsupported,
)
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds, run_in_parallel
from sparsetir.schedules.targets import has_tensor_cores
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.decomposed import in_format
from sparsetir.schedules.templates.register_tile import Tiled
from sparsetir.schedules.templates.row_shapes import block_reduction, product_of_blocks
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import block_name
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.tir import is_one

NAME = "TensorCores"
MAX_WARPS = 16
PADDING = 16  # the most elements of padding per row of a shared array
# Sizes that a search tries.
BLOCKS, TILES, GROUPS = (64, 32, 16, 8), (16, 8), (16, 32)
DEPTH = 32  # columns of a block per step, by default
THREADS = 128  # that set the initial values of the result


@dataclass(frozen=True)
class TensorCores(Tiled):
    """The format, and the division of a tile among warps.

    format : BSR or DBSR of blocks of multiples of 8 rows and columns; SRBCRS of 8 or 16 rows
    tile : features per tile
    warps : the numbers of warps among which a tile's rows and features are divided; each has a
        multiple of 16 of one of the two, and of 8 of the other
    stages : steps whose values and rows of B are in shared memory at a time
    depth : columns of a block per step; None: 32, or all. For SR-BCRS a step is a group
    vector : features per copy, at best 16 bytes, which divide the feature size
    feat : feature size, a constant of the kernel; None: any multiple of `vector`
    """

    format: Format
    tile: int = number(128)
    warps: tuple[int, int] = (1, 4)
    stages: int = number(3, most=8)
    depth: int | None = number(None, optional=True)
    vector: int = number(8)
    feat: int | None = number(None, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, columns = self._block()
        expect(self, "vector", self.vector in (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16")
        expect(self, "tile", self.tile % self.vector == 0, f"a multiple of vector = {self.vector}")
        fits = self.feat is None or self.feat % self.vector == 0
        expect(self, "feat", fits, f"a multiple of vector = {self.vector}")
        warps = self.warps
        two = isinstance(warps, tuple) and len(warps) == 2 and min(warps) > 0
        expect(self, "warps", two and math.prod(warps) <= MAX_WARPS, f"two, {MAX_WARPS} together")
        shares = [n // w for n, w in zip((rows, self.tile), warps, strict=True)]
        exact = rows % warps[0] == 0 and self.tile % warps[1] == 0
        fits = any(
            a % ROWS == 0 and b % COLUMNS == 0 and a and b for a, b in (shares, shares[::-1])
        )
        expect(self, "warps", exact and fits, (
            f"a multiple of {ROWS} of rows or features for each, and of {COLUMNS} of the other, of "
            f"{rows} rows and {self.tile} features"
        ))  # fmt: skip
        deep = self.depth is None or (columns % self.depth == 0 and self.depth % COLUMNS == 0)
        expect(self, "depth", deep, f"None or a multiple of {COLUMNS} that divides {columns}")

    def _block(self) -> tuple[int, int]:
        """Rows and columns of a block, or of the tiles of a group."""
        fmt = self.format
        if isinstance(fmt, BSR | DBSR) and fmt.rows % COLUMNS == fmt.cols % COLUMNS == 0:
            return fmt.rows, fmt.cols
        if isinstance(fmt, SRBCRS) and fmt.t % COLUMNS == fmt.g % COLUMNS == 0:
            return fmt.t, fmt.g
        expect(self, "format", False, "BSR, DBSR or SRBCRS of multiples of 8")
        raise AssertionError

    @classmethod
    def for_features(cls, fmt: Format, feat: int, dtype: str = "float16") -> TensorCores:
        """A configuration for a format and a feature size, which is a constant of the kernel.

        Each warp has up to 32 by 32 sums, or 32 by 64 for blocks of 64 rows and more; three stages,
        or as many as fit in shared memory.
        """
        item = 1 if dtype == "int8" else 2
        vector = vector_width(feat, dtype)
        rows = fmt.t if isinstance(fmt, SRBCRS) else int(getattr(fmt, "rows", 0))
        by_rows = max(1, rows // 32) if rows % 32 == 0 else 1
        tile = next((t for t in (32, 64) if feat <= t), 128 if by_rows < 4 else 64)
        warps = by_rows, max(1, min(tile // 32, 4 // by_rows))
        deep = fmt.g if isinstance(fmt, SRBCRS) else math.gcd(DEPTH, int(getattr(fmt, "cols", 8)))
        size = (rows * (deep + PADDING) + deep * (tile + PADDING)) * item
        stages = max(1, min(3, MAX_SHARED // size))
        return cls(fmt, tile, warps, stages, vector=vector, feat=feat)

    def tiles(self, feat: int) -> int:
        """Tiles of a feature size; raises ScheduleError if the config does not support it."""
        if feat % self.vector or self.feat not in (None, feat):
            serves = self.feat or f"multiples of {self.vector}"
            raise ScheduleError(
                f"{NAME}.tiles: argument 'feat': the config serves {serves} features, got {feat}"
            )
        return -(-feat // self.tile)


def engine(problem: Any, matrix: Any, stats: Any, target: Any, fmt: Any) -> list[TensorCores]:
    """The config for a format that the caller names, if the template supports its blocks."""
    del matrix
    if fmt is None or unsupported(problem, PRODUCTS) is not None or not has_tensor_cores(target):
        return []
    try:
        return [TensorCores.for_features(fmt, stats.feat, problem.dtype)]
    except ValueError:  # unsupported blocks
        return []


def configs(problem: Any, matrix: CsrPattern, stats: Any, target: Any) -> list[TensorCores]:
    """The configs that a search tries: formats whose blocks or tiles the pattern fills.

    Padding for other patterns is the caller's choice, by the name of a format or a config.
    stats : :class:`sparsetir.schedules.search.choose.Statistics`
    """
    if (
        unsupported(problem, PRODUCTS) is not None
        or matrix.nnz == 0
        or not has_tensor_cores(target)
    ):
        return []
    tried: list[TensorCores] = []
    for fmt in full_formats(matrix.coordinates):
        config = TensorCores.for_features(fmt, stats.feat, problem.dtype)
        tried += [config, replace(config, stages=2), replace(config, stages=4)]
    return tried


def full_formats(pattern: Pattern) -> list[Format]:
    """The formats of this template that need no padding, larger blocks first."""
    full = [b for b in BLOCKS if BSR(b, b).places(pattern) == pattern.nnz]
    tiles = [t for t in TILES if BSR(t, 1).places(pattern) == pattern.nnz]
    formats: list[Format] = [BSR(b, b) for b in full]
    formats += [DBSR(b, b) for b in full[:1]]
    return formats + [SRBCRS(t, g) for t in tiles[:1] for g in GROUPS]


def program(problem: Spmm, config: TensorCores) -> SparseFunc:
    """The stage-I function: SpMM over CSR, decomposed by the format's rules, without the copies.

    b : (n, feat); out : (m, feat), written
    m, n, feat : sizes
    and the arguments of the format's rules, among them the values `a_<rule>`

    Raises ScheduleError for other problems than sums of one matrix of a type with such products.
    """
    refuse_unsupported("spmm_tensor_cores.program", config, problem, PRODUCTS)
    return in_format(problem, config.format, filled=True)


def arrange(matrix: CsrPattern, problem: Spmm, config: TensorCores) -> Arranged:
    """The arguments of :func:`program` that only depend on the pattern.

    Raises ScheduleError for the same problems.
    """
    refuse_unsupported("spmm_tensor_cores.arrange", config, problem, PRODUCTS)
    converted = matrix.stored_in(config.format, problem.operand)
    m, n = matrix.shape
    return Arranged(converted, {**converted.arguments(True), "m": int(m), "n": int(n)})


def apply(sch: Schedule, config: TensorCores) -> None:
    """Schedule a program that sums over blocks, by primitives of both stages.

    Before (stage I), for BSR(32, 32), and after::

        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm") as [io, jo, ii, ji, k]: ...

        with T.sp_iter([K0, IO], "SS", "spmm") as [k0, io]:
            with T.sp_iter([II, K1], "SS", "spmm_start") as [ii, k1]: ...
            with T.sp_iter([JO, JI0], "RR", "spmm_reduce") as [jo, ji0]:
                ...  # A_ws_copy, B_ws_copy, and
                with T.sp_iter([II, K1, JI1], "SSR", "spmm_reduce_rest") as [ii, k1, ji1]: ...
            with T.sp_iter([II, K1], "SS", "spmm_write") as [ii, k1]: ...

    In stage II these become copies by all threads, a pipeline and products of tiles on tensor
    cores; for the gathered columns of SR-BCRS, tiles are created there.

    Raises ScheduleError for a program of another form, and for types without such products.
    """
    shape = block_reduction(sch, NAME)
    values, gathered, dtype = product_of_blocks(sch, shape, NAME, PRODUCTS)
    firsts = {it.name for it in sparse_iterations(sch.func)} - {shape.iteration.name}
    heads = [x for x in shape.heads if x not in shape.block]
    if config.feat is not None:
        sch.bound(shape.features, config.feat, "exact")
    elif config.vector > 1:
        sch.bound(shape.features, config.vector, "multiple")
    tiles, features = sch.split(shape.features, [None, config.tile])
    *outer, terms = shape.columns
    dense = sch.func.axis(terms.name).kind == "dense_fixed"
    if dense:
        depth = config.depth or math.gcd(DEPTH, int(sch.func.axis(terms.name).length))
        steps, terms = sch.split(terms, [None, depth], tail="exact")
        outer = [*outer, steps]
    (rows,) = shape.block
    order = [tiles, *heads, shape.rows, *outer, rows, features, terms]
    sch.sparse_reorder(shape.iteration, order)
    sums = PRODUCTS[dtype].sums
    start, reduce, write = sch.precompute(shape.result, shape.rows, [rows, features], dtype=sums)
    visit, copies, product = reduce.block, [], reduce.block
    if dense:
        *_, step, row, feature, term = sch.get_sp_iters(reduce)
        copies += sch.precompute(gathered, step, [term, feature], scope="shared")
        copies += sch.precompute(values, step, [row, term], scope="shared")
        copies = [c.block for c in copies]
        product = block_name(f"{reduce.name}_rest")
    loops = sch.lower()
    _bind(loops, shape.iteration.block)
    for it in sparse_iterations(sch.func):
        if it.name in firsts:
            _bind_first(loops, block_name(it.name))
    sch.rewrite(materialize_loop_kinds)
    if not dense:
        sch.rewrite(shared_tiles, product, [values, gathered], outer=len(outer))
        visit, copies = f"{product}_visit", [f"{gathered}_copy0", f"{values}_copy0"]
    warps = math.prod(config.warps)
    size = DataType(dtype).itemsize
    values_vector = math.gcd(
        COPY_BYTES[0] // size, depth if dense else int(sch.func.axis(rows.name).length)
    )
    sch.rewrite(cooperative_copy, copies[0], warps=warps, vector=min(config.vector, 16 // size))
    sch.rewrite(cooperative_copy, copies[1], warps=warps, vector=values_vector)
    others = [start.block, write.block]
    sch.rewrite(on_tensor_cores, product, others, warps=config.warps, pairs=config.vector > 1)
    sch.rewrite(software_pipeline, visit, copies, stages=config.stages, room=DYNAMIC_BYTES)
    sch.rewrite(one_shared_array)


def _bind(loops: Any, block: str) -> None:
    """Map tiles of features and rows of blocks to thread blocks."""
    tiles, *others, rows = loops.get_loops(loops.get_sblock(block))
    heads = [x for x in others if not is_one(loops.get(x).extent)]
    if heads:
        run_in_parallel(loops, loops.fuse(*heads), "blockIdx.z")
    run_in_parallel(loops, tiles, "blockIdx.y")
    run_in_parallel(loops, rows, "blockIdx.x")


def _bind_first(loops: Any, block: str) -> None:
    """Distribute the initialisation of the result over threads."""
    *rows, features = loops.get_loops(loops.get_sblock(block))
    tiles, threads = loops.split(features, [None, THREADS])
    loops.reorder(tiles, *rows, threads)
    run_in_parallel(loops, tiles, "blockIdx.y")
    run_in_parallel(loops, loops.fuse(*rows), "blockIdx.x")
    run_in_parallel(loops, threads, "threadIdx.x")


register(
    Template(TensorCores, Spmm, program, apply, arrange, gpu=True, configs=configs, engine=engine)
)
register(Template(TensorCores, block_spmm.BlockSpmm, block_spmm.program, apply, gpu=True))
