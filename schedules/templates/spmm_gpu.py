"""SpMM over CSR on a GPU: a thread block holds a few rows, its threads the features.

A row of threads (`threadIdx.x`) computes a tile of features of one row of C. Each thread keeps
`coarsen` vectors of neighbouring features in registers: B is read, and C written, in vectors that
neighbouring threads have side by side. (GE-SpMM, section 3.) There are no atomics, since each row
of C belongs to one row of threads.

    blockIdx.x, threadIdx.y    rows
    blockIdx.y                 tiles of threads * coarsen * vector features
    blockIdx.z                 heads of a batch
    threadIdx.x                vectors within a tile

All threads of a row need the same column indices and values. By default each loads them itself: one
address for all, which the L1 cache serves at once. With `row_cache`, each thread loads one element
of a chunk into shared memory for all of them (GE-SpMM's coalesced row caching). That takes barriers
inside of a loop as long as the row, which only threads of one row pass equally often: a block then
has one row.
"""

# The script's types are values to pyright.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.feature_tiles import Tiled
from sparsetir.schedules.templates.gpu_features import (
    FeaturePlaces,
    check_target,
    check_vector,
    in_registers,
    opaque,
    vector_width,
    with_occupancy,
)
from sparsetir.sparse_ir.allocations import block_with
from sparsetir.sparse_ir.nodes import SparseFunc, buffer_var, map_expr, substitute
from sparsetir.sparse_ir.position_space import as_dtype, dtype_of

__all__ = ["RowSplit", "arrange", "program", "schedule", "without_unused"]

MAX_THREADS = 1024  # of a block
MAX_OCCUPANCY = 2048
MAX_SUMS = 64  # sums of a thread: more would not stay in registers


