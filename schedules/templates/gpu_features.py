"""What GPU templates over a dense feature axis share: where each thread's features lie.

A tile of features is spread over the threads of a row (`threadIdx.x`): each holds `coarsen` vectors
of neighbouring features, `threads` vectors apart, so that neighbouring threads read and write
vectors side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tvm import tirx

from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.templates.shapes import RowReduction
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import map_expr
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter

__all__ = [
    "FeaturePlaces",
    "RowSums",
    "check_target",
    "check_vector",
    "feature_loops",
    "in_registers",
    "reads_of_elements",
    "row_sums",
    "vector_width",
    "with_occupancy",
]

VECTOR_BYTES = 16  # the widest load
MAX_BLOCKS = 32  # on a multiprocessor
MIN_BLOCKS = "tirx.launch_bounds_min_blocks_per_sm"


def vector_width(feat: int, dtype: str) -> int:
    """The most neighbouring features in one load: up to 16 bytes, and a divisor of the size."""
    width = VECTOR_BYTES // np.dtype(dtype).itemsize
    while feat % width:
        width //= 2
    return width


class FeaturePlaces:
    """Where the features of a thread lie: vector `w` of thread `x` in tile `p`.

    Sizes that the tiles do not divide leave lanes over. Those load the last vector again, and the
    writes check :meth:`stored`.
    """

    def __init__(self, config: Any) -> None:
        self.threads, self.vector = config.threads, config.vector
        self.step = config.threads * config.coarsen
        self.feat = config.feat
        self.whole = config.feat is None or config.feat % config.tile == 0

    def size(self, tiles: Any) -> Any:
        """Number of features."""
        return tiles * self.step * self.vector if self.feat is None else self.feat

    def tiles(self, tiles: Any) -> Any:
        """Number of tiles."""
        return tiles if self.feat is None else -(-self.feat // (self.step * self.vector))

    def number(self, p: Any, w: Any, x: Any) -> Any:
        """Number of the vector."""
        return p * self.step + w * self.threads + x

    def load(self, p: Any, w: Any, x: Any, lane: Any) -> Any:
        """A feature to load."""
        number = self.number(p, w, x)
        if not self.whole:
            number = tirx.min(number, self.feat // self.vector - 1)
        return number * self.vector + lane

    def stored(self, p: Any, w: Any, x: Any) -> Any:
        """Whether the lane has a vector of its own."""
        return True if self.whole else self.number(p, w, x) < self.feat // self.vector


def feature_loops(
    sch: Schedule, features: SpIter, config: Any
) -> tuple[SpIter, SpIter, list[SpIter]]:
    """The loops over tiles of features, over threads, and over a thread's vectors and their lanes.

    A tile that is larger than all features together is made smaller; the last of several begins
    earlier where it would reach too far.
    """
    if config.feat is None:
        factors = [None, config.coarsen, config.threads, config.vector]
        tiles, w, x, lane = sch.split(features, factors, tail="exact")
        return tiles, x, [w, lane]
    sch.bound(features, config.feat, "exact")
    vectors, lane = sch.split(features, [None, config.vector], tail="exact")
    count = config.feat // config.vector
    threads = min(config.threads, count)
    coarsen = min(config.coarsen, count // threads)
    tiles, w, x = sch.split(vectors, [None, coarsen, threads], tail="shift")
    return tiles, x, [w, lane]


class RowSums(NamedTuple):
    """The iterations that a reduction over what rows store becomes.

    scalars, vectors : whose loops over lanes are unrolled, or vectors
    reduce : over the columns
    write : of the result
    """

    scalars: list[SparseIterationRef]
    vectors: list[SparseIterationRef]
    reduce: SparseIterationRef
    write: SparseIterationRef


def row_sums(sch: Schedule, rows: RowReduction, config: Any) -> RowSums:
    """Sums of rows, and what is gathered for an element, in registers of threads.

    Before, and after::

        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]: ...

        with T.sp_iter([K0, I, K2], "SSS", "spmm") as [k0, i, k2]:  # tiles, rows, threads
            ...  # spmm_start over a thread's vectors, C_ws[k1, k3]
            with T.sp_iter([J], "R", "spmm_reduce") as [j]:
                ...  # B_ws_copy, spmm_reduce_rest
            ...  # spmm_write
    """
    tiles, threads, lanes = feature_loops(sch, rows.features, config)
    order = [tiles, *rows.heads, rows.rows, threads, *rows.columns, *lanes]
    sch.sparse_reorder(rows.iteration, order)
    total = accumulator(rows.dtype)
    start, reduce, write = sch.precompute(rows.result, threads, lanes, dtype=total, hoist=True)
    if rows.gathered is None:
        return RowSums([start, reduce], [write], reduce, write)
    *_, column, w, l = sch.get_sp_iters(reduce)
    (copy,) = sch.precompute(rows.gathered, column, [w, l])
    rest = sch.get_sparse_iteration(f"{reduce.name}_rest")
    return RowSums([start, rest], [copy, write], reduce, write)


def reads_of_elements(loops: Any, block: Any) -> list[int]:
    """Which of a block's reads are at the position of its element, as values and columns are."""
    element = loops.get(block).iter_vars[0].var
    places = [r.region[-1].min for r in loops.get(block).reads]
    return [number for number, place in enumerate(places) if place.same_as(element)]


def check_vector(who: str, vector: int, dtype: str) -> None:
    """Refuse vectors that no single load takes."""
    widest = VECTOR_BYTES // np.dtype(dtype).itemsize
    if vector > widest:
        raise ScheduleError(
            f"{who}: argument 'config': expected vectors of at most {widest} {dtype}, got {vector}"
        )


def check_target(who: str, target: Any) -> None:
    """Refuse a target that is no GPU."""
    if target is not None and not is_gpu(target):
        raise ScheduleError(f"{who}: argument 'target': expected a GPU, got {target.kind.name}")


def in_registers(sch: Any, block: Any, vectors: bool) -> None:
    """Unroll the loops over a thread's features, or make the innermost one a vector."""
    *_, outer, inner = sch.get_loops(block)
    sch.unroll(outer)
    if vectors:
        sch.vectorize(inner)
    else:
        sch.unroll(inner)


def with_occupancy(func: tirx.PrimFunc, config: Any) -> tirx.PrimFunc:
    """Tell nvcc how many blocks a multiprocessor is to hold, by `config.occupancy` in threads."""
    if config.occupancy is None:
        return func
    blocks = config.occupancy // (config.threads * config.rows_per_block)
    number = tirx.IntImm("int32", min(max(blocks, 1), MAX_BLOCKS))

    def visit(loop: Any) -> Any:
        if loop.thread_binding is None or str(loop.thread_binding.thread_tag) != "threadIdx.x":
            return loop
        body = tirx.AttrStmt(loop.loop_var, MIN_BLOCKS, number, loop.body)
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding,
            loop.annotations,
        )  # fmt: skip

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))
