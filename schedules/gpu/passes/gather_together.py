"""Sums of rows that are gathered, to shared memory by all threads of a block.

Before, the nest of inner sums as :mod:`sparsetir.schedules.gpu.passes.atomic_products` makes it::

    for it, k1 in T.grid(32, 16):
        with T.sblock("rgms0_gather"):
            G[it, k1] = 0
            for jb in range(8):
                if J[rt, it, jb] >= 0 and k0 * 16 + k1 < feat_in:
                    G[it, k1] = G[it, k1] + A[rt, it, jb] * X[J[rt, it, jb], k0 * 16 + k1]

After `gather_together(func, "rgms0_gather", warps=4, vector=4)`, where each thread has one step::

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

Sums are in the type that the terms are in, and are rounded to that of G once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.copy_together import for_vectors, padded
from sparsetir.schedules.passes.nests import (
    Nest,
    allocated,
    element_bytes,
    find_nest,
    replaced,
    unrolled,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import as_dtype, dtype_of, free_vars, uncast
from sparsetir.sparse_ir.nodes import buffer_var, substitute
from sparsetir.sparse_ir.reduction import factors_of, taken_apart
from sparsetir.sparse_ir.statements import as_one, loop_over

WHO = "gather_together"
VECTOR_BYTES = 16  # the widest load
AHEAD = 4  # elements whose loads are under way together


class _Sum(NamedTuple):
    """An inner sum.

    store : of what it begins with
    elements : the loop over what is summed, or None
    conditions : that an element counts
    row : the load that goes along the innermost loop
    factors : the others
    dtype : of the sum
    """

    store: Any
    elements: Any
    conditions: list[Any]
    row: Any
    factors: list[Any]
    dtype: str


def gather_together(func: tirx.PrimFunc, gather: str, *, warps: int, vector: int) -> tirx.PrimFunc:
    """A stage-II function with inner sums divided among the threads of a block.

    gather : block of the sums, in loops of constant extents
    warps : of the block of threads
    vector : neighbours that are loaded at once, of at most 16 bytes; the caller's word that they
        are neighbours in memory from a multiple of their number on, and that conditions hold for
        all of them or none

    Raises ScheduleError for a block that makes no such sums.
    """
    nest = find_nest(WHO, func, gather)
    nest.extents(WHO)
    found = _read(nest)
    check_vector(WHO, nest, found.row, vector)
    work = _Threads(nest.loops[1].loop_var, found, vector)
    func = replaced(func, nest, for_vectors(nest, warps, vector, work.code))
    for buffer in work.locals:
        func = allocated(func, buffer)
    return padded(func, found.store.buffer, element_bytes(found.store.buffer))


def check_vector(who: str, nest: Nest, load: Any, vector: int) -> None:
    """Raise ScheduleError for a load of neighbours along the innermost loop that cannot be."""
    last = int(nest.loops[-1].extent)
    if last % vector or vector * element_bytes(load.source) > VECTOR_BYTES:
        raise ScheduleError(
            f"{who}: argument 'vector': expected a divisor of {last} neighbours, of at most "
            f"{VECTOR_BYTES} bytes, got {vector} {dtype_of(load)} in block '{nest.name}'"
        )


class _Threads:
    """What threads do of an inner sum."""

    def __init__(self, along: Any, found: _Sum, vector: int) -> None:
        self.along, self.found, self.vector = along, found, vector
        self.count = int(found.elements.extent) if found.elements is not None else 1
        self.ahead = math.gcd(self.count, AHEAD)
        name = found.store.buffer.name
        self.total = buffer_var([vector], found.dtype, f"{name}_total", "local")
        rows = [self.ahead, vector]
        self.rows = buffer_var(rows, dtype_of(found.row), f"{name}_rows", "local")
        self.factor = buffer_var([self.ahead], found.dtype, f"{name}_factor", "local")
        self.rounded = buffer_var([vector], dtype_of(found.store.value), f"{name}_held", "local")
        self.locals = [self.total, self.rows]
        if found.factors:
            self.locals.append(self.factor)
        if dtype_of(found.store.value) != found.dtype:
            self.locals.append(self.rounded)

    def code(self, places: dict[Any, Any]) -> Any:
        """The sum of one vector, and where it is stored."""
        found = self.found
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
        zero = tirx.const(0, found.dtype)
        begin = unrolled([self.vector], lambda e: tirx.BufferStore(self.total, zero, [e]))
        end, held = [], self.total
        if self.rounded in self.locals:
            held = self.rounded
            end.append(unrolled([self.vector], self._round))
        store = in_vector(
            self.vector,
            element_bytes(held),
            lambda e: tirx.BufferStore(
                found.store.buffer,
                tirx.BufferLoad(held, [e]),
                [substitute(i, self._at(e)) for i in found.store.indices],
            ),
        )
        return substitute(tirx.SeqStmt([begin, summed, *end, store]), places)

    def _at(self, e: Any) -> dict[Any, Any]:
        return {self.along: self.along + as_dtype(e, dtype_of(self.along))}

    def _load(self, chunk: Any, n: Any) -> Any:
        found = self.found
        at: dict[Any, Any] = {}
        if found.elements is not None:
            var = found.elements.loop_var
            at[var] = as_dtype(chunk * self.ahead + n, dtype_of(var))

        def load(e: Any) -> Any:
            value = substitute(found.row, self._at(e))
            return tirx.BufferStore(self.rows, substitute(value, at), [n, e])

        def zero(e: Any) -> Any:
            return tirx.BufferStore(self.rows, tirx.const(0, dtype_of(found.row)), [n, e])

        size = element_bytes(self.rows)
        there = [in_vector(self.vector, size, load)]
        none = [unrolled([self.vector], zero)]
        if found.factors:
            product = found.factors[0]
            for factor in found.factors[1:]:
                product = product * factor
            there.append(tirx.BufferStore(self.factor, substitute(product, at), [n]))
            none.append(tirx.BufferStore(self.factor, tirx.const(0, found.dtype), [n]))
        if not found.conditions:
            return as_one(there)
        condition = substitute(tirx.all(*found.conditions), at)
        return tirx.IfThenElse(condition, as_one(there), as_one(none))

    def _add(self, n: Any, e: Any) -> Any:
        dtype = self.found.dtype
        value: Any = tirx.BufferLoad(self.rows, [n, e])
        value = value if dtype_of(value) == dtype else tirx.Cast(dtype, value)
        if self.found.factors:
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


def _read(nest: Nest) -> _Sum:
    parts = list(nest.body.seq) if isinstance(nest.body, tirx.SeqStmt) else []
    if len(nest.loops) != 2 or len(parts) != 2 or not isinstance(parts[0], tirx.BufferStore):
        _refuse(nest)
    first, rest = parts
    loop = rest if isinstance(rest, tirx.For) else None
    conditions, store = taken_apart(rest if loop is None else loop.body)
    value = uncast(getattr(store, "value", None))
    if not isinstance(value, tirx.Add):
        _refuse(nest)
    along = nest.loops[1].loop_var
    factors = factors_of(value.b)
    rows = [f for f in factors if along in free_vars(f)]
    row: Any = uncast(rows[0]) if len(rows) == 1 else None
    if not isinstance(row, ir.TensorLoad) or along not in free_vars(row.indices[-1]):
        _refuse(nest)
    others = [f for f in factors if f is not rows[0]]
    return _Sum(first, loop, conditions, row, others, dtype_of(value))


def _refuse(nest: Nest) -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'gather': expected a block that sets a sum to zero and adds rows to it, "
        f"each with factors, got '{nest.name}': {nest.body}"
    )