@dataclass(frozen=True)
class RowSplit(Tiled):
    """How rows and features are spread over threads.

    threads : threads of a row
    rows_per_block : rows of a thread block
    vector : neighbouring features in one load, a power of two; of at most 16 bytes
    coarsen : vectors of a thread, `threads` vectors apart
    feat : the feature size as a constant of the kernel, a multiple of `vector`. None: it is
        any multiple of `tile`, known when the kernel runs
    row_cache : stage column indices and values in shared memory; with one row per block
    occupancy : threads that a multiprocessor is to hold, which leaves each 65536 / occupancy
        registers. None: nvcc decides, which then takes few, and has fewer loads under way
    """

    threads: int = 32
    rows_per_block: int = 4
    vector: int = 4
    coarsen: int = 1
    feat: int | None = None
    row_cache: bool = False
    occupancy: int | None = 1024

    def __post_init__(self) -> None:
        for name in ("threads", "rows_per_block", "vector", "coarsen", "feat", "occupancy"):
            value = getattr(self, name)
            if name in ("feat", "occupancy") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"RowSplit: argument '{name}': expected a positive integer, got {value!r}"
                )
        self._expect(
            self.threads * self.rows_per_block <= MAX_THREADS, "rows_per_block",
            f"threads * rows_per_block to be at most {MAX_THREADS}",
            self.threads * self.rows_per_block,
        )  # fmt: skip
        self._expect(self.vector in (1, 2, 4, 8), "vector", "1, 2, 4 or 8", self.vector)
        self._expect(
            (self.occupancy or 1) <= MAX_OCCUPANCY,
            "occupancy",
            f"at most {MAX_OCCUPANCY}",
            self.occupancy,
        )
        sums = self.coarsen * self.vector
        self._expect(
            sums <= MAX_SUMS, "coarsen", f"coarsen * vector to be at most {MAX_SUMS}", sums
        )
        self._expect(
            self.feat is None or self.feat % self.vector == 0, "feat",
            f"a multiple of vector = {self.vector}", self.feat,
        )  # fmt: skip
        self._expect(
            not self.row_cache or self.rows_per_block == 1, "row_cache",
            "rows_per_block = 1, since barriers lie in the loop over a row", self.rows_per_block,
        )  # fmt: skip

    @staticmethod
    def _expect(holds: bool, argument: str, expected: str, got: object) -> None:
        if not holds:
            raise ValueError(f"RowSplit: argument '{argument}': expected {expected}, got {got!r}")

    @classmethod
    def for_features(cls, feat: int, dtype: str = "float32") -> RowSplit:
        """A configuration for a feature size, with no thread idle where the size allows it.

        The size is a constant of the kernel, which makes a third of its instructions unnecessary.
        """
        vector = vector_width(feat, dtype)
        vectors = feat // vector
        threads = max(t for t in range(1, 129) if vectors % t == 0)
        if threads < 16 < vectors:  # such as a prime number
            threads = 32
        return cls(threads, max(1, 128 // threads), vector, feat=feat)

    @property
    def compiled(self) -> RowSplit:
        """What a kernel depends on: all of it."""
        return self

    @property
    def tile(self) -> int:
        """Features that the threads of a row compute."""
        return self.threads * self.coarsen * self.vector


def program(problem: Spmm, config: RowSplit) -> SparseFunc:
    """The stage-I function.

    a : (nnz,) values; b : (n, feat); c : (m, feat), written. A batch has `heads` of each
    indptr : (m + 1,), indices : (nnz,)
    m, n, nnz : sizes of the matrix
    tiles : :meth:`RowSplit.tiles`; absent where the config says `feat`
    heads : absent where there is no batch

    Raises ScheduleError for vectors of more than 16 bytes.
    """
    check_vector("spmm_gpu.program", config.vector, problem.dtype)
    dtype, it, total = problem.dtype, problem.idtype, problem.accumulator
    batched, kinds = problem.batched, "SSSS" if problem.batched else "SSS"
    at = FeaturePlaces(config)
    is_max, is_mean, counts = (
        problem.reduce == "max", problem.reduce == "mean", problem.reduce != "sum"
    )  # fmt: skip
    start = float("-inf") if is_max else 0.0
    size: Any = getattr(T, it)
    threads, coarsen, vector = config.threads, config.coarsen, config.vector

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: size, nnz: size, tiles: T.int32, heads: T.int32,
    ) -> None:  # fmt: skip
        if batched:
            H = T.dense_fixed(heads)
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), it)
        J_ = T.dense_fixed(n, it)
        K = T.dense_fixed(at.size(tiles))
        P = T.dense_fixed(at.tiles(tiles))
        W = T.dense_fixed(coarsen)
        X = T.dense_fixed(threads)
        L = T.dense_fixed(vector)
        ONE = T.dense_fixed(1)
        A = T.match_sparse_buffer(a, [H, I, J] if batched else [I, J], dtype)
        B = T.match_sparse_buffer(b, [H, J_, K] if batched else [J_, K], dtype)
        C = T.match_sparse_buffer(c, [H, I, K] if batched else [I, K], dtype)
        ROW = T.alloc_sparse_buffer((W, L), dtype, "local")
        SUM = T.alloc_sparse_buffer((W, L), total, "local")
        OUT = T.alloc_sparse_buffer((W, L), dtype, "local")
        COUNT = T.alloc_sparse_buffer((ONE,), "int32", "local")
        with T.sp_iter([H, P, I, X] if batched else [P, I, X], kinds, "rows") as [*h, p, i, x]:
            with T.sp_iter([W, L], "SS", "start") as [w, l]:
                SUM[w, l] = T.cast(start, total)
            if counts:
                COUNT[0] = 0
            with T.sp_iter([J], "R", "elements") as [j]:
                with T.sp_iter([W, L], "SS", "load") as [w, l]:
                    ROW[w, l] = B[(*h, j, at.load(p, w, x, l))]
                with T.sp_iter([W, L], "SS", "add") as [w, l]:
                    SUM[w, l] = problem.combine(
                        SUM[w, l], T.cast(A[(*h, i, j)], total) * T.cast(ROW[w, l], total)
                    )
                if counts:
                    COUNT[0] = COUNT[0] + 1
            with T.sp_iter([W, L], "SS", "finish") as [w, l]:
                if is_max:
                    OUT[w, l] = T.Select(COUNT[0] > 0, T.cast(SUM[w, l], dtype), T.cast(0, dtype))
                elif is_mean:
                    OUT[w, l] = T.cast(SUM[w, l] / T.cast(T.max(COUNT[0], 1), total), dtype)
                else:
                    OUT[w, l] = T.cast(SUM[w, l], dtype)
            with T.sp_iter([W, L], "SS", "write") as [w, l]:
                if at.stored(p, w, x):
                    C[(*h, opaque(i), at.store(p, w, x, l))] = OUT[w, l]

    return without_unused(spmm, problem, config)


