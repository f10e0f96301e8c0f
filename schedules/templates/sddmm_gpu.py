"""SDDMM on a GPU: OUT[e] = X[rows[e]] . Y[cols[e]], a few threads for each non-zero.

PRedS (Yu et al.), generalised as in SparseTIR, section 4.2.2: the space of non-zeros is one loop,
so that all threads have the same work however long rows are. The threads of a group (`threadIdx.x`)
share a non-zero. The reduction over features has two stages: each thread sums up what it loaded,
in vectors that neighbouring threads have side by side; then the group adds up its threads' sums,
by shuffles. A group takes `work` non-zeros at once, whose loads are under way together.

    blockIdx.x, threadIdx.y    groups
    blockIdx.y                 heads of a batch
    threadIdx.x                vectors of features
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from sparsetir.schedules.operators.problems import accumulator
from sparsetir.schedules.passes.parallel_loops import apply_kinds, in_vectors, run_in_parallel
from sparsetir.schedules.templates.feature_tiles import Tiled
from sparsetir.schedules.templates.gpu_features import (
    MAX_BLOCKS,
    MIN_BLOCKS,
    check_vector,
    vector_width,
)
from sparsetir.schedules.templates.shapes import element_reduction
from sparsetir.sparse_ir.nodes import map_expr
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter

__all__ = ["FusedNonzeros", "apply"]

WARP = 32
MAX_THREADS = 1024  # of a block


@dataclass(frozen=True)
class FusedNonzeros(Tiled):
    """How non-zeros and features are spread over threads.

    threads : that share a non-zero, a power of two up to 32
    groups : of `threads` in a thread block
    work : non-zeros of a group
    vector : neighbouring features in one load, a power of two; of at most 16 bytes
    coarsen : vectors of a thread in a tile, `threads` vectors apart
    feat : the feature size as a constant of the kernel, a multiple of `vector`. None: it is any
        multiple of `tile`, known when the kernel runs
    occupancy : threads that a multiprocessor is to hold, which leaves each 65536 / occupancy
        registers. None: nvcc decides
    """

    threads: int = 8
    groups: int = 16
    work: int = 2
    vector: int = 4
    coarsen: int = 2
    feat: int | None = None
    occupancy: int | None = 768

    def __post_init__(self) -> None:
        for name in ("threads", "groups", "work", "vector", "coarsen", "feat", "occupancy"):
            value = getattr(self, name)
            if name in ("feat", "occupancy") and value is None:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._expect(whole and value >= 1, name, "a positive integer", value)
        within = self.threads <= WARP and not self.threads & (self.threads - 1)
        self._expect(within, "threads", f"a power of two up to {WARP}", self.threads)
        most = MAX_THREADS // self.threads
        self._expect(self.groups <= most, "groups", f"at most {most}", self.groups)
        self._expect(self.vector in (1, 2, 4, 8), "vector", "1, 2, 4 or 8", self.vector)
        fits = self.feat is None or self.feat % self.vector == 0
        self._expect(fits, "feat", f"a multiple of vector = {self.vector}", self.feat)

    @staticmethod
    def _expect(holds: bool, argument: str, expected: str, got: object) -> None:
        if not holds:
            raise ValueError(
                f"FusedNonzeros: argument '{argument}': expected {expected}, got {got!r}"
            )

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32") -> FusedNonzeros:
        """A configuration for a feature size: short rows take fewer threads and more non-zeros."""
        vector = vector_width(feat, dtype)
        vectors = feat // vector
        threads = min(WARP, 1 << max(0, (vectors - 1).bit_length() - 1))
        coarsen = min(4, -(-vectors // threads))
        work = 4 if coarsen <= 2 else 2  # up to 16 loads under way, for which there are registers
        return cls(threads, 128 // threads, work, vector, coarsen, feat)

    @property
    def compiled(self) -> FusedNonzeros:
        """What a kernel depends on: all of it."""
        return self

    @property
    def tile(self) -> int:
        """Features that a group adds up in one step."""
        return self.threads * self.coarsen * self.vector


def apply(sch: Schedule, config: FusedNonzeros) -> None:
    """Schedule a program that sums over features for each stored element.

    Before (stage I), and after::

        with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]: ...

        with T.sp_iter([I_J0, I_J1], "SS", "sddmm") as [ij0, ij1]:  # blocks, groups
            ...  # sddmm_start
            with T.sp_iter([K2, K0], "SR", "sddmm_reduce") as [k2, k0]:  # threads, tiles
                ...  # Y_ws_copy, X_ws_copy
                with T.sp_iter([I_J2, K1, K3], "SRR", "sddmm_reduce_rest") as [ij2, k1, k3]: ...
            ...  # sddmm_sums, sddmm_write

    Raises ScheduleError for vectors of more than 16 bytes.
    """
    found = element_reduction(sch, "FusedNonzeros")
    check_vector("FusedNonzeros", config.vector, found.dtype)
    elements = sch.positions(found.elements)
    # Behind the last non-zero, and the last vector of features, there is nothing to store: these
    # are computed again, so that loads need no conditions.
    _, groups, work = sch.split(elements, [None, config.groups, config.work], tail="repeat")
    *_, threads, _ = _features(sch, found.features, config)
    start, reduce, sums, write = sch.precompute(
        found.result, groups, [work], lanes=[threads], dtype=accumulator(found.dtype)
    )
    work, tiles, coarsen, threads, vector = sch.get_sp_iters(reduce)
    sch.sparse_reorder(reduce, [threads, tiles, work, coarsen, vector])
    for operand, _ in reversed(found.operands):
        sch.precompute(operand, sch.get_sp_iters(reduce)[1], [work, coarsen, vector])
    stage_two = sch.lower()

    def block(step: SparseIterationRef) -> Any:
        return stage_two.get_sblock(f"{step.name}0")

    *heads, blocks, groups = stage_two.get_loops(block(found.iteration))
    for head in heads:
        run_in_parallel(stage_two, head, "blockIdx.y")
    run_in_parallel(stage_two, blocks, "blockIdx.x")
    run_in_parallel(stage_two, groups, "threadIdx.y")
    for step, at in ((start, 1), (reduce, 0), (sums, 1)):
        run_in_parallel(stage_two, stage_two.get_loops(block(step))[at], "threadIdx.x")
    *copies, products = stage_two.get_child_blocks(block(reduce))
    for copy in copies:
        in_vectors(stage_two, copy, 3)
    straight = [*stage_two.get_loops(products), stage_two.get_loops(block(start))[0]]
    for loop in [*straight, *stage_two.get_loops(block(write))]:
        stage_two.unroll(loop)
    if config.occupancy is not None:
        resident = config.occupancy // (config.threads * config.groups)
        sch.rewrite(with_occupancy, min(max(resident, 1), MAX_BLOCKS))


def _features(sch: Schedule, features: SpIter, config: FusedNonzeros) -> list[SpIter]:
    """Cut features into tiles, vectors of a thread, threads, and the features of a vector."""
    if config.feat is None:
        sizes = [None, config.coarsen, config.threads, config.vector]
        return sch.split(features, sizes, tail="exact")
    sch.bound(features, config.feat, "exact")
    vectors, vector = sch.split(features, [None, config.vector], tail="exact")
    tiles = sch.split(vectors, [None, config.coarsen, config.threads], tail="repeat")
    return [*tiles, vector]


def with_occupancy(func: tirx.PrimFunc, blocks: int) -> tirx.PrimFunc:
    """Tell nvcc how many blocks a multiprocessor is to hold."""

    def visit(loop: Any) -> Any:
        # Around the block of the reduction over threadIdx.x there must be nothing but its loop.
        if loop.thread_binding is None or str(loop.thread_binding.thread_tag) != "threadIdx.y":
            return loop
        number = tirx.IntImm("int32", blocks)
        body = tirx.AttrStmt(loop.loop_var, MIN_BLOCKS, number, loop.body)
        kind, thread = loop.kind, loop.thread_binding
        return tirx.For(loop.loop_var, loop.min, loop.extent, kind, body, thread, loop.annotations)

    bound = apply_kinds(func)
    return bound.with_body(map_expr(bound.body, [(tirx.For, visit)]))
