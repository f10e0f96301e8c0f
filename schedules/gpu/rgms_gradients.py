"""Gradients of relational gather-matmul-scatter for weights on a GPU, each in one launch.

Both programs are decomposed into tiles of rows of one relation (3-D hyb), as in
:mod:`sparsetir.schedules.gpu.rgms`. A thread block has one such tile, and

- for the weights of relations a tile of features of X and of Y: it gathers rows of X, sums them
  for each row of the tile in shared memory, copies rows of the gradient of Y, multiplies the two,
  with accumulators in registers, and adds these to the relation's weights atomically;
- for the weights of edges a tile of features of X: it multiplies rows of the gradient of Y with the
  relation's matrix, stores the products in shared memory, and multiplies each with the rows of X of
  its elements, with some neighbouring threads per element; if X has at most one tile of features,
  each element is updated once.

So no intermediate has the size of edges times features. All buckets of all relations are one
launch; a preceding one sets the result to zero. Products are computed by threads in any type, or on
tensor cores with 16-bit factors, which for the weights of relations are inner sums, rounded to 16
bits once. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.formats import Operand, Pattern
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.arguments import expect
from sparsetir.schedules.gpu import rgms_tiles
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.passes.on_tensor_cores import COLUMNS, ROWS
from sparsetir.schedules.gpu.passes.ptx import PRODUCTS
from sparsetir.schedules.gpu.rgms_tiles import (
    RelationalTiles,
    coordinates_of,
    decomposed,
    in_tiles,
    is_pair,
    sizes_of,
    tile_of,
)
from sparsetir.schedules.operators.problems import Arranged
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import RgmsGradient
from sparsetir.schedules.operators.rgms import gradient as operator
from sparsetir.schedules.targets import has_tensor_cores
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.facts import assume

NAME = "GradientTiles"
WIDE = 64  # the most features of a tile


@dataclass(frozen=True)
class GradientTiles(RelationalTiles):
    """The tiles of a gradient's kernel.

    tile : rows and columns of a thread block's product: features of X and of Y, or, for the
        weights of edges, all `rows` and features of X
    depth : terms of the product in shared memory at a time: rows, a divisor of `rows`, or features
        of Y
    Other fields as in :class:`RelationalTiles`.
    """

    tile: tuple[int, int] = (32, 64)

    def _check_tile(self) -> None:
        expect(self, "tile", is_pair(self.tile), "two numbers of at least 1")

    @property
    def sums(self) -> tuple[int, int]:
        return self.tile

    @classmethod
    def for_features(
        cls, problem: RgmsGradient, feat_in: int, feat: int, k: int = 5, rows: int = 32,
        cores: bool = False,
    ) -> GradientTiles:  # fmt: skip
        """A configuration for numbers of features: at least four warps, few sums per thread.

        cores : whether to use tensor cores
        """
        wide_in, wide = (min(tile_of(n), WIDE) for n in (feat_in, feat))
        tile = (rows, wide_in) if problem.edges else (wide_in, wide)
        terms = feat if problem.edges else rows
        depth = 16 if terms <= 16 or not cores else 32
        vectors = vector_width(feat_in, problem.dtype), vector_width(feat, problem.dtype)
        common = {"k": k, "rows": rows, "tile": tile, "depth": depth, "vectors": vectors}
        if cores:
            down = min(tile[0] // ROWS, 2)
            shares = down, min(4 // down, tile[1] // COLUMNS)
            return cls(**common, shape=None, shares=shares, feat_in=feat_in, feat=feat)
        # Both factors of edges run along terms: four of each row and column are also in registers.
        places, most = math.prod(tile), 16 if problem.edges else 32
        sums = places // max(min(128, places // 2), places // most)
        across = min(sums, 4)
        return cls(**common, shape=(sums // across, across), feat_in=feat_in, feat=feat)


def configs(
    problem: RgmsGradient, pattern: RelationPattern | Pattern, stats: Any, target: Any = None
) -> list[GradientTiles]:
    """The configs that a search tries, the most promising first; tensor cores where they fit.

    pattern : pattern of relations by rows by columns
    stats : statistics with the numbers of features, `feat_in` and `feat`
    """
    cores = problem.dtype in PRODUCTS and target is not None and has_tensor_cores(target)
    return [
        GradientTiles.for_features(problem, stats.feat_in, stats.feat, k, rows, on_cores)
        for on_cores in ((True, False) if cores else (False,))
        for k, rows in sizes_of(pattern)
    ]


def program(problem: RgmsGradient, config: GradientTiles) -> SparseFunc:
    """The stage-I function: the operator, decomposed into the buckets of 3-D hyb.

    x : (n, feat_in) ; grad : (m, feat) ; w : (relations, feat_in, feat), with `edges`
    out : (relations, feat_in, feat), or, with `edges`, (nnz,), written
    m, n, relations, nnz, feat_in, feat : sizes
    and those of the rules of :class:`RelationalHyb`, among them the values `a_<rule>`, unless the
    problem is not weighted, or `edge_<rule>`, the element of each place

    Raises ScheduleError for tensor cores that do not support the type.
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
    return decomposed(operator, problem, config)


def _edge_operand(problem: RgmsGradient) -> Operand:
    return Operand({"EDGE": problem.idtype}, ("R", "I", "J"), problem.idtype)


def arrange(
    pattern: RelationPattern | Pattern, problem: RgmsGradient, config: GradientTiles
) -> Arranged:
    """The arguments of the kernel that only depend on the pattern.

    pattern : pattern of relations by rows by columns; values are in the order of its triples, or of
        its coordinates
    """
    if not problem.edges:
        return rgms_tiles.arrange(pattern, problem, config)
    converted = config.format.convert(coordinates_of(pattern), _edge_operand(problem))
    order = np.arange(pattern.nnz)
    if isinstance(pattern, RelationPattern) and not pattern.keeps_order:
        order = pattern.order
    relations, m, n = (int(size) for size in pattern.shape)
    sizes = {"relations": relations, "m": m, "n": n, "nnz": int(pattern.nnz)}
    edges = converted.values(EDGE=order.astype(problem.idtype))
    return Arranged(converted, {**converted.arguments(), **edges, **sizes})


def apply(sch: Schedule, config: GradientTiles) -> None:
    """Schedule a program that is decomposed into tiles of rows, by primitives of both stages.

    Before (stage I), for each bucket, and after::

        with T.sp_iter([O, RT, IB, JB, K, L], "SSRRSS", "rgms_dw_b0") as [o, rt, ib, jb, k, l]: ...

        with T.sp_iter([L0, K0, O, RT, K1, L1, IB, JB], "SSSSSSRR", "rgms_dw_b0") as [..]:
            T.sp_iter_attr({"atomic": 1})
            ...

    Stage II separates the sum over JB from that over IB, some rows at a time, or, for the weights
    of edges, the product with W from that with X
    (:mod:`sparsetir.schedules.gpu.passes.atomic_products`), divides the steps among threads, and
    places the buckets on one grid. Raises ScheduleError for a program of another form.
    """
    expected = (
        "to add, for rows in tiles, what a row stores times a row of an operand for it and one for "
        "each element"
    )
    in_tiles(sch, config, ("SS", "RR"), expected)


register(Template(GradientTiles, RgmsGradient, program, apply, arrange, gpu=True, configs=configs))
