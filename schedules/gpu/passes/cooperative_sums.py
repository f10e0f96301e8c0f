"""Sums of gathered rows by all threads of a block (GPU).

Before, the nest of inner sums that :func:`.atomic_products.sum_then_matmul` creates::

    for it, k1 in T.grid(32, 16):
        with T.sblock("rgms0_gather"):
            G[it, k1] = 0
            for jb in range(8):
                if J[rt, it, jb] >= 0 and k0 * 16 + k1 < feat_in:
                    G[it, k1] = G[it, k1] + A[rt, it, jb] * X[J[rt, it, jb], k0 * 16 + k1]

After `cooperative_gather(func, "rgms0_gather", warps=4, vector=4)`, where each thread has one
step::

    for warp, lane in threads:
        with T.sblock("rgms0_gather"):
            for u0 in T.unroll(1):
                total[0:4] = 0.0
                for jb in range(0, 8, 4):            # elements whose loads are under way together
                    for n in T.unroll(4):
                        if ...: row[n, 0:4] = X[J[..], k:k + 4]; factor[n] = A[..]
                        else: row[n, 0:4] = 0; factor[n] = 0
                    for n in T.unroll(4):
                        total[0:4] += factor[n] * row[n, 0:4]
                G[it, k1:k1 + 4] = total[0:4]

Accumulators have the type of the terms, and are rounded to that of G once.

Each sum over rows of two operands is computed by neighbouring threads. Before, the nest that
:func:`.atomic_products.matmul_then_dot` leaves::

    for it, jb, k1 in T.grid(32, 4, 64):
        with T.sblock("rgms0_dots"):
            if I[rt, it] >= 0 and J[rt, it, jb] >= 0 and k0 * 64 + k1 < feat_in:
                atomicAdd(DA[E[rt, it, jb]], X[J[rt, it, jb], k0 * 64 + k1] * products[it, k1])

After `cooperative_dot(func, "rgms0_dots", warps=4, vector=4)`, where 16 threads share an element::

    barrier                                                # products is written
    for warp, lane in threads:
        with T.sblock("rgms0_dots"):
            for u0 in range(16):                           # elements of these 16 threads
                total[0] = 0.0
                for u1 in T.unroll(1):                     # vectors of a thread
                    if ...: total[0] += sum of X[J[..], k:k + 4] * products[it, k1:k1 + 4]
                for distance in (8, 4, 2, 1):
                    total[0] += __shfl_xor_sync(total[0], distance)
                if lane % 16 == 0 and I[rt, it] >= 0 and J[rt, it, jb] >= 0:
                    atomicAdd(DA[E[rt, it, jb]], total[0])

Later writes to the rows in shared memory have to wait for all threads first.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.atomic_products import AtomicProduct, atomic_product
from sparsetir.schedules.gpu.passes.cooperative_copy import for_vectors, padded, places_of
from sparsetir.schedules.gpu.passes.tile_elements import from_lane
from sparsetir.schedules.passes.nests import (
    WARP,
    Nest,
    allocated,
    element_bytes,
    find_nest,
    for_threads,
    replaced,
    unrolled,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, substitute
from sparsetir.sparse_ir.reduction import add_guards, factors_of, split_guards
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    barrier,
    cast,
    dtype_of,
    free_vars,
    loop_over,
    uncast,
)

GATHER, DOTS = "cooperative_gather", "cooperative_dot"
VECTOR_BYTES = 16  # the widest load
AHEAD = 4  # elements whose loads are in flight together


def cooperative_gather(
    func: tirx.PrimFunc, gather: str, *, warps: int, vector: int
) -> tirx.PrimFunc:
    """A stage-II function with inner sums divided among the threads of a block.

    gather : block of the sums, in loops of constant extents
    warps : warps per thread block
    vector : neighbours loaded at once, of at most 16 bytes; the caller guarantees that they are
        contiguous in memory, aligned to their number, and that conditions hold for all of them or
        none

    Raises ScheduleError for a block without such sums.
    """
    nest = find_nest(GATHER, func, gather)
    nest.extents(GATHER)
    work = _Gather(nest, vector)
    shared = work.store.buffer
    func = replaced(func, nest, for_vectors(nest, shared, warps, vector, work.code))
    for buffer in work.locals:
        func = allocated(func, buffer)
    return padded(func, shared, element_bytes(shared))


def _check_vector(caller: str, nest: Nest, load: Any, vector: int) -> None:
    """Raise ScheduleError for a load that is not contiguous along the innermost loop."""
    last = int(nest.loops[-1].extent)
    if last % vector or vector * element_bytes(load.source) > VECTOR_BYTES:
        raise ScheduleError(
            f"{caller}: argument 'vector': expected a divisor of {last} neighbours, of at most "
            f"{VECTOR_BYTES} bytes, got {vector} {dtype_of(load)} in block '{nest.name}'"
        )


class _Gather:
    """An inner sum, and its division among threads.

    store : store of the initial value
    elements : the loop over the terms, or None
    conditions : conditions under which an element counts
    row : the load that is contiguous along the innermost loop
    factors : the other factors
    dtype : type of the sum
    """

    def __init__(self, nest: Nest, vector: int) -> None:
        parts = list(nest.body.seq) if isinstance(nest.body, tirx.SeqStmt) else []
        if len(nest.loops) != 2 or len(parts) != 2 or not isinstance(parts[0], tirx.BufferStore):
            _refuse_gather(nest)
        self.store, rest = parts
        self.elements = rest if isinstance(rest, tirx.For) else None
        inside = rest if self.elements is None else self.elements.body
        self.conditions, store = split_guards(inside)
        value = uncast(getattr(store, "value", None))
        if not isinstance(value, tirx.Add):
            _refuse_gather(nest)
        self.along, self.vector = nest.loops[1].loop_var, vector
        factors = factors_of(value.b)
        rows = [f for f in factors if self.along in free_vars(f)]
        row: Any = uncast(rows[0]) if len(rows) == 1 else None
        if not isinstance(row, ir.TensorLoad) or self.along not in free_vars(row.indices[-1]):
            _refuse_gather(nest)
        self.row, self.factors = row, [f for f in factors if f is not rows[0]]
        _check_vector(GATHER, nest, row, vector)
        self.dtype, held, name = dtype_of(value), dtype_of(parts[0].value), parts[0].buffer.name
        self.count = 1 if self.elements is None else int(self.elements.extent)
        self.ahead = math.gcd(self.count, AHEAD)
        self.total = buffer_var([vector], self.dtype, f"{name}_total", "local")
        self.rows = buffer_var([self.ahead, vector], dtype_of(row), f"{name}_rows", "local")
        self.factor = buffer_var([self.ahead], self.dtype, f"{name}_factor", "local")
        self.rounded = buffer_var([vector], held, f"{name}_held", "local")
        self.locals = [self.total, self.rows]
        self.locals += [self.factor] if self.factors else []
        self.locals += [self.rounded] if held != self.dtype else []

    def code(self, places: dict[Any, Any]) -> Any:
        """The sum of one vector, and its store."""
        chunk = tirx.Var("chunk", "int32")
        chunks = self.count // self.ahead
        parts = [
            unrolled([self.ahead], lambda n: self._load(chunk, n)),
            unrolled([self.ahead, self.vector], self._add),
        ]
        if chunks > 1:
            summed = loop_over(chunk, chunks, tirx.SeqStmt(parts))
        else:
            summed = substitute(tirx.SeqStmt(parts), {chunk: as_dtype(0, "int32")})
        zero = tirx.const(0, self.dtype)
        begin = unrolled([self.vector], lambda e: tirx.BufferStore(self.total, zero, [e]))
        end, held = [], self.total
        if self.rounded in self.locals:
            end, held = [unrolled([self.vector], self._round)], self.rounded
        store = in_vector(
            self.vector,
            element_bytes(held),
            lambda e: tirx.BufferStore(
                self.store.buffer,
                tirx.BufferLoad(held, [e]),
                [substitute(i, self._at(e)) for i in self.store.indices],
            ),
        )
        return substitute(tirx.SeqStmt([begin, summed, *end, store]), places)

    def _at(self, e: Any) -> dict[Any, Any]:
        return {self.along: self.along + as_dtype(e, dtype_of(self.along))}

    def _load(self, chunk: Any, n: Any) -> Any:
        values: dict[Any, Any] = {}
        if self.elements is not None:
            var = self.elements.loop_var
            values[var] = as_dtype(chunk * self.ahead + n, dtype_of(var))

        def load(e: Any) -> Any:
            value = substitute(self.row, self._at(e))
            return tirx.BufferStore(self.rows, substitute(value, values), [n, e])

        def zero(e: Any) -> Any:
            return tirx.BufferStore(self.rows, tirx.const(0, dtype_of(self.row)), [n, e])

        size = element_bytes(self.rows)
        loads = [in_vector(self.vector, size, load)]
        none = [unrolled([self.vector], zero)]
        if self.factors:
            product = math.prod(self.factors[1:], start=self.factors[0])
            loads.append(tirx.BufferStore(self.factor, substitute(product, values), [n]))
            none.append(tirx.BufferStore(self.factor, tirx.const(0, self.dtype), [n]))
        if not self.conditions:
            return as_one(loads)
        condition = substitute(tirx.all(*self.conditions), values)
        return tirx.IfThenElse(condition, as_one(loads), as_one(none))

    def _add(self, n: Any, e: Any) -> Any:
        value = cast(tirx.BufferLoad(self.rows, [n, e]), self.dtype)
        if self.factors:
            value = tirx.BufferLoad(self.factor, [n]) * value
        return tirx.BufferStore(self.total, tirx.BufferLoad(self.total, [e]) + value, [e])

    def _round(self, e: Any) -> Any:
        value = tirx.BufferLoad(self.total, [e])
        return tirx.BufferStore(self.rounded, tirx.Cast(str(self.rounded.ty.dtype), value), [e])


def in_vector(count: int, size: int, code: Any) -> Any:
    """`code(e)` for `count` neighbours of `size` bytes each, in vectors of at most 16 bytes."""
    lanes = math.gcd(count, VECTOR_BYTES // size)
    if lanes == 1:
        return unrolled([count], code)
    e = tirx.Var("e", "int32")

    def vector(u: Any) -> Any:
        return loop_over(e, lanes, code(u * lanes + e), tirx.ForKind.VECTORIZED)

    return unrolled([count // lanes], vector)


def _refuse_gather(nest: Nest) -> NoReturn:
    raise ScheduleError(
        f"{GATHER}: argument 'gather': expected a block that sets a sum to zero and adds rows to "
        f"it, each with factors, got '{nest.name}': {nest.body}"
    )


def cooperative_dot(func: tirx.PrimFunc, dots: str, *, warps: int, vector: int) -> tirx.PrimFunc:
    """A stage-II function with sums for each element divided among the threads of a block.

    dots : block that adds products to an element atomically, in loops of constant extents, the
        innermost of which is the sum
    warps : warps per thread block
    vector : neighbours of the operand loaded at once, of at most 16 bytes; the caller guarantees
        that they are contiguous in memory, aligned to their number, and that conditions hold for
        all of them or none

    Raises ScheduleError for a block of another form.
    """
    nest = find_nest(DOTS, func, dots)
    nest.extents(DOTS)
    added = atomic_product(nest.body)
    along = nest.loops[-1].loop_var
    if added is None or along in set[Any]().union(*map(free_vars, added.place.indices)):
        _refuse_dots(nest)
    rows = [uncast(f) for f in added.factors if along in free_vars(f)]
    memory = [x for x in rows if isinstance(x, ir.TensorLoad) and not _is_shared(x)]
    if (
        len(memory) != 1
        or len(rows) != len(added.factors)
        or along in free_vars(memory[0].indices[0])
    ):
        _refuse_dots(nest)
    _check_vector(DOTS, nest, memory[0], vector)
    work = _Dots(nest, added, memory[0], vector)
    code = for_threads(dots, warps, lambda w, l: work.code(warps, w, l))
    func = replaced(func, nest, tirx.SeqStmt([barrier(), code]))
    for buffer in (work.total, work.row):
        func = allocated(func, buffer)
    return func


def _is_shared(load: Any) -> bool:
    return load.source.ty.storage_scope.startswith("shared")


class _Dots:
    """The code by which threads compute the sums."""

    def __init__(self, nest: Nest, added: AtomicProduct, row: Any, vector: int) -> None:
        self.nest, self.added, self.load, self.vector = nest, added, row, vector
        self.along = nest.loops[-1]
        vectors = int(self.along.extent) // vector
        # A power of two, since shuffles are by powers of two.
        self.lanes = math.gcd(vectors, WARP)
        self.steps = vectors // self.lanes
        self.dtype = dtype_of(added.place)
        self.total = buffer_var([1], self.dtype, "dot", "local")
        self.row = buffer_var([vector], dtype_of(row), f"{row.source.name}_row", "local")

    def code(self, warps: int, warp: Any, lane: Any) -> Any:
        """The code for all elements; a group of threads computes one at a time."""
        *outer, _ = self.nest.loops
        extents = [int(x.extent) for x in outer]
        count, groups = math.prod(extents), warps * WARP // self.lanes
        visits = -(-count // groups)
        u = tirx.Var("u", "int32")
        number = u * groups + (warp * WARP + lane) // self.lanes
        places = places_of(number, outer, extents)
        guards = [] if count % groups == 0 else [number < count]
        return loop_over(u, visits, self._element(lane % self.lanes, places, guards))

    def _element(self, part: Any, places: dict[Any, Any], guards: list[Any]) -> Any:
        """The sum of one element, by the threads that share it."""
        var = self.along.loop_var
        of_element = [c for c in self.added.conditions if var not in free_vars(c)]
        total = tirx.BufferLoad(self.total, [0])

        def vector(step: Any) -> Any:
            first = (step * self.lanes + part) * self.vector

            def at(e: Any) -> dict[Any, Any]:
                return {**places, var: as_dtype(first + e, dtype_of(var))}

            load = in_vector(self.vector, element_bytes(self.row), lambda e: tirx.BufferStore(
                self.row, substitute(self.load, at(e)), [e]
            ))  # fmt: skip

            def add(e: Any) -> Any:
                value: Any = as_dtype(tirx.BufferLoad(self.row, [e]), self.dtype)
                for factor in self.added.factors:
                    if not uncast(factor).same_as(self.load):
                        value = value * substitute(factor, at(e))
                return tirx.BufferStore(self.total, total + value, [0])

            both = tirx.SeqStmt([load, unrolled([self.vector], add)])
            terms_known = [substitute(c, at(0)) for c in self.added.conditions]
            return add_guards([*guards, *terms_known], both)

        parts: list[Any] = [
            tirx.BufferStore(self.total, tirx.const(0, self.dtype), [0]),
            unrolled([self.steps], vector),
        ]
        distance = self.lanes // 2
        while distance:
            parts.append(tirx.BufferStore(self.total, total + from_lane(total, distance), [0]))
            distance //= 2
        write = substitute(self.added.add(total), places)
        conditions = [substitute(c, places) for c in of_element]
        first = [part < as_dtype(1, "int32")]
        return tirx.SeqStmt([*parts, add_guards([*guards, *first, *conditions], write)])


def _refuse_dots(nest: Nest) -> NoReturn:
    raise ScheduleError(
        f"{DOTS}: argument 'dots': expected a block that adds products of rows, one of them in "
        f"memory and the others in shared memory, to an element atomically, the innermost loop "
        f"along these rows, got '{nest.name}': {nest.body}"
    )
