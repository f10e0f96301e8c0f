"""Sums over rows of two operands, by neighbouring threads each (GPU).

Before, the nest that :mod:`sparsetir.schedules.gpu.passes.atomic_products` leaves::

    for it, jb, k1 in T.grid(32, 4, 64):
        with T.sblock("rgms0_dots"):
            if I[rt, it] >= 0 and J[rt, it, jb] >= 0 and k0 * 64 + k1 < feat_in:
                atomicAdd(DA[E[rt, it, jb]], X[J[rt, it, jb], k0 * 64 + k1] * products[it, k1])

After `dots_together(func, "rgms0_dots", warps=4, vector=4)`, where 16 threads share an element::

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

Who writes the rows in shared memory again waits for all threads before.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.atomic_products import AtomicProduct, atomic_product
from sparsetir.schedules.gpu.passes.copy_together import places_of
from sparsetir.schedules.gpu.passes.gather_together import check_vector, in_vector
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
from sparsetir.sparse_ir.expressions import as_dtype, dtype_of, free_vars, uncast
from sparsetir.sparse_ir.nodes import buffer_var, substitute
from sparsetir.sparse_ir.reduction import under
from sparsetir.sparse_ir.statements import barrier, loop_over

WHO = "dots_together"


def dots_together(func: tirx.PrimFunc, dots: str, *, warps: int, vector: int) -> tirx.PrimFunc:
    """A stage-II function with sums for each element divided among the threads of a block.

    dots : block that adds products to an element atomically, in loops of constant extents, the
        innermost of which is along the sum
    warps : of the block of threads
    vector : neighbours of the operand in memory that are loaded at once, of at most 16 bytes; the
        caller's word that they are neighbours from a multiple of their number on, and that
        conditions hold for all of them or none

    Raises ScheduleError for a block of another shape.
    """
    nest = find_nest(WHO, func, dots)
    nest.extents(WHO)
    added = atomic_product(nest.body)
    along = nest.loops[-1].loop_var
    if added is None or along in set[Any]().union(*map(free_vars, added.place.indices)):
        _refuse(nest)
    rows = [uncast(f) for f in added.factors if along in free_vars(f)]
    memory = [x for x in rows if isinstance(x, ir.TensorLoad) and not _is_shared(x)]
    if (
        len(memory) != 1
        or len(rows) != len(added.factors)
        or along in free_vars(memory[0].indices[0])
    ):
        _refuse(nest)
    check_vector(WHO, nest, memory[0], vector)
    work = _Threads(nest, added, memory[0], vector)
    code = for_threads(dots, warps, lambda w, l: work.code(warps, w, l))
    func = replaced(func, nest, tirx.SeqStmt([barrier(), code]))
    for buffer in (work.total, work.row):
        func = allocated(func, buffer)
    return func


def _is_shared(load: Any) -> bool:
    return load.source.ty.storage_scope.startswith("shared")


class _Threads:
    """What threads do of the sums."""

    def __init__(self, nest: Nest, added: AtomicProduct, row: Any, vector: int) -> None:
        self.nest, self.added, self.load, self.vector = nest, added, row, vector
        self.along = nest.loops[-1]
        vectors = int(self.along.extent) // vector
        # A power of two, as exchanges between lanes are by distances that are.
        self.lanes = math.gcd(vectors, WARP)
        self.steps = vectors // self.lanes
        self.dtype = dtype_of(added.place)
        self.total = buffer_var([1], self.dtype, "dot", "local")
        self.row = buffer_var([vector], dtype_of(row), f"{row.source.name}_row", "local")

    def code(self, warps: int, warp: Any, lane: Any) -> Any:
        """All elements, of which some threads have one at a time."""
        *outer, _ = self.nest.loops
        extents = [int(x.extent) for x in outer]
        count, groups = math.prod(extents), warps * WARP // self.lanes
        visits = -(-count // groups)
        u = tirx.Var("u", "int32")
        number = u * groups + (warp * WARP + lane) // self.lanes
        places = places_of(number, outer, extents)
        there = [] if count % groups == 0 else [number < count]
        return loop_over(u, visits, self._element(lane % self.lanes, places, there))

    def _element(self, part: Any, places: dict[Any, Any], there: list[Any]) -> Any:
        """One element's sum, by the threads that share it."""
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
            known = [substitute(c, at(0)) for c in self.added.conditions]
            return under([*there, *known], both)

        parts: list[Any] = [
            tirx.BufferStore(self.total, tirx.const(0, self.dtype), [0]),
            unrolled([self.steps], vector),
        ]
        distance = self.lanes // 2
        while distance:
            parts.append(tirx.BufferStore(self.total, total + from_lane(total, distance), [0]))
            distance //= 2
        write = substitute(self.added.add(total), places)
        known = [substitute(c, places) for c in of_element]
        first = [part < as_dtype(1, "int32")]
        return tirx.SeqStmt([*parts, under([*there, *first, *known], write)])


def _refuse(nest: Nest) -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'dots': expected a block that adds products of rows, one of them in "
        f"memory and the others in shared memory, to an element atomically, the innermost loop "
        f"along these rows, got '{nest.name}': {nest.body}"
    )
