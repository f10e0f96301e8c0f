"""Relational gather-matmul-scatter on the tensor cores of a GPU. (SparseTIR, section 4.4.1.)

Like :mod:`sparsetir.schedules.gpu.rgms`, in tiles of rows of one relation, all buckets in one
launch, with 16-bit factors and float32 accumulators, which are added to a float32 Y atomically.

The rows gathered for an element are summed in float32, then rounded to the type of X once, since
tensor cores take 16-bit factors: an error of half a unit in the last place of each inner sum,
besides those of X and W. Accumulators of 16 bits would be rounded with each row. An inner sum
beyond the range of float16 becomes an infinity. In bucket 0 without weights there is nothing to
sum: rows are copied to shared memory asynchronously, and nothing is rounded.

No number is combined with padding (see :mod:`sparsetir.schedules.gpu.passes.atomic_products`):
padded rows and columns of a tile are multiplied, but not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.formats import Pattern
from sparsetir.schedules.arguments import expect
from sparsetir.schedules.gpu import rgms_tiles
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.passes.on_tensor_cores import ROWS
from sparsetir.schedules.gpu.passes.ptx import PRODUCTS
from sparsetir.schedules.gpu.rgms_tiles import RelationalTiles, arrange, in_tiles, sizes_of, tile_of
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.targets import has_tensor_cores
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule

NAME = "RelationalTensorCores"


@dataclass(frozen=True)
class RelationalTensorCores(RelationalTiles):
    """Tiles on tensor cores.

    shares : the numbers of warps among which a tile's rows and features are divided; each has a
        multiple of 16 rows, and of 8 features
    Other fields as in :class:`RelationalTiles`; depth is a multiple of 16.
    """

    depth: int = 32
    vectors: tuple[int, int] = (8, 8)
    shares: tuple[int, int] = (2, 2)

    def _check_tile(self) -> None:
        super()._check_tile()
        expect(self, "depth", self.depth % ROWS == 0, f"a multiple of {ROWS}")

    @classmethod
    def for_features(
        cls, feat_in: int, feat: int, dtype: str = "float16", k: int = 5, rows: int = 64
    ) -> RelationalTensorCores:
        """A configuration for numbers of features: at least four warps, of up to 32 by 32 sums."""
        tile = tile_of(feat)
        vectors = vector_width(feat_in, dtype), vector_width(feat, dtype)
        depth = 16 if feat_in <= 16 else 32
        by_rows = min(rows // ROWS, 4 if tile <= 32 else 2)
        shares = by_rows, max(tile // 32, min(4 // by_rows, tile // 16))
        return cls(k, rows, tile, depth, vectors, 2, feat_in, feat, shares)


def serves(problem: Rgms) -> str | None:
    """Return why the template does not support `problem`, or None."""
    if problem.dtype not in PRODUCTS:
        return f"dtype '{problem.dtype}'"
    return None if problem.out == "float32" else f"out={problem.out!r}"


def configs(
    problem: Rgms, pattern: RelationPattern | Pattern, stats: Any, target: Any
) -> list[RelationalTensorCores]:
    """The configs that a search tries, the most promising first; see :func:`rgms_gpu.configs`."""
    if serves(problem) is not None or not has_tensor_cores(target):
        return []
    return [
        RelationalTensorCores.for_features(stats.feat_in, stats.feat, problem.dtype, k, rows)
        for k, rows in sizes_of(pattern)
    ]


def program(problem: Rgms, config: RelationalTensorCores) -> SparseFunc:
    """The program of :func:`sparsetir.schedules.gpu.rgms_tiles.program` for 16-bit operands.

    Raises ScheduleError for problems that :func:`serves` rejects.
    """
    missing = serves(problem)
    if missing is not None:
        raise ScheduleError(
            f"rgms_tensor_cores.program: argument 'problem': {NAME} serves operands of float16 or "
            f"bfloat16 with out='float32', got {missing}"
        )
    return rgms_tiles.program(problem, config)


def apply(sch: Schedule, config: RelationalTensorCores) -> None:
    """Schedule a program that is decomposed into tiles of rows, by primitives of both stages.

    Like :func:`sparsetir.schedules.gpu.rgms.apply`, with products on tensor cores.
    """
    dtypes = {b.dtype for b in sch.func.buffers} & set(PRODUCTS)
    if len(dtypes) != 1:
        raise ScheduleError(
            f"{NAME}: argument 'sch': expected operands of one of {', '.join(PRODUCTS)} in "
            f"'{sch.func.name}', got {sorted(dtypes)}"
        )

    in_tiles(sch, config)


register(
    Template(
        RelationalTensorCores, Rgms, program, apply, arrange, gpu=True, configs=configs, turn=1
    )
)
