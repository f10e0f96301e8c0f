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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.formats import Pattern
from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.rgms_tiles import (
    RelationalTiles,
    arrange,
    in_tiles,
    program,
    sizes_of,
    tile_of,
)
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class RelationalRows(RelationalTiles):
    """Tiles without tensor cores, of any type.

    shape : rows and features of the sums of a thread, kept in registers

    Other fields as in :class:`RelationalTiles`.
    """

    shape: tuple[int, int] = (4, 4)

    @classmethod
    def for_features(
        cls, feat_in: int, feat: int, dtype: str = "float32", k: int = 5, rows: int = 32
    ) -> RelationalRows:
        """A configuration for numbers of features: at least 128 threads, with up to 16 by 2 sums.

        Neighbouring threads have columns two apart, so that each 32-byte sector gets two atomic
        additions of a warp; with four columns that would be four.
        """
        tile = tile_of(feat)
        sums = rows * tile // max(128, rows * tile // 32)
        shape = sums // 2, 2
        vectors = vector_width(feat_in, dtype), vector_width(feat, dtype)
        return cls(k, rows, tile, 16, vectors, 2, feat_in, feat, shape)


def configs(
    problem: Rgms, pattern: RelationPattern | Pattern, stats: Any, target: Any = None
) -> list[RelationalRows]:
    """The configs that a search tries, the most promising first.

    pattern : pattern of relations by rows by columns
    stats : statistics with the numbers of features, `feat_in` and `feat`
    """
    del target
    return [
        RelationalRows.for_features(stats.feat_in, stats.feat, problem.dtype, k, min(rows, 64))
        for k, rows in sizes_of(pattern)
    ]


def apply(sch: Schedule, config: RelationalRows) -> None:
    """Schedule a program that is decomposed into tiles of rows, by primitives of both stages.

    Before (stage I), for each bucket, and after::

        with T.sp_iter([O, RT, IB, JB, K, L], "SRSRRS", "rgms_b0") as [o, rt, ib, jb, k, l]: ...

        with T.sp_iter([L0, O, RT, IB, L1, K0, K1, JB], "SRRSSRRR", "rgms_b0") as [..]:
            T.sp_iter_attr({"atomic": 1})
            ...

    Stage II separates the sum over JB from that over K
    (:mod:`sparsetir.schedules.gpu.passes.atomic_products`), divides the steps among threads, and
    places the buckets on one grid. Raises ScheduleError for a program of another form.
    """

    in_tiles(sch, config)


register(Template(RelationalRows, Rgms, program, apply, arrange, gpu=True, configs=configs))
