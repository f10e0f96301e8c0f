"""SDDMM on a GPU: OUT[e] = X[rows[e]] . Y[cols[e]], with a few threads per nonzero.

PRedS (Yu et al.), generalised as in SparseTIR, section 4.2.2: one loop over all nonzeros, so that
all threads have equal work however long rows are. The threads of a group (`threadIdx.x`) share a
nonzero. The reduction over features has two stages: each thread sums what it loaded, in vectors
that are contiguous across neighbouring threads; then the group reduces its threads' sums by
shuffles. A group processes `work` nonzeros at once, whose loads overlap.

    blockIdx.x, threadIdx.y    groups
    blockIdx.y                 heads of a batch
    threadIdx.x                vectors of features
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.gpu.features import (
    MAX_OCCUPANCY,
    MAX_THREADS,
    GpuTiled,
    feature_loops,
    occupy,
    vector_width,
)
from sparsetir.schedules.operators.problems import Sddmm, accumulator
from sparsetir.schedules.operators.sddmm import program
from sparsetir.schedules.passes.nests import WARP
from sparsetir.schedules.passes.parallel_loops import in_vectors, run_in_parallel
from sparsetir.schedules.template import SearchInput, Template, Tried, around, register
from sparsetir.schedules.templates.shapes import element_reduction
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef


@dataclass(frozen=True)
class FusedNonzeros(GpuTiled):
    """The distribution of nonzeros and features over threads.

    threads : threads that share a nonzero, a power of two up to 32
    groups : groups of `threads` in a thread block, of neighbouring nonzeros
    work : nonzeros per group, `groups` apart
    Other fields as in :class:`sparsetir.schedules.gpu.features.GpuTiled`.
    """

    threads: int = number(8, most=WARP, power=True)
    groups: int = number(16)
    work: int = number(2)
    vector: int = number(4)
    coarsen: int = number(2)
    feat: int | None = number(None, optional=True)
    occupancy: int | None = number(768, most=MAX_OCCUPANCY, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MAX_THREADS // self.threads
        expect(self, "groups", self.groups <= most, f"at most {most}")

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32") -> FusedNonzeros:
        """A configuration for a feature size: short rows get fewer threads and more nonzeros.

        A thread has two vectors of features, or four where eight threads or more share a nonzero.
        """
        vector = vector_width(feat, dtype)
        vectors = feat // vector
        threads = 1 << max(0, (vectors - 1).bit_length() - 1)
        threads = min(WARP, max(8, threads // 2)) if threads > 8 else threads
        coarsen = min(4, -(-vectors // threads))
        work = 4 if coarsen <= 2 else 2  # up to 16 loads in flight, for which there are registers
        return cls(threads, 128 // threads, work, vector, coarsen, feat)


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
    reduction = element_reduction(sch, "FusedNonzeros")
    config.check_vector(reduction.dtype)
    elements = sch.positions(reduction.elements)
    # Past the last nonzero, and the last vector of features, the last ones are recomputed, so that
    # loads need no guards.
    # Neighbouring groups have neighbouring nonzeros: of one row, as a rule, and of one sector.
    blocks, work, groups = sch.split(elements, [None, config.work, config.groups], tail="repeat")
    *_, threads, _ = feature_loops(sch, reduction.features, config, tail="repeat")
    loops = sch.get_sp_iters(reduction.iteration)
    heads, features = loops[: loops.index(blocks)], loops[loops.index(groups) + 1 :]
    sch.sparse_reorder(reduction.iteration, [*heads, blocks, groups, work, *features])
    start, reduce, sums, write = sch.precompute(
        reduction.result, groups, [work], lanes=[threads], dtype=accumulator(reduction.dtype)
    )
    work, tiles, coarsen, threads, vector = sch.get_sp_iters(reduce)
    sch.sparse_reorder(reduce, [threads, tiles, work, coarsen, vector])
    for operand, _ in reversed(reduction.operands):
        sch.precompute(operand, sch.get_sp_iters(reduce)[1], [work, coarsen, vector])
    stage_two = sch.lower()

    def block(step: SparseIterationRef) -> Any:
        return stage_two.get_sblock(step.block)

    *heads, blocks, groups = stage_two.get_loops(block(reduction.iteration))
    for head in heads:
        run_in_parallel(stage_two, head, "blockIdx.y")
    run_in_parallel(stage_two, blocks, "blockIdx.x")
    run_in_parallel(stage_two, groups, "threadIdx.y")
    for step, depth in ((start, 1), (reduce, 0), (sums, 1)):
        run_in_parallel(stage_two, stage_two.get_loops(block(step))[depth], "threadIdx.x")
    *copies, products = stage_two.get_child_blocks(block(reduce))
    for copy in copies:
        in_vectors(stage_two, copy, 3)
    straight = [*stage_two.get_loops(products), stage_two.get_loops(block(start))[0]]
    for loop in [*straight, *stage_two.get_loops(block(write))]:
        stage_two.unroll(loop)
    # The block of the reduction over threadIdx.x may only have that loop around it.
    occupy(sch, config, config.threads * config.groups, "threadIdx.y")


def candidates(problem: Sddmm, stats: Any, target: Any) -> list[FusedNonzeros]:
    """Configs for the feature size, and with fewer and more nonzeros per group."""
    del target
    config = FusedNonzeros.for_features(stats.feat, problem.dtype)
    return [config, *(replace(config, work=work) for work in (1, 8) if work != config.work)]


def choices(search: SearchInput) -> Tried:
    """The choices around the candidates, with blocks of 128 threads."""
    configs = search.own(FusedNonzeros)
    tried, _ = around(
        configs, threads=(4, 8, 16, 32), work=(1, 2, 4, 8), vector=[max(1, configs[0].vector // 2)],
        coarsen=(1, 2, 4), occupancy=(None, 768, 1024),
    )  # fmt: skip

    def make(threads: int, **others: Any) -> FusedNonzeros:
        return replace(configs[0], threads=threads, groups=128 // threads, **others)

    return tried, make


register(
    Template(FusedNonzeros, Sddmm, program, apply, gpu=True, candidates=candidates, choices=choices)
)