def without_unused(func: Any, problem: Spmm, config: Any) -> SparseFunc:
    """The function without scalar parameters that it does not need."""
    unused = set() if problem.batched else {"heads"}
    unused |= set() if config.feat is None else {"tiles"}
    return func.replace(params=[p for p in func.params if p.name not in unused])


def arrange(matrix: CsrPattern, problem: Spmm, config: RowSplit) -> Arranged:
    """The arguments of :func:`program` that depend on the pattern alone."""
    indptr, indices, (m, n) = matrix
    sizes = {"m": int(m), "n": int(n), "nnz": len(indices)}
    return Arranged({"indptr": indptr, "indices": indices, **sizes})


def schedule(
    func: tirx.PrimFunc, problem: Spmm, config: RowSplit, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage II of :func:`program`; the function given is left as it is.

    Raises ScheduleError for a target that is no GPU.
    """
    check_target("spmm_gpu.schedule", target)
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    *heads, tiles, rows, threads = sch.get_loops(sch.get_sblock("rows0"))
    for name in ("start0", "load0", "add0", "finish0", "write0"):
        in_registers(sch, sch.get_sblock(name), vectors=name in ("load0", "write0"))
    if config.row_cache:
        blocks, inside = rows, []
        _cache_rows(sch, config.threads)
    else:
        blocks, in_block = sch.split(rows, [None, config.rows_per_block])
        run_in_parallel(sch, in_block, "threadIdx.y", "ignore")
        inside = [in_block]
    sch.reorder(*heads, tiles, blocks, *inside, threads)
    # Each thread writes features of its own; `opaque` hides that C is written at the row itself.
    for loop in heads:
        run_in_parallel(sch, loop, "blockIdx.z", "ignore")
    run_in_parallel(sch, tiles, "blockIdx.y", "ignore")
    run_in_parallel(sch, blocks, "blockIdx.x", "ignore")
    run_in_parallel(sch, threads, "threadIdx.x", "ignore")
    (done,) = sch.mod.functions.values()
    done = apply_kinds(done)
    done = with_occupancy(done, config)
    return _in_chunks(done, config.threads) if config.row_cache else done


# What `row_cache` stages in shared memory, and what TVM calls the copies.
CACHED = ("J_indices", "A")


def _cache_rows(sch: Any, chunk: int) -> None:
    """Let each thread of a row load one element of every chunk into shared memory."""
    elements = sch.get_sblock("elements0")
    (loop,) = sch.get_loops(elements)
    chunks, _ = sch.split(loop, [None, chunk])
    for name in CACHED:
        reads = [str(r.source.name) for r in sch.get(elements).reads]
        copy = sch.cache_read(elements, reads.index(name), "shared")
        sch.compute_at(copy, chunks)
        run_in_parallel(sch, sch.get_loops(copy)[-1], "threadIdx.x")


def _in_chunks(func: tirx.PrimFunc, chunk: int) -> tirx.PrimFunc:
    """Make the cached rows as long as a chunk: TVM takes them for as long as the row."""
    small: dict[Any, Any] = {}

    def within(index: Any) -> Any:
        return tirx.floormod(index[-1], as_dtype(chunk, dtype_of(index[-1])))

    def block(node: Any) -> Any:
        for var in node.alloc_buffers:
            if var.name in [f"{name}_shared" for name in CACHED]:
                small[var] = buffer_var([chunk], var.ty.dtype, var.name, var.ty.storage_scope)
        return node

    map_expr(func.body, [(s_tir.SBlock, block)])

    def load(node: Any) -> Any:
        if node.source not in small:
            return node
        return tirx.BufferLoad(small[node.source], [within(node.indices)])

    def store(node: Any) -> Any:
        if node.buffer not in small:
            return node
        return tirx.BufferStore(small[node.buffer], node.value, [within(node.indices)])

    def region(node: Any) -> Any:
        if node.source not in small:
            return node
        whole = ir.Range.from_min_extent(as_dtype(0, "int32"), as_dtype(chunk, "int32"))
        return tirx.BufferRegion(small[node.source], [whole])

    def allocations(node: Any) -> Any:
        kept = [small.get(v, v) for v in node.alloc_buffers]
        return block_with(node, alloc_buffers=kept)

    rules = [
        (ir.TensorLoad, load),
        (tirx.BufferStore, store),
        (ir.TensorRegion, region),
        (s_tir.SBlock, allocations),
    ]
    return func.with_body(substitute(map_expr(func.body, rules), small))
