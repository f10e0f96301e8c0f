"""Sparse times a vector on a CPU: y[i] = sum over the stored j of A[i, j] * x[j].

Rows of a few elements leave no time for a loop of their own: each ends where no processor foresees
it. So short rows are sliced: sorted by length within windows, as many as a vector has lanes side by
side, one element of each at a time (SELL-C-sigma: Kreutzer et al., "A unified sparse matrix data
format for efficient general sparse matrix-vector multiplication on modern processors with wide SIMD
units", 2014). Long rows would differ too much to lie side by side: they are summed in vectors along
themselves, out of the CSR arrays as they are.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.formats.index_arrays import starts
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm, vector_lanes
from sparsetir.schedules.passes.known_bounds import trust_indices
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.passes.prefetch_streams import prefetch_streams
from sparsetir.sparse_ir.computed import equal_work
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule

__all__ = ["SlicedRows", "apply", "arrange", "program", "serves"]

# Steps that take as long as to begin a slice or a long row, and to write it.
STORE_COST = 3
# Elements that take about as long as to wake another thread.
WORK_OF_A_THREAD = 1 << 16
# Of the slots of a slice of long rows, what has elements at least.
FILLED = 0.9
# Elements from which on a row is best summed along itself where slices gather their values.
UNPACKED_LONG = 32


@dataclass(frozen=True)
class SlicedRows:
    """How a CPU kernel is made.

    lanes : rows of a slice, a power of two
    long : elements from which on a row is summed along itself, with `packed` unless it finds a
        slice of rows about as long; at least `lanes`; not compiled in
    window : rows that are sorted by length together; not compiled in
    blocks : of slices, and of long rows, which are divided among the threads; one is gone through
        without waking them. Not compiled in, but for one
    prefetch : how many steps of a slice ahead its values and columns are asked for; 0 for never
    packed : values of the slices come in the order of the slots, in an array of their own; else
        they are gathered from those of the matrix, which takes longer and needs no preparation
    """

    lanes: int = 16
    long: int = 256
    window: int = 4096
    blocks: int = 1
    prefetch: int = 32
    packed: bool = True

    def __post_init__(self) -> None:
        who, lanes = "SlicedRows", self.lanes
        if lanes < 1 or lanes & (lanes - 1):
            raise ValueError(f"{who}: argument 'lanes': expected a power of two, got {lanes}")
        for name, least in (("long", lanes), ("window", 1), ("blocks", 1), ("prefetch", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{who}: argument '{name}': expected {least} or more, got {getattr(self, name)}"
                )

    @staticmethod
    def for_pattern(
        problem: Spmm, m: int, nnz: int, threads: int = 1, vector_bits: int = 512
    ) -> SlicedRows:
        """A good config for a pattern of `nnz` elements in `m` rows; a few stay in one thread."""
        lanes = vector_lanes(problem, vector_bits)
        blocks = min(threads, (nnz + STORE_COST * m) // WORK_OF_A_THREAD)
        return SlicedRows(lanes, blocks=max(1, blocks))

    def tiles(self, feat: int) -> int:
        """Tiles of a feature size; raises ScheduleError for any but 1."""
        if feat != 1:
            raise ScheduleError(
                f"SlicedRows.tiles: argument 'feat': the config serves 1 feature, got {feat}"
            )
        return 1

    @property
    def unpacked(self) -> SlicedRows:
        """For values that come with each run, in the order of the matrix.

        Slices gather them, so more rows are summed along themselves.
        """
        return replace(self, packed=False, long=max(UNPACKED_LONG, self.lanes))

    @property
    def compiled(self) -> SlicedRows:
        """What a kernel depends on: whether there is more than one block, not how many."""
        return replace(self, long=self.lanes, window=1, blocks=min(self.blocks, 2))


def serves(problem: Spmm) -> bool:
    """Whether there is a kernel for a problem: sums of one matrix."""
    return problem.reduce == "sum" and not problem.batched


def program(problem: Spmm, config: SlicedRows) -> SparseFunc:
    """The stage-I function, over blocks of slices and of long rows.

    Its arrays, beside A's values a (nnz,), the vector b (n,) and the result out (m,):

    packed_a : (steps, lanes) values of the slots, a[order]; with `packed`
    order : (steps, lanes) place in `a` of each slot; without `packed`
    columns : (steps, lanes) column of each slot; any column where there is no element
    rows, lengths : (slices, lanes) row, and number of its elements, of each lane of a slice. A
        row that fills up the last slice is there twice
    step_ptr : (slices + 1,) first step of each slice; a step has one slot for each lane
    slice_ptr : (blocks + 1,) first slice of each block
    indices : (nnz,) column of each element
    long_rows, long_starts, long_lengths : (longs,) row, first element and number of elements of
        each long row
    vector_ptr : (longs + 1,) first vector of each long row, counted through
    long_ptr : (blocks + 1,) first long row of each block

    The kernel does not check what they hold. Raises ScheduleError for a mean, a maximum and heads.
    """
    if not serves(problem):
        raise ScheduleError(
            "spmv: argument 'config': SlicedRows serves sums of one matrix, "
            f"got reduce='{problem.reduce}', batched={problem.batched}"
        )
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    lanes, packed, size = config.lanes, config.packed, getattr(T, problem.idtype)
    zero = tirx.const(0.0, acc)

    def product(a: Any, x: Any) -> Any:
        return T.cast(a, acc) * T.cast(x, acc)

    def first(u: Any, length: Any) -> Any:
        """Where a vector of a row begins: the last one ends with the row."""
        return T.min(u * lanes, length - lanes)

    def added(values: Any, lo: int, hi: int) -> Any:
        if hi - lo == 1:
            return values[lo]
        middle = (lo + hi) // 2
        return added(values, lo, middle) + added(values, middle, hi)

    @T.prim_func
    def spmv(
        a: T.handle, b: T.handle, out: T.handle, packed_a: T.handle, order: T.handle,
        columns: T.handle, rows: T.handle, lengths: T.handle, step_ptr: T.handle,
        slice_ptr: T.handle, indices: T.handle, long_rows: T.handle, long_starts: T.handle,
        long_lengths: T.handle, vector_ptr: T.handle, long_ptr: T.handle,
        blocks: size, slices: size, steps: size, longs: size, vectors: size,
        m: size, n: size, nnz: size,
    ) -> None:  # fmt: skip
        O = T.dense_fixed(blocks, idtype)
        G = T.dense_variable(O, (slices, slices), slice_ptr, idtype)
        S = T.dense_variable(G, (steps, steps), step_ptr, idtype)
        R = T.dense_variable(O, (longs, longs), long_ptr, idtype)
        U = T.dense_variable(R, (vectors, vectors), vector_ptr, idtype)
        L = T.dense_fixed(lanes, idtype)
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        E = T.dense_fixed(nnz, idtype)
        A = T.match_sparse_buffer(a, (E,), dtype)
        B = T.match_sparse_buffer(b, (N,), dtype)
        C = T.match_sparse_buffer(out, (M,), dtype)
        if packed:
            PACKED = T.match_sparse_buffer(packed_a, (O, G, S, L), dtype)
        else:
            ORDER = T.match_sparse_buffer(order, (O, G, S, L), idtype)
        COLUMNS = T.match_sparse_buffer(columns, (O, G, S, L), idtype)
        ROWS = T.match_sparse_buffer(rows, (O, G, L), idtype)
        LENGTHS = T.match_sparse_buffer(lengths, (O, G, L), idtype)
        INDICES = T.match_sparse_buffer(indices, (E,), idtype)
        LONG_ROWS = T.match_sparse_buffer(long_rows, (O, R), idtype)
        LONG_STARTS = T.match_sparse_buffer(long_starts, (O, R), idtype)
        LONG_LENGTHS = T.match_sparse_buffer(long_lengths, (O, R), idtype)
        ACC = T.alloc_sparse_buffer((L,), acc, "local")
        LONG_ACC = T.alloc_sparse_buffer((L,), acc, "local")
        with T.sp_iter([O], "S", "blocks") as [o]:
            with T.sp_iter([G], "S", "slices") as [g]:
                with T.sp_iter([S, L], "RS", "sum") as [s, l]:
                    with T.init():
                        ACC[l] = zero
                    ACC[l] = T.Select(
                        s < LENGTHS[o, g, l],
                        ACC[l]
                        + product(
                            PACKED[o, g, s, l] if packed else A[ORDER[o, g, s, l]],
                            B[COLUMNS[o, g, s, l]],
                        ),
                        ACC[l],
                    )
                with T.sp_iter([L], "S", "write") as [l]:
                    C[ROWS[o, g, l]] = T.cast(ACC[l], dtype)
            with T.sp_iter([R], "S", "long") as [r]:
                with T.sp_iter([U, L], "RS", "long_sum") as [u, l]:
                    with T.init():
                        LONG_ACC[l] = zero
                    LONG_ACC[l] = T.Select(
                        u * lanes <= first(u, LONG_LENGTHS[o, r]) + l,
                        LONG_ACC[l]
                        + product(
                            A[LONG_STARTS[o, r] + first(u, LONG_LENGTHS[o, r]) + l],
                            B[INDICES[LONG_STARTS[o, r] + first(u, LONG_LENGTHS[o, r]) + l]],
                        ),
                        LONG_ACC[l],
                    )
                C[LONG_ROWS[o, r]] = T.cast(added(LONG_ACC, 0, lanes), dtype)

    unused = {"order"} if packed else {"packed_a"}
    return cast(Any, spmv).replace(params=[p for p in spmv.params if p.name not in unused])


@dataclass(frozen=True)
class Slices:
    """Where the slots of slices take their values: what a ConvertedFormat says of itself.

    order : (steps, lanes) place in `a` of each slot
    padding : share of the slots and of the elements of long rows that hold no element
    packed : as of SlicedRows
    """

    order: np.ndarray
    padding: float
    packed: bool

    @property
    def keeps_order(self) -> bool:
        """Whether the values of the matrix are all that is taken."""
        return not self.packed

    def values(self, /, **stored: Any) -> dict[str, Any]:
        """`a`, the values of A as they are, and `packed_a`, those of the slots; with `packed`."""
        a = stored["A"]
        return {"a": a, "packed_a": _taken(a, self.order)} if self.packed else {"a": a}


def arrange(matrix: CsrPattern, problem: Spmm, config: SlicedRows) -> Arranged:
    """A pattern as :func:`program` takes it, with `order` in any case."""
    del problem
    indptr, indices, (m, n) = matrix
    counts, lanes = np.diff(indptr), config.lanes
    blocks = max(1, min(config.blocks, m))
    rows, long_rows = _sliced(counts, config)
    lengths = counts[rows]
    tallest = lengths.max(axis=1, initial=0)
    step_ptr = starts(tallest)
    vector_ptr = starts(-(-counts[long_rows] // lanes))

    steps = int(step_ptr[-1])
    in_row = (np.arange(steps) - np.repeat(step_ptr[:-1], tallest))[:, None]
    filled = in_row < np.repeat(lengths, tallest, axis=0)
    order = np.where(filled, np.repeat(indptr[rows], tallest, axis=0) + in_row, 0)
    arrays = {
        "order": order,
        "columns": np.where(filled, indices[order], 0),
        "rows": rows,
        "lengths": lengths,
        "step_ptr": step_ptr,
        "slice_ptr": equal_work(step_ptr, blocks, STORE_COST),
        "indices": indices,
        "long_rows": long_rows,
        "long_starts": indptr[long_rows],
        "long_lengths": counts[long_rows],
        "vector_ptr": vector_ptr,
        "long_ptr": equal_work(vector_ptr, blocks, STORE_COST),
    }
    sizes = {
        "blocks": blocks,
        "slices": len(tallest),
        "steps": steps,
        "longs": len(long_rows),
        "vectors": int(vector_ptr[-1]),
        "m": m,
        "n": n,
        "nnz": len(indices),
    }
    found = {k: v.astype(indptr.dtype, copy=False) for k, v in arrays.items()}
    places = steps * lanes + int(counts[long_rows].sum())
    padding = 1 - len(indices) / places if places else 0.0
    stored = Slices(found["order"], padding, config.packed)
    return Arranged(stored, {**found, **sizes})


def _taken(values: Any, order: np.ndarray) -> Any:
    """values[order] of a NumPy, torch or TVM array on the CPU."""
    if isinstance(values, np.ndarray):
        return values.take(order)
    tensor: Any = tvm_ffi.from_dlpack(values)
    dtype = str(tensor.dtype)
    if dtype != "bfloat16":
        return np.from_dlpack(tensor).take(order)
    bits = np.from_dlpack(tensor._create_view(tensor.shape, "uint16")).take(order)
    taken: Any = tvm_ffi.from_dlpack(bits)  # NumPy has no such type
    return taken._create_view(order.shape, dtype)


def _sliced(counts: np.ndarray, config: SlicedRows) -> tuple[np.ndarray, np.ndarray]:
    """(slices, lanes) rows of the slices, the last of the short ones again where they run out; and
    rows that are in none.

    Lengths go up in one window and down in the next, for slices that reach over both.
    """
    lanes = config.lanes
    short = np.flatnonzero(counts < config.long)
    window = short // config.window
    keys = np.where(window % 2, -counts[short], counts[short])
    short = short[np.lexsort((keys, window))]
    short = np.concatenate([short, np.repeat(short[-1:], -len(short) % lanes)])

    long = np.flatnonzero(counts >= config.long)
    long = long[np.argsort(counts[long], kind="stable")]
    whole, rest = np.split(long, [len(long) // lanes * lanes])
    whole = whole.reshape(-1, lanes)
    even = counts[whole].sum(axis=1) >= FILLED * lanes * counts[whole].max(axis=1, initial=0)
    even &= config.packed
    slices = np.concatenate([short.reshape(-1, lanes), whole[even]])
    return slices, np.sort(np.concatenate([whole[~even].ravel(), rest]))


def apply(sch: Schedule, config: SlicedRows) -> None:
    """Schedule the stage-II form of :func:`program`: vectors of the rows of a slice, and along long
    rows; blocks over threads; streams that are asked for ahead.
    """
    stage_two = sch.rewrite(trust_indices, "A", "B", "ORDER", "INDICES", "ROWS", "LONG_ROWS")
    if config.blocks > 1:
        # Free of races, as a row is in one block; the lowering cannot know what `rows` holds.
        blocks = stage_two.get_loops(stage_two.get_sblock("blocks0"))[0]
        run_in_parallel(stage_two, blocks, "parallel", "ignore")
    for name in ("sum0", "long_sum0"):
        block = stage_two.get_sblock(name)
        stage_two.vectorize(stage_two.get_loops(block)[-1])
        init = stage_two.decompose_reduction(block, stage_two.get_loops(block)[0])
        stage_two.vectorize(stage_two.get_loops(init)[-1])
    stage_two.unroll(stage_two.get_loops(stage_two.get_sblock("write0"))[-1])
    if config.prefetch:
        sch.rewrite(apply_kinds)
        streams = ("PACKED" if config.packed else "ORDER", "COLUMNS")
        sch.rewrite(prefetch_streams, "sum0_update", streams, config.prefetch)
