"""The common part of relational gather-matmul-scatter on GPUs, with tensor cores and without.

Tiles of rows of one relation, in 3-D hyb: the fields of configs, the program, the arguments from
a pattern, and the schedule except for the product. :mod:`sparsetir.schedules.gpu.rgms` describes
the computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import ir, tirx

from sparsetir.formats import Operand, Pattern, RelationalHyb
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.arguments import Config, expect, number
from sparsetir.schedules.gpu.passes.atomic_products import matmul_then_dot, sum_then_matmul
from sparsetir.schedules.gpu.passes.cooperative_copy import cooperative_copy
from sparsetir.schedules.gpu.passes.cooperative_sums import cooperative_dot, cooperative_gather
from sparsetir.schedules.gpu.passes.horizontal_fuse import horizontal_fuse
from sparsetir.schedules.gpu.passes.on_tensor_cores import COLUMNS, ROWS, on_tensor_cores
from sparsetir.schedules.gpu.passes.ptx import PRODUCTS
from sparsetir.schedules.gpu.passes.software_pipeline import MAX_SHARED, software_pipeline
from sparsetir.schedules.gpu.passes.thread_tiled_matmul import thread_tiled_matmul
from sparsetir.schedules.operators.problems import Arranged
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.operators.rgms import program as operator
from sparsetir.schedules.passes.nests import WARP, find_nest
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds, run_in_parallel
from sparsetir.schedules.templates.shapes import Nest, set_and_updated
from sparsetir.sparse_ir.atomics import ATOMIC_DTYPES
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import block_name
from sparsetir.sparse_ir.nodes import SparseFunc, loads_of
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.tir import free_vars
from sparsetir.sparse_ir.traversal import map_expr

ROOTS = 1  # loops above those over tiles of rows
FIRST = (8, 32)  # rows and features that a thread block sets to zero
MAX_WARPS = 16
SUMS = (
    "to add, for rows in tiles, what a row stores times rows of an operand times a matrix, to "
    "features side by side"
)


@dataclass(frozen=True)
class RelationalTiles(Config):
    """The common fields of configs for tiles of rows of a relation.

    k : the largest bucket of :class:`sparsetir.formats.RelationalHyb`
    rows : rows per tile
    tile : features of the result per tile
    depth : terms of a product in shared memory at a time: features of X
    vectors : neighbouring features per load of X and of the other factor, of at most 16 bytes each,
        which divide the numbers of features
    stages : steps of a product whose tiles fit in shared memory at a time
    feat_in, feat : features of X and of Y as constants of the kernel. None: any that `vectors`
        divide

    shape : rows and columns of the sums of a thread, kept in registers; None on tensor cores
    shares : the numbers of warps among which the product is divided on tensor cores; each has a
        multiple of 16 rows, and of 8 columns, and `depth` is a multiple of 16. None without these
    """

    k: int = 5
    rows: int = number(32)
    tile: Any = 64
    depth: int = number(16)
    vectors: tuple[int, int] = (4, 4)
    stages: int = number(2, most=4)
    feat_in: int | None = number(None, optional=True)
    feat: int | None = number(None, optional=True)
    shape: Any = (4, 4)
    shares: Any = None

    def __post_init__(self) -> None:
        """Raise ValueError for invalid fields."""
        super().__post_init__()
        _ = self.format  # the property checks k
        two = is_pair(self.vectors) and set(self.vectors) <= {1, 2, 4, 8}
        expect(self, "vectors", two, "two of 1, 2, 4 and 8")
        for name, vector in zip(("feat_in", "feat"), self.vectors, strict=True):
            exact = (getattr(self, name) or 0) % vector == 0
            expect(self, name, exact, f"a multiple of vectors = {self.vectors}")
        self._check_tile()
        self._check_division()

    def _check_tile(self) -> None:
        expect(self, "tile", isinstance(self.tile, int) and self.tile > 0, "1 or more")
        fits = self.depth % self.vectors[0] == 0 == self.tile % self.vectors[1]
        expect(self, "vectors", fits, f"divisors of {self.depth} and {self.tile} features")

    def _check_division(self) -> None:
        (rows, columns), shape, shares = self.sums, self.shape, self.shares
        if shares is None:
            exact = is_pair(shape) and not (rows % shape[0] or columns % shape[1])
            threads = rows * columns // math.prod(shape) if exact else 0
            wanted = f"two numbers that make {rows} by {columns} sums with a multiple of {WARP} "
            wanted += f"threads, at most {MAX_WARPS * WARP}"
            fits = 0 < threads <= MAX_WARPS * WARP and threads % WARP == 0
            expect(self, "shape", fits, wanted)
            return
        expect(self, "shape", shape is None, "None beside 'shares'")
        deep = self.depth % ROWS == 0
        expect(self, "depth", deep, f"a multiple of {ROWS} on tensor cores")
        exact = is_pair(shares) and math.prod(shares) <= MAX_WARPS
        exact = exact and not (rows % (shares[0] * ROWS) or columns % (shares[1] * COLUMNS))
        wanted = f"two numbers, {MAX_WARPS} together, that leave each a multiple of {ROWS} of "
        wanted += f"{rows} rows and of {COLUMNS} of {columns} columns"
        expect(self, "shares", exact, wanted)

    @property
    def sums(self) -> tuple[int, int]:
        """Rows and columns of a thread block's product."""
        return self.rows, self.tile

    @property
    def format(self) -> RelationalHyb:
        """The format of the tensor."""
        return RelationalHyb(self.k, self.rows)

    @property
    def warps(self) -> int:
        """Warps per thread block."""
        if self.shares is not None:
            return math.prod(self.shares)
        return math.prod(self.sums) // math.prod(self.shape) // WARP

    def tiles(self, feat: int) -> int:
        """The tiles of a feature size; raises ScheduleError if the config does not support it."""
        if feat % self.vectors[1] or self.feat not in (None, feat):
            serves = self.feat or f"multiples of {self.vectors[1]}"
            raise ScheduleError(
                f"{type(self).__name__}.tiles: argument 'feat': the config serves {serves} "
                f"features, got {feat}"
            )
        return -(-feat // self.sums[1])


def is_pair(value: Any) -> bool:
    """Whether a value is a tuple of two positive integers."""
    return isinstance(value, tuple) and len(value) == 2 and all(
        isinstance(n, int) and n > 0 for n in value
    )  # fmt: skip


def tile_of(feat: int) -> int:
    """Features per tile: all, in steps of 16, 32, 64 and 128, or 128."""
    return next((t for t in (16, 32, 64) if feat <= t), 128)


def sizes_of(pattern: RelationPattern | Pattern) -> list[tuple[int, int]]:
    """Candidate pairs (largest bucket, rows per tile), with tiles that a relation's rows fill.

    The first bucket is 5, as in SparseTIR's section 4.4.1; none exceeds that of the longest row.
    """
    pattern = RelationPattern.of_pattern(pattern)
    if not pattern.nnz:
        return [(0, 16)]
    longest = int(np.diff(pattern.indptr).max())
    rows = len(pattern.rows) / np.count_nonzero(np.diff(pattern.row_ptr))
    most = math.ceil(math.log2(longest))
    sizes = []
    for k in dict.fromkeys(min(k, most) for k in (5, 3, 7)):
        each = rows / (k + 1)
        sizes.append((k, 16 if each < 32 else 32 if each < 256 else 64))
    return sizes


def program(problem: Rgms, config: RelationalTiles) -> SparseFunc:
    """The stage-I function: the operator, decomposed into the buckets of 3-D hyb.

    x : (n, feat_in) ; w : (relations, feat_in, feat) ; out : (m, feat), written
    m, n, relations, feat_in, feat : sizes
    and those of the rules of :class:`RelationalHyb`, among them the values `a_<rule>`, unless the
    problem is not weighted

    Raises ScheduleError for a result of a type without atomic addition.
    """
    out = problem.out or problem.dtype
    if out not in ATOMIC_DTYPES["sum"]:
        raise ScheduleError(
            "rgms_tiles.program: argument 'problem': expected a result of float32 or float64, "
            f"which is added to atomically, got {out}; legal is out='float32'"
        )
    return decomposed(operator, problem, config)


def decomposed(
    of: Callable[[Any], SparseFunc], problem: Any, config: RelationalTiles
) -> SparseFunc:
    """The program of a problem, possibly without values, in buckets of 3-D hyb."""
    rules = config.format.rules(_operand(problem))
    _, func = extract_preprocess(decompose_format(of(replace(problem, weighted=True)), rules))
    return func if problem.weighted else _unweighted(func)


def _unweighted(func: SparseFunc) -> SparseFunc:
    """A decomposed program without the values, which are 1 at stored elements."""
    gone = [b for b in func.buffers if b.handle is not None and b.handle.name.startswith("a_")]
    variables = {b.var for b in gone}

    def is_removed(expr: Any) -> bool:
        plain = expr.value if isinstance(expr, tirx.Cast) else expr
        return isinstance(plain, ir.TensorLoad) and plain.source in variables

    body = map_expr(func.body, [(tirx.Mul, lambda node: node.b if is_removed(node.a) else node)])
    handles = {b.handle for b in gone}
    return func.replace(
        body=body,
        params=[p for p in func.params if p not in handles],
        buffers=[b for b in func.buffers if b.var not in variables],
    )


def _operand(problem: Any) -> Operand:
    return Operand({"A": problem.values or problem.dtype}, ("R", "I", "J"), problem.idtype)


def arrange(pattern: RelationPattern | Pattern, problem: Any, config: Any) -> Arranged:
    """The arguments of the kernel that only depend on the pattern.

    problem : a Rgms or a gradient's problem, with the types of values and indices
    config : config with the format
    pattern : pattern of relations by rows by columns; values are passed in the order of its
        triples, or of its coordinates
    """
    relations, m, n = (int(size) for size in pattern.shape)
    sizes = {"relations": relations, "m": m, "n": n}
    stored = converted = config.format.convert(coordinates_of(pattern), _operand(problem))
    if isinstance(pattern, RelationPattern):
        stored = pattern.stored_in(converted)
    return Arranged(stored, {**converted.arguments(), **sizes})


def coordinates_of(pattern: RelationPattern | Pattern) -> Pattern:
    """The stored coordinates: relations by rows by columns."""
    return pattern.coordinates if isinstance(pattern, RelationPattern) else pattern


def in_tiles(
    sch: Schedule, config: RelationalTiles, kinds: Sequence[str] = ("RS",), expected: str = SUMS
) -> None:
    """Schedule a program in tiles, by primitives of both stages.

    kinds : the allowed kinds of the loops over features of gathered rows, and over other features:
        "RS" sums over the first, "RR" over both, for each element, and "SS" over none
    expected : description of the expected program, for refusals
    """
    first, parts = _found(sch, type(config).__name__, kinds, expected)
    part, names = parts[0], [part.iteration.block for part in parts]
    sizes = (config.feat_in, config.feat)
    for loop, size, vector in zip((part.inside, part.features), sizes, config.vectors, strict=True):
        sch.bound(loop, size or vector, "multiple" if size is None else "exact")
    for each in parts:
        sch.sparse_reorder(each.iteration, _ordered(sch, each, config))
        sch.atomic(each.iteration)
    loops, tiles = sch.lower(), 2 if part.kinds == "SS" else 1
    for name in names if part.kinds == "SS" else []:
        *_, rows, _ = loops.get_loops(loops.get_sblock(name))
        loops.split(rows, [None, config.depth])
    _on_grid(sch, loops, block_name(first), names, tiles)
    dtype, outer, (of_x, of_others) = part.dtype, tiles + len(part.tiles), config.vectors
    if config.shares is not None:  # factors for tensor cores
        dtype = next((b.dtype for b in sch.func.buffers if b.dtype in PRODUCTS), dtype)
    for name in names:
        if part.kinds == "RR":
            sch.rewrite(matmul_then_dot, name, outer=outer)
            _by_threads(sch, config, name, (of_others, of_others))
            sch.rewrite(cooperative_dot, f"{name}_dots", warps=config.warps, vector=of_x)
        else:
            sch.rewrite(sum_then_matmul, name, outer=outer, dtype=dtype)
            _by_threads(sch, config, name, config.vectors)
    sch.rewrite(horizontal_fuse, [f"{name}_tile" for name in names])


def _ordered(sch: Schedule, part: _Part, config: RelationalTiles) -> list[SpIter]:
    """The loops of a bucket, those over features divided into tiles."""
    down, across = config.sums
    if part.kinds == "SS":
        blocks, inside = sch.split(part.inside, [None, down])
        tiles, features = sch.split(part.features, [None, across])
        return [tiles, blocks, *part.tiles, inside, features, part.rows, part.elements]
    kept, summed = part.inside, part.features
    if part.kinds == "RS":
        kept, summed = summed, kept
    tiles, kept = sch.split(kept, [None, across])
    steps, terms = sch.split(summed, [None, config.depth])
    if part.kinds == "RS":
        return [tiles, *part.tiles, part.rows, kept, steps, terms, part.elements]
    return [tiles, *part.tiles, part.rows, part.elements, kept, steps, terms]


def _on_grid(sch: Schedule, loops: Any, first: str, parts: list[str], tiles: int) -> None:
    """Divide loops among thread blocks.

    loops : the schedule of stage II
    first : the block that sets the result
    parts : the blocks that add to it atomically: loops over tiles of features, over a root of
        length one and over tiles of rows come first
    tiles : number of loops over tiles of features
    """
    _bind_first(loops, first)
    for name in parts:
        around = loops.get_loops(loops.get_sblock(name))
        bound = [(around[tiles + ROOTS], "blockIdx.x")]
        for loop, tag in zip(around[:tiles], ("blockIdx.y", "blockIdx.z"), strict=False):
            extent = loops.get(loop).extent
            if not isinstance(extent, tirx.IntImm) or int(extent) > 1:
                bound.append((loop, tag))
        for loop, tag in bound:  # visits only share elements through atomics
            run_in_parallel(loops, loop, tag, "ignore")
    sch.rewrite(materialize_loop_kinds)


def _by_threads(
    sch: Schedule, config: RelationalTiles, name: str, vectors: tuple[int, int]
) -> None:
    """Divide the steps of a tile among threads, and overlap copies with the product.

    vectors : neighbours that are loaded at once, of gathered rows and of the matrix
    """
    steps = [f"{name}_{step}" for step in ("gather", "matrix")]
    gather, matrix = steps
    assert sch.stage_two is not None
    (func,) = sch.stage_two.mod.functions.values()
    one = isinstance(find_nest("rgms_tiles", func, gather).body, tirx.BufferStore)
    if one:
        sch.rewrite(cooperative_copy, gather, warps=config.warps, vector=vectors[0])
    else:
        sch.rewrite(cooperative_gather, gather, warps=config.warps, vector=vectors[0])
    sch.rewrite(cooperative_copy, matrix, warps=config.warps, vector=vectors[1])
    product, ends = f"{name}_product", [f"{name}_start", f"{name}_write"]
    if config.shares is not None:
        sch.rewrite(on_tensor_cores, product, ends, warps=config.shares)
    else:
        sch.rewrite(thread_tiled_matmul, product, ends, warps=config.warps, shape=config.shape)
    sch.rewrite(software_pipeline, f"{name}_visit", steps, stages=config.stages, room=MAX_SHARED)


@dataclass(frozen=True)
class _Part:
    """The loops of a bucket.

    tiles : a root of length one, and tiles under it, each of one relation
    rows : rows of a tile; elements : elements of a row
    inside, features : features of the rows gathered by elements, and the others
    kinds : kinds of these two
    dtype : type of the result
    """

    iteration: SparseIterationRef
    tiles: list[SpIter]
    rows: SpIter
    elements: SpIter
    inside: SpIter
    features: SpIter
    kinds: str
    dtype: str


def _found(
    sch: Schedule, caller: str, kinds: Sequence[str], expected: str
) -> tuple[str, list[_Part]]:
    """The iteration that sets the result, and the parts that update it."""
    first, rest = set_and_updated(sch, caller)
    parts = []
    for nest in rest:
        part = _part(nest)
        if part is None or part.kinds not in kinds:
            nest.refuse(expected)
        parts.append(part)
    return first.it.name, parts


def _part(nest: Nest) -> _Part | None:
    """The loops of a bucket; None for another iteration."""
    by_name = {x.name: x for x in nest.loops}
    leaves = [x for x in nest.loops if len(x.node.ancestors()) == 4] if nest.plain else []
    if nest.reduction is None or len(leaves) != 1:
        return None
    path = [by_name[a.name] for a in leaves[0].node.ancestors() if a.name in by_name]
    kinds = [x.node.kind for x in path]
    dense = [x for x in nest.loops if x not in path]
    if kinds != ["dense_fixed", "sparse_variable", "sparse_fixed", "sparse_fixed"]:
        return None
    inside = _gathered_by(nest, path[-1], dense)
    others = [x for x in dense if x not in inside]
    if not len(inside) == len(others) == 1:
        return None
    ref, handles = nest.handles()
    features = inside[0].kinds + others[0].kinds
    if features == "RS" and nest.along() != others:
        return None
    *tiles, rows, elements, inside, others = (handles[x.axes] for x in (*path, *inside, *others))
    return _Part(ref, tiles, rows, elements, inside, others, features, nest.dtype)


def _gathered_by(nest: Nest, elements: Any, dense: list[Any]) -> list[Any]:
    """The loops over features of the rows gathered by elements."""
    loads = [
        load
        for buffer in nest.sch.func.buffers
        for load in loads_of(nest.it.body, buffer.var)
        if any(elements.var in free_vars(i) for i in load.indices)
    ]
    return [x for x in dense if any(x.var in free_vars(i) for load in loads for i in load.indices)]


def _bind_first(loops: Any, block: str) -> None:
    """Distribute the initialisation of the result over threads."""
    *rows, features = loops.get_loops(loops.get_sblock(block))
    if not rows:
        ends = loops.split(features, [None, FIRST[0] * FIRST[1]])
        tags = ("blockIdx.x", "threadIdx.x")
    else:
        blocks, row = loops.split(loops.fuse(*rows), [None, FIRST[0]])
        tiles, lane = loops.split(features, [None, FIRST[1]])
        loops.reorder(tiles, blocks, row, lane)
        ends, tags = (tiles, blocks, row, lane), (
            "blockIdx.y", "blockIdx.x", "threadIdx.y", "threadIdx.x",
        )  # fmt: skip
    for loop, tag in zip(ends, tags, strict=True):
        run_in_parallel(loops, loop, tag)
