"""Relational gather-matmul-scatter on a GPU, fused, in one launch. (SparseTIR, section 4.4.1.)

A program over CSF by relation is decomposed into one iteration per bucket of the 3-D hyb format
(`formats/relational_hyb.py`), whose rows come in tiles of one relation. A thread block processes
such a tile and a tile of the result's features. It gathers some features of rows of X, sums them
for each row into a tile in shared memory, copies the corresponding rows of the relation's matrix,
multiplies the two, with accumulators in registers, and continues with the next features of X. At
the end it adds its sums to Y atomically, as do other relations, other buckets and other pieces of a
row. So no intermediate has the size of edges times features. All buckets of all relations are one
launch; a preceding one sets Y to zero.

    blockIdx.x                 tiles of rows of all relations and buckets
    blockIdx.y                 tiles of features (before the buckets are put on one grid)
    threadIdx.y, threadIdx.x   warps, and the 32 threads of one

A sparse convolution is the same with bucket 0 alone (`k=0`): each offset has at most one input per
output. If there are no weights either, rows of X are copied unchanged.

Products are computed by threads in any type, or on tensor cores, with 16-bit factors and float32
accumulators, which are added to a float32 Y. The rows gathered for an element are summed in
float32, then rounded to the type of X once: an error of half a unit in the last place of each inner
sum, besides those of X and W. Accumulators of 16 bits would be rounded with each row. An inner sum
beyond the range of float16 becomes an infinity. In bucket 0 without weights there is nothing to
sum: rows are copied to shared memory asynchronously, and nothing is rounded.

No number is combined with padding (see :mod:`sparsetir.schedules.gpu.passes.atomic_products`):
padded rows and columns of a tile are multiplied, but not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.formats import Pattern
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

NAME = "RelationalRows"


@dataclass(frozen=True)
class RelationalRows(RelationalTiles):
    """Tiles of rows of relations; the fields are those of :class:`RelationalTiles`."""

    @classmethod
    def for_features(
        cls, feat_in: int, feat: int, dtype: str = "float32", k: int = 5, rows: int | None = None,
        cores: bool = False,
    ) -> RelationalRows:  # fmt: skip
        """A configuration for numbers of features: at least 128 threads, with up to 8 by 4 sums.

        rows : per tile, by default 32, or 64 on tensor cores
        cores : whether to use tensor cores, with at least four warps, of up to 32 by 32 sums
        """
        rows = rows or (64 if cores else 32)
        tile = tile_of(feat)
        vectors = vector_width(feat_in, dtype), vector_width(feat, dtype)
        if cores:
            depth = 16 if feat_in <= 16 else 32
            by_rows = min(rows // ROWS, 4 if tile <= 32 else 2)
            shares = by_rows, max(tile // 32, min(4 // by_rows, tile // 16))
            return cls(k, rows, tile, depth, vectors, 2, feat_in, feat, None, shares)
        sums = rows * tile // max(128, rows * tile // 32)
        depth, across = 32 if 16 < feat_in <= 32 else 16, 4 if sums >= 16 else 2
        return cls(k, rows, tile, depth, vectors, 2, feat_in, feat, (sums // across, across))


def configs(
    problem: Rgms, pattern: RelationPattern | Pattern, stats: Any, target: Any = None
) -> list[RelationalRows]:
    """The configs that a search tries, the most promising first; tensor cores where they fit.

    pattern : pattern of relations by rows by columns
    stats : statistics with the numbers of features, `feat_in` and `feat`
    """
    cores = target is not None and has_tensor_cores(target) and _unsupported(problem) is None
    make, sizes = RelationalRows.for_features, (stats.feat_in, stats.feat, problem.dtype)
    each = sizes_of(pattern)
    on_cores = [make(*sizes, k, rows, cores=True) for k, rows in each if cores]
    return on_cores + [make(*sizes, k, min(rows, 64)) for k, rows in each]


def _unsupported(problem: Rgms) -> str | None:
    """Why tensor cores do not support `problem`, or None."""
    if problem.dtype not in PRODUCTS:
        return f"dtype '{problem.dtype}'"
    return None if problem.out == "float32" else f"out={problem.out!r}"


def program(problem: Rgms, config: RelationalRows) -> SparseFunc:
    """The program of :func:`sparsetir.schedules.gpu.rgms_tiles.program`.

    Raises ScheduleError for problems that the config does not support.
    """
    missing = None if config.shares is None else _unsupported(problem)
    if missing is not None:
        raise ScheduleError(
            f"rgms_gpu.program: argument 'problem': expected operands of float16 or bfloat16 with "
            f"out='float32' on tensor cores, got {missing}"
        )
    return rgms_tiles.program(problem, config)


def apply(sch: Schedule, config: RelationalRows) -> None:
    """Schedule a program that is decomposed into tiles of rows, by primitives of both stages.

    Before (stage I), for each bucket, and after::

        with T.sp_iter([O, RT, IB, JB, K, L], "SRSRRS", "rgms_b0") as [o, rt, ib, jb, k, l]: ...

        with T.sp_iter([L0, O, RT, IB, L1, K0, K1, JB], "SRRSSRRR", "rgms_b0") as [..]:
            T.sp_iter_attr({"atomic": 1})
            ...

    Stage II separates the sum over JB from that over K
    (:mod:`sparsetir.schedules.gpu.passes.atomic_products`), divides the steps among threads, and
    places the buckets on one grid. Raises ScheduleError for a program of another form, and for
    tensor cores with operands of other types.
    """
    dtypes = {b.dtype for b in sch.func.buffers} & set(PRODUCTS)
    if config.shares is not None and len(dtypes) != 1:
        raise ScheduleError(
            f"{NAME}: argument 'sch': expected operands of one of {', '.join(PRODUCTS)} in "
            f"'{sch.func.name}', got {sorted(dtypes)}"
        )
    in_tiles(sch, config)


register(Template(RelationalRows, Rgms, program, apply, arrange, gpu=True, configs=configs))
