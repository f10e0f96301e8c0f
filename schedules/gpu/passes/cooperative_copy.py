"""Copies to shared memory by all threads of a block, overlapped with other work.

Before, the nest of a copy as `precompute(.., scope="shared")` makes it::

    for ji, k1 in T.grid(32, 128):
        with T.sblock("B_ws_copy0"):
            B_ws[ji, k1] = T.if_then_else(J[vjo] * 32 + ji < n, B[J[vjo] * 32 + ji, ...], 0)

After `cooperative_copy(func, "B_ws_copy0", warps=4, vector=8)`, with four copies per thread::

    for warp in T.thread_binding(4, thread="threadIdx.y"):
        for lane in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("B_ws_copy0"):
                for u0 in T.unroll(4):
                    # 16 bytes, number u0 * 128 + warp * 32 + lane; zeros without the condition
                    T.ptx.cp("async", ...)(B_ws[...], B[...], 16, T.Select(..., 16, 0))

Rows of the shared array are padded by 16 bytes if that keeps the 8 rows which `ldmatrix` loads at
a time in different banks. Neighbouring rows of 32 or 64 bytes then share banks: threads that write
at a time have every second or fourth of these. Readers of the copies must wait for them: see
:mod:`sparsetir.schedules.gpu.passes.software_pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.ptx import COPY_BYTES, copy_async
from sparsetir.schedules.passes.nests import (
    WARP,
    Nest,
    element_bytes,
    find_nest,
    for_threads,
    guarded,
    replaced,
    unrolled,
    with_buffer,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, loop_over

NAME = "cooperative_copy"
LOADED, BANK_BYTES = 8, 16  # rows that `ldmatrix` loads at a time, and bytes of each
PASS_BYTES = 128  # of shared memory that are written at a time
COMPUTED = 4  # the most neighbours that are computed at once: TVM's vectors of float32


def cooperative_copy(func: tirx.PrimFunc, copy: str, *, warps: int, vector: int) -> tirx.PrimFunc:
    """A stage-II function with a copy to shared memory divided among the threads of a block.

    copy : block of the copy, in loops of constant extents
    warps : warps per thread block
    vector : neighbours copied at once; the caller guarantees that they are contiguous in memory,
        aligned to their size, and that conditions hold for all of them or none. Less than 4 bytes
        are copied one by one, by plain loads and stores. These may be any value, as may up to four
        neighbours that depend on nothing else along the innermost loop than on one load

    Raises ScheduleError for a block that is not such a copy.
    """
    nest = find_nest(NAME, func, copy)
    extents, last = nest.extents(NAME), nest.loops[-1].loop_var
    condition, source = _condition_and_value(nest.body, last, copy, vector)
    store, size = nest.body, element_bytes(nest.body.buffer)
    if extents[-1] % vector or not _is_neighbour(last, store, source):
        raise ScheduleError(
            f"{NAME}: argument 'vector': expected a divisor of the {extents[-1]} neighbours that "
            f"the innermost loop of block '{copy}' copies, got {vector}"
        )
    if vector * size not in COPY_BYTES:
        vector = 1

    computed = condition is None and not store.value.same_as(source)

    def one(places: dict[Any, Any]) -> Any:
        if not computed:
            return substitute(_one(store, condition, source, vector * size), places)
        e = tirx.Var("e", dtype_of(last))
        stored = substitute(store, {**places, last: places[last] + e})
        return loop_over(e, vector, stored, tirx.ForKind.VECTORIZED) if vector > 1 else stored

    func = replaced(func, nest, for_vectors(nest, store.buffer, warps, vector, one))
    return padded(func, store.buffer, size)


def for_vectors(
    nest: Nest, shared: Any, warps: int, vector: int, one: Callable[[dict[Any, Any]], Any]
) -> Any:
    """The code, for all threads of a block, that replaces a nest: each has some vectors.

    shared : the array that it writes, a row of which has the extent of the innermost loop
    vector : neighbours along the innermost loop, a divisor of its extent
    one : the code of one vector, given the value of each loop variable at its first element
    """
    *outer, last = [int(x.extent) for x in nest.loops]
    visits, threads = [*outer, last // vector], warps * WARP
    count, size = math.prod(visits), last * element_bytes(shared)
    apart = PASS_BYTES // size if size in (32, 64) and math.prod(outer) % LOADED == 0 else 1

    def row_of(number: Any) -> Any:
        """The row with this number, in an order where those of a pass do not share banks."""
        within = number % apart * (LOADED // apart) + number % LOADED // apart
        return number // LOADED * LOADED + within if apart > 1 else number

    def code(warp: Any, lane: Any) -> Any:
        def step(u: Any) -> Any:
            number = u * threads + warp * WARP + lane
            places = places_of(row_of(number // visits[-1]), nest.loops[:-1], outer)
            var = nest.loops[-1].loop_var
            body = one({**places, var: as_dtype(number % visits[-1] * vector, dtype_of(var))})
            return body if count % threads == 0 else tirx.IfThenElse(number < count, body, None)

        return unrolled([-(-count // threads)], step)

    return for_threads(nest.name, warps, code)


def places_of(number: Any, loops: list[Any], visits: list[Any]) -> dict[Any, Any]:
    """The values of loop variables in the visit of this number."""
    places: dict[Any, Any] = {}
    for loop, extent in reversed([*zip(loops, visits, strict=True)]):
        place = number if loop is loops[0] else number % extent
        places[loop.loop_var] = as_dtype(place, dtype_of(loop.loop_var))
        number = number // extent
    return places


def _one(store: Any, condition: Any, source: Any, size: int) -> Any:
    if size not in COPY_BYTES:
        return store
    to = tirx.BufferLoad(store.buffer, list(store.indices))
    return copy_async(to, source, size, condition)


def _condition_and_value(body: Any, last: Any, copy: str, vector: int) -> tuple[Any, Any]:
    """The condition of a copy, or None, and the loaded value, or the load that it is made of."""
    condition, value = guarded(getattr(body, "value", None))
    shared = isinstance(body, tirx.BufferStore) and body.buffer.ty.storage_scope == "shared"
    if shared and not isinstance(value, ir.TensorLoad):
        loads = [x for x in nodes_of(ir.TensorLoad, body.value) if last in free_vars(x)]
        if vector == 1 or vector <= COMPUTED and len(loads) == 1:
            return None, body.value if vector == 1 else loads[0]
    if not isinstance(value, ir.TensorLoad) or not shared:
        raise ScheduleError(
            f"{NAME}: argument 'copy': expected a block that copies to shared memory, with zeros "
            f"where a condition does not hold, got '{copy}': {body}"
        )
    return condition, value


def _is_neighbour(var: Any, store: Any, source: Any) -> bool:
    """Whether a loop runs along the last axis of both, and along no other."""
    loads = [source] if isinstance(source, ir.TensorLoad) else []
    for access in (store, *loads):
        *outer, last = access.indices
        if any(var in free_vars(i) for i in outer) or var not in free_vars(last):
            return False
    return True


def padded(func: tirx.PrimFunc, old: Any, size: int) -> tirx.PrimFunc:
    """Pad rows to an odd number of 16 bytes, so that 8 of them begin in different banks."""
    *outer, last = [int(n) for n in old.ty.shape]
    if outer and last * size % BANK_BYTES == 0 and last * size // BANK_BYTES % 2 == 0:
        last += BANK_BYTES // size
    new = buffer_var([*outer, last], str(old.ty.dtype), old.name, old.ty.storage_scope, align=64)
    return with_buffer(func, old, new, list)
