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

# The script's types are values to pyright.
# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Sddmm
from sparsetir.schedules.passes.known_bounds import trust_indices
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.feature_tiles import Tiled
from sparsetir.schedules.templates.gpu_features import (
    MAX_BLOCKS,
    MIN_BLOCKS,
    FeaturePlaces,
    check_target,
    check_vector,
    vector_width,
)
from sparsetir.sparse_ir.computed import row_of_position
from sparsetir.sparse_ir.nodes import SparseFunc, map_expr

__all__ = ["FusedNonzeros", "arrange", "program", "schedule"]

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


def program(problem: Sddmm, config: FusedNonzeros) -> SparseFunc:
    """The stage-I function, with the arguments of `program` of the CPU's template.

    Raises ScheduleError for vectors of more than 16 bytes.
    """
    check_vector("sddmm_gpu.program", config.vector, problem.dtype)
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    groups, work, batched, size = config.groups, config.work, problem.batched, getattr(T, idtype)
    threads, coarsen, vector = config.threads, config.coarsen, config.vector
    at = FeaturePlaces(config)
    kinds = "SSSS" if batched else "SSS"

    def number(b: Any, g: Any, u: Any) -> Any:
        """Of a non-zero; behind the last one there is nothing to store."""
        return (b * groups + g) * work + u

    def counted(value: Any, p: Any, w: Any, t: Any) -> Any:
        """Zero for a vector that another thread counts: feature sizes may leave threads over."""
        return value if at.whole else T.Select(at.stored(p, w, t), value, tirx.const(0.0, acc))

    @T.prim_func
    def sddmm(
        x: T.handle, y: T.handle, out: T.handle, rows: T.handle, cols: T.handle,
        heads: size, m: size, n: size, nnz: size, tiles: size,
    ) -> None:  # fmt: skip
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        E = T.dense_fixed(nnz, idtype)
        B = T.dense_fixed((nnz + (groups * work - 1)) // (groups * work), idtype)
        G = T.dense_fixed(groups, idtype)
        U = T.dense_fixed(work, idtype)
        S = T.dense_fixed(threads, idtype)
        P = T.dense_fixed(at.tiles(tiles), idtype)
        K = T.dense_fixed(at.size(tiles), idtype)
        W = T.dense_fixed(coarsen, idtype)
        L = T.dense_fixed(vector, idtype)
        if batched:
            H = T.dense_fixed(heads, idtype)
        X = T.match_sparse_buffer(x, (H, M, K) if batched else (M, K), dtype)
        Y = T.match_sparse_buffer(y, (H, N, K) if batched else (N, K), dtype)
        OUT = T.match_sparse_buffer(out, (H, E) if batched else (E,), dtype)
        ROWS = T.match_sparse_buffer(rows, (E,), idtype)
        COLS = T.match_sparse_buffer(cols, (E,), idtype)
        LEFT = T.alloc_sparse_buffer((U, W, L), dtype, "local")
        RIGHT = T.alloc_sparse_buffer((U, W, L), dtype, "local")
        PART = T.alloc_sparse_buffer((U, S), acc, "local")
        SUM = T.alloc_sparse_buffer((U,), acc, "local")
        with T.sp_iter((H, B, G) if batched else (B, G), kinds[1:], "groups") as [*h, b, g]:
            with T.sp_iter([S], "S", "thread") as [t]:
                with T.sp_iter([U], "S", "start") as [u]:
                    PART[u, t] = tirx.const(0.0, acc)
                with T.sp_iter([P], "R", "tiles") as [p]:
                    with T.sp_iter([U, W, L], "SSS", "left") as [u, w, l]:
                        LEFT[u, w, l] = X[
                            (*h, ROWS[T.min(number(b, g, u), nnz - 1)], at.load(p, w, t, l))
                        ]
                    with T.sp_iter([U, W, L], "SSS", "right") as [u, w, l]:
                        RIGHT[u, w, l] = Y[
                            (*h, COLS[T.min(number(b, g, u), nnz - 1)], at.load(p, w, t, l))
                        ]
                    with T.sp_iter([U, W, L], "SRR", "add") as [u, w, l]:
                        PART[u, t] = PART[u, t] + counted(
                            T.cast(LEFT[u, w, l], acc) * T.cast(RIGHT[u, w, l], acc), p, w, t
                        )
            with T.sp_iter([U, S], "SR", "sums") as [u, t]:
                with T.init():
                    SUM[u] = tirx.const(0.0, acc)
                SUM[u] = SUM[u] + PART[u, t]
            with T.sp_iter([U], "S", "write") as [u]:
                OUT[(*h, number(b, g, u))] = T.cast(SUM[u], dtype)

    return cast(SparseFunc, sddmm)


def arrange(matrix: CsrPattern, problem: Sddmm, config: FusedNonzeros) -> Arranged:
    """The arguments of :func:`program` that depend on the pattern alone."""
    del problem, config
    indptr, cols, (m, n) = matrix
    rows = row_of_position(indptr)
    return Arranged({"rows": rows, "cols": cols, "m": m, "n": n, "nnz": len(cols)})


def schedule(
    func: tirx.PrimFunc, problem: Sddmm, config: FusedNonzeros, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is.

    Raises ScheduleError for a target that is no GPU.
    """
    check_target("sddmm_gpu.schedule", target)
    sch = s_tir.Schedule(s_tir.renew_defs(trust_indices(func, "ROWS", "COLS")))
    *heads, blocks, groups = sch.get_loops(sch.get_sblock("groups0"))
    # PART is of each group: its threads write their own sums before they are added up, which is
    # not proven, as the stores of one thread are no whole row.
    for loop in heads:
        run_in_parallel(sch, loop, "blockIdx.y", "ignore")
    run_in_parallel(sch, blocks, "blockIdx.x", "ignore")
    run_in_parallel(sch, groups, "threadIdx.y", "ignore")
    for name in ("start0", "left0", "right0", "add0", "sums0", "write0"):
        *outer, last = sch.get_loops(sch.get_sblock(name))
        for loop in outer if name != "sums0" else ():
            sch.unroll(loop)
        if name in ("left0", "right0"):
            sch.vectorize(last)
        elif name == "sums0":
            run_in_parallel(sch, last, "threadIdx.x")
        else:
            sch.unroll(last)
    run_in_parallel(sch, sch.get_loops(sch.get_sblock("thread0"))[-1], "threadIdx.x")
    (func,) = sch.mod.functions.values()
    return _with_occupancy(apply_kinds(func), config)


def _with_occupancy(func: tirx.PrimFunc, config: FusedNonzeros) -> tirx.PrimFunc:
    """Tell nvcc how many blocks a multiprocessor is to hold, by `config.occupancy` in threads."""
    if config.occupancy is None:
        return func
    blocks = config.occupancy // (config.threads * config.groups)
    number = tirx.IntImm("int32", min(max(blocks, 1), MAX_BLOCKS))

    def visit(loop: Any) -> Any:
        # Around the block of the reduction over threadIdx.x there must be nothing but its loop.
        if loop.thread_binding is None or str(loop.thread_binding.thread_tag) != "threadIdx.y":
            return loop
        body = tirx.AttrStmt(loop.loop_var, MIN_BLOCKS, number, loop.body)
        kind, thread = loop.kind, loop.thread_binding
        return tirx.For(loop.loop_var, loop.min, loop.extent, kind, body, thread, loop.annotations)

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))
