"""What relational gather-matmul-scatter on GPUs shares, without tensor cores and with them.

Tiles of rows of one relation, in 3-D hyb: the fields of configs, the program, what kernels take of
a pattern, and the schedule but for the product. :mod:`sparsetir.schedules.gpu.rgms` says
how they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import DataType, ir, tirx

from sparsetir.formats import Operand, Pattern, RelationalHyb
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.arguments import expect, expect_integers
from sparsetir.schedules.gpu.passes.atomic_products import inner_sums
from sparsetir.schedules.gpu.passes.copy_together import copy_together
from sparsetir.schedules.gpu.passes.gather_together import gather_together
from sparsetir.schedules.gpu.passes.horizontal_fuse import horizontal_fuse
from sparsetir.schedules.gpu.passes.software_pipeline import MAX_SHARED, software_pipeline
from sparsetir.schedules.operators.problems import Arranged
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.operators.rgms import program as operator
from sparsetir.schedules.passes.nests import find_nest
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.shapes import Nest, refuse_shape
from sparsetir.sparse_ir.atomics import ATOMIC_DTYPES
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.traversal import map_expr

VECTORS = (8, 4, 2, 1)
ROOTS = 1  # loops above those over tiles of rows
FIRST = (8, 32)  # rows and features that a block of threads sets to zero


@dataclass(frozen=True)
class RelationalTiles:
    """What configs for tiles of rows of a relation have in common.

    k : of :class:`sparsetir.formats.RelationalHyb`, the largest bucket
    rows : of a tile
    tile : features of the result in a tile
    depth : features of X that are in shared memory at a time
    vectors : neighbouring features in a load of X and of W, of at most 16 bytes each, which divide
        the numbers of features
    stages : for how many steps of features there is room in shared memory
    feat_in, feat : features of X and of Y as constants of the kernel. None: any that `vectors`
        divide
    """

    k: int = 5
    rows: int = 32
    tile: int = 64
    depth: int = 16
    vectors: tuple[int, int] = (4, 4)
    stages: int = 2
    feat_in: int | None = None
    feat: int | None = None

    def check(self) -> None:
        """Raise ValueError for fields that cannot be."""
        sizes = ("feat_in", "feat")
        names = ("rows", "tile", "depth", "stages", *sizes)
        expect_integers(self, *names, positive=True, optional=sizes)
        _ = self.format  # which checks k
        expect(self, "stages", self.stages <= 4, "at most 4")
        two = isinstance(self.vectors, tuple) and len(self.vectors) == 2
        expect(self, "vectors", two and set(self.vectors) <= {1, 2, 4, 8}, "two of 1, 2, 4 and 8")
        fits = self.depth % self.vectors[0] == 0 == self.tile % self.vectors[1]
        expect(self, "vectors", fits, f"divisors of {self.depth} and {self.tile} features")
        for name, vector in zip(sizes, self.vectors, strict=True):
            exact = (getattr(self, name) or 0) % vector == 0
            expect(self, name, exact, f"a multiple of vectors = {self.vectors}")

    @property
    def compiled(self) -> Any:
        """What of it a kernel depends on: all."""
        return self

    @property
    def format(self) -> RelationalHyb:
        """What the tensor is stored in."""
        return RelationalHyb(self.k, self.rows)

    @property
    def warps(self) -> int:
        """Of a block of threads."""
        raise NotImplementedError

    def tiles(self, feat: int) -> int:
        """Tiles of a feature size; raises ScheduleError for one that the config does not serve."""
        if feat % self.vectors[1] or self.feat not in (None, feat):
            serves = self.feat or f"multiples of {self.vectors[1]}"
            raise ScheduleError(
                f"{type(self).__name__}.tiles: argument 'feat': the config serves {serves} "
                f"features, got {feat}"
            )
        return -(-feat // self.tile)


def tile_of(feat: int) -> int:
    """Features of a tile: all, in steps of 16, 32, 64 and 128, or 128."""
    return next((t for t in (16, 32, 64) if feat <= t), 128)


def vectors_of(feat: int, dtype: str) -> int:
    """The most neighbours in a load of 16 bytes that divide a number of features."""
    most = 16 // DataType(dtype).itemsize
    return next(v for v in VECTORS if v <= most and feat % v == 0)


def sizes_of(pattern: RelationPattern | Pattern) -> list[tuple[int, int]]:
    """Largest buckets with rows of a tile, as many as a relation has in a bucket or fewer, 16 up.

    5 is the bucket of SparseTIR's section 4.4.1, or the one that holds the longest row.
    """
    if isinstance(pattern, Pattern):
        relations, m, n = pattern.shape
        relation, row, column = pattern.coords
        pattern = RelationPattern.of(relation, row, column, (relations, m, n))
    if not pattern.nnz:
        return [(0, 16)]
    longest = int(np.diff(pattern.indptr).max())
    rows = len(pattern.rows) / np.count_nonzero(np.diff(pattern.row_ptr))
    most = math.ceil(math.log2(longest))
    found = []
    for k in dict.fromkeys(min(k, most) for k in (5, 3, 7)):
        each = rows / (k + 1)
        found.append((k, 16 if each < 32 else 32 if each < 256 else 64))
    return found


def program(problem: Rgms, config: RelationalTiles) -> SparseFunc:
    """The stage-I function: the operator, decomposed into the buckets of 3-D hyb.

    x : (n, feat_in) ; w : (relations, feat_in, feat) ; out : (m, feat), written
    m, n, relations, feat_in, feat : sizes
    and those of the rules of :class:`RelationalHyb`, among them the values `a_<rule>`, without
    which the problem is not weighted

    Raises ScheduleError for a result of a type that is not added to atomically.
    """
    out = problem.out or problem.dtype
    if out not in ATOMIC_DTYPES["sum"]:
        raise ScheduleError(
            "rgms_tiles.program: argument 'problem': expected a result of float32 or float64, "
            f"which is added to atomically, got {out}; legal is out='float32'"
        )
    weighted = replace(problem, weighted=True)
    rules = config.format.rules(_operand(problem))
    _, func = extract_preprocess(decompose_format(operator(weighted), rules))
    return func if problem.weighted else unweighted(func)


def unweighted(func: SparseFunc) -> SparseFunc:
    """A decomposed program without the values, which are one where elements are."""
    gone = [b for b in func.buffers if b.handle is not None and b.handle.name.startswith("a_")]
    variables = {b.var for b in gone}

    def is_gone(expr: Any) -> bool:
        plain = expr.value if isinstance(expr, tirx.Cast) else expr
        return isinstance(plain, ir.TensorLoad) and plain.source in variables

    body = map_expr(func.body, [(tirx.Mul, lambda node: node.b if is_gone(node.a) else node)])
    handles = {b.handle for b in gone}
    return func.replace(
        body=body,
        params=[p for p in func.params if p not in handles],
        buffers=[b for b in func.buffers if b.var not in variables],
    )


def _operand(problem: Any) -> Operand:
    return Operand({"A": problem.values or problem.dtype}, ("R", "I", "J"), problem.idtype)


def arrange(pattern: RelationPattern | Pattern, problem: Any, config: Any) -> Arranged:
    """The arguments of the kernel that depend on the pattern alone.

    problem : of values and indices of its types, a Rgms or of a gradient
    config : with the format
    pattern : of relations by rows by columns; values are given in the order of its triples, or of
        its coordinates
    """
    relations, m, n = (int(size) for size in pattern.shape)
    sizes = {"relations": relations, "m": m, "n": n}
    stored = converted = config.format.convert(_coordinates(pattern), _operand(problem))
    if isinstance(pattern, RelationPattern):
        stored = pattern.stored_in(converted)
    return Arranged(stored, {**converted.arguments(), **sizes})


def _coordinates(pattern: RelationPattern | Pattern) -> Pattern:
    return pattern.coordinates if isinstance(pattern, RelationPattern) else pattern


def in_tiles(
    sch: Schedule,
    config: RelationalTiles,
    who: str,
    multiply: Callable[[str, list[str]], None],
    factors: str | None = None,
) -> None:
    """What configs of tiles share: all but the product.

    multiply : (block of the product, blocks of the sums' other accesses), which divides it
    factors : the type in which inner sums are multiplied; that of the result by default
    """
    first, parts = _found(sch, who)
    loops_of_features = (parts[0].terms, parts[0].features)
    sizes = zip(loops_of_features, (config.feat_in, config.feat), config.vectors, strict=True)
    for loop, size, vector in sizes:
        sch.bound(loop, size or vector, "multiple" if size is None else "exact")
    dtype = ""
    for part in parts:
        tiles, features = sch.split(part.features, [None, config.tile])
        steps, terms = sch.split(part.terms, [None, config.depth])
        order = [tiles, *part.tiles, part.rows, features, steps, terms, part.elements]
        sch.sparse_reorder(part.iteration, order)
        sch.atomic(part.iteration)
        dtype = part.dtype
    loops = sch.lower()
    names = [f"{part.iteration.name}0" for part in parts]
    on_grid(sch, loops, f"{first}0", names)
    for name in names:
        sch.rewrite(inner_sums, name, outer=1 + len(parts[0].tiles), dtype=factors or dtype)
        by_threads(sch, config, name, config.vectors, multiply)
    sch.rewrite(horizontal_fuse, [f"{name}_tile" for name in names])


def on_grid(sch: Schedule, loops: Any, first: str, parts: list[str], tiles: int = 1) -> None:
    """Divide loops among blocks of threads.

    loops : the schedule of stage II
    first : the block that sets the result
    parts : those that add to it atomically: loops over tiles of features, over a root of one and
        over tiles of rows come first
    tiles : how many are over tiles of features
    """
    _bind_first(loops, first)
    for name in parts:
        around = loops.get_loops(loops.get_sblock(name))
        bound = [(around[tiles + ROOTS], "blockIdx.x")]
        for loop, tag in zip(around[:tiles], ("blockIdx.y", "blockIdx.z"), strict=False):
            extent = loops.get(loop).extent
            if not isinstance(extent, tirx.IntImm) or int(extent) > 1:
                bound.append((loop, tag))
        for loop, tag in bound:  # visits meet by atomics alone
            run_in_parallel(loops, loop, tag, "ignore")
    sch.rewrite(apply_kinds)


def by_threads(
    sch: Schedule,
    config: Any,
    name: str,
    vectors: tuple[int, int],
    multiply: Callable[[str, list[str]], None],
) -> None:
    """Divide the steps of a tile among threads, and copy for later visits beside the product.

    config : says of how many `warps` and `stages`
    vectors : neighbours that are loaded at once of what is gathered, and of the matrix
    multiply : (block of the product, blocks of the sums' other accesses), which divides it
    """
    steps = [f"{name}_{step}" for step in ("gather", "matrix")]
    gather, matrix = steps
    assert sch.stage_two is not None
    (func,) = sch.stage_two.mod.functions.values()
    one = isinstance(find_nest("rgms_tiles", func, gather).body, tirx.BufferStore)
    how = copy_together if one else gather_together
    sch.rewrite(how, gather, warps=config.warps, vector=vectors[0])
    sch.rewrite(copy_together, matrix, warps=config.warps, vector=vectors[1])
    multiply(f"{name}_product", [f"{name}_start", f"{name}_write"])
    sch.rewrite(software_pipeline, f"{name}_visit", steps, stages=config.stages, room=MAX_SHARED)


@dataclass(frozen=True)
class _Part:
    """The loops of a bucket.

    tiles : a root of one, and tiles under it, each of one relation
    rows : of a tile; elements : of a row
    terms : features of what is gathered; features : of the result
    dtype : of the result
    """

    iteration: SparseIterationRef
    tiles: list[SpIter]
    rows: SpIter
    elements: SpIter
    terms: SpIter
    features: SpIter
    dtype: str


def _found(sch: Schedule, who: str) -> tuple[str, list[_Part]]:
    """The iteration that sets the result, and the parts that add to it."""
    first, *rest = (Nest(sch, who, it) for it in sparse_iterations(sch.func))
    if not first.dense or first.it.init is not None or len(first.loops) != 2 or not rest:
        refuse_shape(who, sch.func, "an iteration that sets the result, and others that add to it")
    return first.it.name, [_part(nest) for nest in rest]


def _part(nest: Nest) -> _Part:
    expected = (
        "to add, for rows in tiles, what a row stores times rows of an operand times a matrix, to "
        "features side by side"
    )
    by_name = {x.name: x for x in nest.loops}
    features, dense = nest.along(), [x for x in nest.of_kind("R") if x.node.kind == "dense_fixed"]
    terms = [x for x in dense if not isinstance(x.node.length, tirx.IntImm)]
    leaves = [x for x in nest.loops if len(x.node.ancestors()) == 4] if nest.plain else []
    if nest.reduction is None or not len(features) == len(terms) == len(leaves) == 1:
        nest.refuse(expected)
    path = [by_name.get(a.name) for a in leaves[0].node.ancestors()]
    kinds = [x.node.kind for x in path if x is not None]
    if kinds != ["dense_fixed", "sparse_variable", "sparse_fixed", "sparse_fixed"]:
        nest.refuse(expected)
    ref, handles = nest.handles()
    *tiles, rows, elements = (handles[x.axes] for x in path if x is not None)
    return _Part(
        ref, tiles, rows, elements, handles[terms[0].axes], handles[features[0].axes], nest.dtype
    )


def _bind_first(loops: Any, block: str) -> None:
    """Spread what the result begins with over threads."""
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
