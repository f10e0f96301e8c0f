"""Gradients of relational gather-matmul-scatter for weights on a GPU, each in one launch.

Both programs are decomposed into tiles of rows of one relation (3-D hyb), as that of
:mod:`sparsetir.schedules.gpu.rgms` is. A block of threads takes one, with

- of the weights of relations a tile of features of X and of Y: it gathers rows of X, sums them up
  for each row of the tile in shared memory, copies rows of the gradient of Y beside them,
  multiplies the two, with sums in registers, and adds these to the relation's atomically;
- of the weights of edges a tile of features of X: it multiplies rows of the gradient of Y with the
  relation's matrix, puts the products into shared memory, and multiplies each with the rows of X of
  its elements, some neighbouring threads an element; where X has no more than a tile of features,
  each element is added to once.

So nothing of the size of edges times features is in memory. All buckets of all relations are one
launch; one before it sets the result to zero. Products are made by threads in any type, or on
tensor cores of factors of 16 bits; of the weights of relations these are inner sums, which are
rounded to 16 bits once. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetir.formats import Operand, Pattern, RelationalHyb
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.arguments import expect, expect_integers
from sparsetir.schedules.gpu import rgms_tiles
from sparsetir.schedules.gpu.passes.dots_together import dots_together
from sparsetir.schedules.gpu.passes.horizontal_fuse import horizontal_fuse
from sparsetir.schedules.gpu.passes.inner_products import inner_products
from sparsetir.schedules.gpu.passes.inner_sums import inner_sums
from sparsetir.schedules.gpu.passes.on_tensor_cores import COLUMNS, ROWS, on_tensor_cores
from sparsetir.schedules.gpu.passes.ptx import PRODUCTS
from sparsetir.schedules.gpu.passes.register_tiles import register_tiles
from sparsetir.schedules.gpu.rgms_tiles import (
    by_threads,
    on_grid,
    sizes_of,
    tile_of,
    unweighted,
    vectors_of,
)
from sparsetir.schedules.gpu.spmm_tensor_cores import has_instructions
from sparsetir.schedules.operators.problems import Arranged
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms_gradients import RgmsGradient
from sparsetir.schedules.operators.rgms_gradients import program as operator
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.shapes import Nest, refuse_shape
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import free_vars
from sparsetir.sparse_ir.nodes import SparseFunc, loads_of, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.facts import assume

WHO = "GradientTiles"
WIDE = 64  # features of a tile, at most
MAX_WARPS = 16


@dataclass(frozen=True)
class GradientTiles:
    """How a GPU kernel is made.

    k : of :class:`sparsetir.formats.RelationalHyb`, the largest bucket
    rows : of a tile of the format
    tile : rows and columns of a product of a block of threads: features of X and of Y, or, for the
        weights of edges, all `rows` and features of X
    depth : terms of the product that are in shared memory at a time: rows, a divisor of theirs, or
        features of Y
    vectors : neighbouring features in a load of X, and of W and the gradient of Y, of at most 16
        bytes each, which divide the numbers of features
    shape : rows and columns of a product that a thread has the sums of, in registers
    shares : instead of `shape` among how many warps the product is divided on tensor cores; each
        has a multiple of 16 rows, and of 8 columns
    stages : for how many steps of a product there is room in shared memory
    feat_in, feat : features of X and of Y as constants of the kernel. None: any that `vectors`
        divide
    """

    k: int = 5
    rows: int = 32
    tile: tuple[int, int] = (32, 64)
    depth: int = 16
    vectors: tuple[int, int] = (4, 4)
    shape: tuple[int, int] | None = (4, 4)
    shares: tuple[int, int] | None = None
    stages: int = 2
    feat_in: int | None = None
    feat: int | None = None

    def __post_init__(self) -> None:
        sizes = ("feat_in", "feat")
        names = ("rows", "depth", "stages", *sizes)
        expect_integers(self, *names, positive=True, optional=sizes)
        _ = self.format  # which checks k
        expect(self, "stages", self.stages <= 4, "at most 4")
        expect(self, "tile", _is_pair(self.tile), "two numbers from 1 on")
        two = _is_pair(self.vectors) and set(self.vectors) <= {1, 2, 4, 8}
        expect(self, "vectors", two, "two of 1, 2, 4 and 8")
        for name, vector in zip(sizes, self.vectors, strict=True):
            exact = (getattr(self, name) or 0) % vector == 0
            expect(self, name, exact, f"a multiple of vectors = {self.vectors}")
        self._check_threads()

    def _check_threads(self) -> None:
        rows, columns = self.tile
        if self.shares is None:
            two = self.shape is not None and _is_pair(self.shape)
            exact = two and not (rows % self.shape[0] or columns % self.shape[1])  # type: ignore[index]
            fits = exact and 0 < self.warps <= MAX_WARPS and self._threads % 32 == 0
            expect(self, "shape", fits, (
                f"two numbers that make {rows} by {columns} sums with a multiple of 32 threads, "
                f"at most {MAX_WARPS * 32}"
            ))  # fmt: skip
            return
        expect(self, "shape", self.shape is None, "None beside 'shares'")
        expect(self, "depth", self.depth % ROWS == 0, f"a multiple of {ROWS} on tensor cores")
        exact = _is_pair(self.shares) and self.warps <= MAX_WARPS and not (
            rows % (self.shares[0] * ROWS) or columns % (self.shares[1] * COLUMNS)
        )  # fmt: skip
        expect(self, "shares", exact, (
            f"two numbers, {MAX_WARPS} together, that leave each a multiple of {ROWS} of {rows} "
            f"rows and of {COLUMNS} of {columns} columns"
        ))  # fmt: skip

    @property
    def _threads(self) -> int:
        assert self.shape is not None
        return (self.tile[0] // self.shape[0]) * (self.tile[1] // self.shape[1])

    @property
    def warps(self) -> int:
        """Of a block of threads."""
        return self._threads // 32 if self.shares is None else math.prod(self.shares)

    @property
    def compiled(self) -> Any:
        """What of it a kernel depends on: all."""
        return self

    @property
    def format(self) -> RelationalHyb:
        """What the tensor is stored in."""
        return RelationalHyb(self.k, self.rows)

    def tiles(self, feat: int) -> int:
        """Tiles of a feature size; raises ScheduleError for one that the config does not serve."""
        if feat % self.vectors[1] or self.feat not in (None, feat):
            serves = self.feat or f"multiples of {self.vectors[1]}"
            raise ScheduleError(
                f"{WHO}.tiles: argument 'feat': the config serves {serves} features, got {feat}"
            )
        return -(-feat // self.tile[1])

    @classmethod
    def for_features(
        cls, problem: RgmsGradient, feat_in: int, feat: int, k: int = 5, rows: int = 32,
        cores: bool = False,
    ) -> GradientTiles:  # fmt: skip
        """A configuration for numbers of features: four warps or more, few sums in a thread.

        cores : on tensor cores
        """
        wide_in, wide = (min(tile_of(n), WIDE) for n in (feat_in, feat))
        tile = (rows, wide_in) if problem.edges else (wide_in, wide)
        terms = feat if problem.edges else rows
        depth = 16 if terms <= 16 or not cores else 32
        vectors = vectors_of(feat_in, problem.dtype), vectors_of(feat, problem.dtype)
        made = {"k": k, "rows": rows, "tile": tile, "depth": depth, "vectors": vectors}
        if cores:
            down = min(tile[0] // ROWS, 2)
            shares = down, min(4 // down, tile[1] // COLUMNS)
            return cls(**made, shape=None, shares=shares, feat_in=feat_in, feat=feat)
        # Both factors of edges lie along terms: four of each row and column are in registers, too.
        places, most = math.prod(tile), 16 if problem.edges else 32
        sums = places // max(min(128, places // 2), places // most)
        # Two atomic additions of a warp go to each sector of 32 bytes, as of columns two apart.
        across = min(sums, 4) if problem.edges else 2
        return cls(**made, shape=(sums // across, across), feat_in=feat_in, feat=feat)


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(
        isinstance(n, int) and n > 0 for n in given
    )  # fmt: skip


def configs(
    problem: RgmsGradient, pattern: RelationPattern | Pattern, given: Any, target: Any = None
) -> list[GradientTiles]:
    """What a search tries, likeliest first: with tensor cores, where there are any for the types.

    pattern : of relations by rows by columns
    given : with the numbers of features, `feat_in` and `feat`
    """
    cores = problem.dtype in PRODUCTS and target is not None and has_instructions(target)
    return [
        GradientTiles.for_features(problem, given.feat_in, given.feat, k, rows, on_cores)
        for on_cores in ((True, False) if cores else (False,))
        for k, rows in sizes_of(pattern)
    ]


def program(problem: RgmsGradient, config: GradientTiles) -> SparseFunc:
    """The stage-I function: the operator, decomposed into the buckets of 3-D hyb.

    x : (n, feat_in) ; grad : (m, feat) ; w : (relations, feat_in, feat), with `edges`
    out : (relations, feat_in, feat), or, with `edges`, (nnz,), written
    m, n, relations, nnz, feat_in, feat : sizes
    and those of the rules of :class:`RelationalHyb`, among them the values `a_<rule>`, without
    which the problem is not weighted, or `edge_<rule>`, which element each place is

    Raises ScheduleError for tensor cores that do not take the type.
    """
    if config.shares is not None and problem.dtype not in PRODUCTS:
        raise ScheduleError(
            f"rgms_gradients_gpu.program: argument 'problem': expected operands of float16 or "
            f"bfloat16 on tensor cores, got {problem.dtype}"
        )
    if problem.edges:
        rules = config.format.rules(_edge_operand(problem))
        func = extract_preprocess(decompose_format(operator(problem), rules))[1]
        for name in [b.name for b in func.buffers if b.name.startswith("EDGE")]:
            func, _ = assume(func, "coordinates", buffer=name, axis="E")
        return func
    values = Operand({"A": problem.values or problem.dtype}, ("R", "I", "J"), problem.idtype)
    plain = operator(replace(problem, weighted=True))
    func = extract_preprocess(decompose_format(plain, config.format.rules(values)))[1]
    return func if problem.weighted else unweighted(func)


def _edge_operand(problem: RgmsGradient) -> Operand:
    return Operand({"EDGE": problem.idtype}, ("R", "I", "J"), problem.idtype)


def arrange(
    pattern: RelationPattern | Pattern, problem: RgmsGradient, config: GradientTiles
) -> Arranged:
    """The arguments of the kernel that depend on the pattern alone.

    pattern : of relations by rows by columns; values are in the order of its triples, or of its
        coordinates
    """
    if not problem.edges:
        return rgms_tiles.arrange(pattern, problem, config)
    triples = isinstance(pattern, RelationPattern)
    converted = config.format.convert(
        pattern.coordinates if triples else pattern, _edge_operand(problem)
    )
    order = np.arange(pattern.nnz)
    if triples and not pattern.keeps_order:
        order = pattern.order
    relations, m, n = (int(size) for size in pattern.shape)
    sizes = {"relations": relations, "m": m, "n": n, "nnz": int(pattern.nnz)}
    edges = converted.values(EDGE=order.astype(problem.idtype))
    return Arranged(converted, {**converted.arguments(), **edges, **sizes})


@dataclass(frozen=True)
class _Part:
    """The loops of a bucket.

    tiles : a root of one, and tiles under it, each of one relation
    rows : of a tile; elements : of a row
    inside, features : features of what is gathered by elements, and of what is by rows
    edges : whether these are both summed over
    dtype : of the result
    """

    iteration: SparseIterationRef
    tiles: list[SpIter]
    rows: SpIter
    elements: SpIter
    inside: SpIter
    features: SpIter
    edges: bool
    dtype: str


def apply(sch: Schedule, config: GradientTiles) -> None:
    """Schedule a program that is decomposed into tiles of rows, by primitives of both stages.

    Before (stage I), for each bucket, and after::

        with T.sp_iter([O, RT, IB, JB, K, L], "SSRRSS", "rgms_dw_b0") as [o, rt, ib, jb, k, l]: ...

        with T.sp_iter([L0, K0, O, RT, K1, L1, IB, JB], "SSSSSSRR", "rgms_dw_b0") as [..]:
            T.sp_iter_attr({"atomic": 1})
            ...

    Stage II parts the sum over JB from that over IB, some rows at a time
    (:mod:`sparsetir.schedules.gpu.passes.inner_sums`), or, of the weights of edges, the product
    with W from that with X (:mod:`sparsetir.schedules.gpu.passes.inner_products`), divides the
    steps among threads, and puts the buckets on one grid. Raises ScheduleError for a program of
    another shape.
    """
    first, parts = _found(sch)
    edges, tiles = parts[0].edges, 1 if parts[0].edges else 2
    sizes = (config.feat_in, config.feat)
    for loop, size, vector in zip(
        (parts[0].inside, parts[0].features), sizes, config.vectors, strict=True
    ):
        sch.bound(loop, size or vector, "multiple" if size is None else "exact")
    for part in parts:
        if edges:
            around, inside = sch.split(part.inside, [None, config.tile[1]])
            steps, terms = sch.split(part.features, [None, config.depth])
            order = [around, *part.tiles, part.rows, part.elements, inside, steps, terms]
        else:
            down, inside = sch.split(part.inside, [None, config.tile[0]])
            across, features = sch.split(part.features, [None, config.tile[1]])
            order = [across, down, *part.tiles, inside, features, part.rows, part.elements]
        sch.sparse_reorder(part.iteration, order)
        sch.atomic(part.iteration)
    factors = next((b.dtype for b in sch.func.buffers if b.dtype in PRODUCTS), parts[0].dtype)

    def multiply(product: str, steps: list[str]) -> None:
        if config.shares is not None:
            sch.rewrite(on_tensor_cores, product, steps, warps=config.shares)
        else:
            sch.rewrite(register_tiles, product, steps, warps=config.warps, shape=config.shape)

    loops, names = sch.lower(), [f"{part.iteration.name}0" for part in parts]
    for name in [] if edges else names:
        *_, rows, _ = loops.get_loops(loops.get_sblock(name))
        loops.split(rows, [None, config.depth])
    on_grid(sch, loops, f"{first}0", names, tiles)
    outer, (of_x, of_others) = tiles + len(parts[0].tiles), config.vectors
    for name in names:
        if edges:
            sch.rewrite(inner_products, name, outer=outer)
            by_threads(sch, config, name, (of_others, of_others), multiply)
            sch.rewrite(dots_together, f"{name}_dots", warps=config.warps, vector=of_x)
        else:
            held = factors if config.shares is not None else parts[0].dtype
            sch.rewrite(inner_sums, name, outer=outer, dtype=held)
            by_threads(sch, config, name, (of_x, of_others), multiply)
    sch.rewrite(horizontal_fuse, [f"{name}_tile" for name in names])


def _found(sch: Schedule) -> tuple[str, list[_Part]]:
    """The iteration that sets the result, and the parts that add to it."""
    first, *rest = (Nest(sch, WHO, it) for it in sparse_iterations(sch.func))
    if not first.dense or first.it.init is not None or not rest:
        refuse_shape(WHO, sch.func, "an iteration that sets the result, and others that add to it")
    return first.it.name, [_part(nest) for nest in rest]


def _part(nest: Nest) -> _Part:
    expected = (
        "to add, for rows in tiles, what a row stores times a row of an operand for it and one for "
        "each element"
    )
    by_name = {x.name: x for x in nest.loops}
    leaves = [x for x in nest.loops if len(x.node.ancestors()) == 4] if nest.plain else []
    if nest.reduction is None or len(leaves) != 1:
        nest.refuse(expected)
    path = [by_name.get(a.name) for a in leaves[0].node.ancestors()]
    found = [x for x in path if x is not None]
    kinds = [x.node.kind for x in found]
    dense = [x for x in nest.loops if x not in found]
    if kinds != ["dense_fixed", "sparse_variable", "sparse_fixed", "sparse_fixed"]:
        nest.refuse(expected)
    gathered = _features(nest, found[3], dense)
    if len(dense) != 2 or len(gathered) != 1 or dense[0].kinds != dense[1].kinds:
        nest.refuse(expected)
    (inside,) = gathered
    (features,) = [x for x in dense if x is not inside]
    ref, handles = nest.handles()
    *tiles, rows, elements = (handles[x.axes] for x in found)
    return _Part(
        ref, tiles, rows, elements, handles[inside.axes], handles[features.axes],
        inside.kinds == "R", nest.dtype,
    )  # fmt: skip


def _features(nest: Nest, elements: Any, dense: list[Any]) -> list[Any]:
    """The loops over features of what is gathered by elements."""
    loads = [
        load
        for buffer in nest.sch.func.buffers
        for load in loads_of(nest.it.body, buffer.var)
        if any(elements.var in free_vars(i) for i in load.indices)
    ]
    return [x for x in dense if any(x.var in free_vars(i) for load in loads for i in load.indices)]


register(Template(GradientTiles, RgmsGradient, program, apply, arrange, gpu=True, configs=configs))
