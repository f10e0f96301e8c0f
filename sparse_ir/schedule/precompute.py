"""Buffer a result, or a tile of an operand, in a workspace (Senanayake's thesis, chapter 7).

A **result** of one visit of the loops up to `at` is accumulated in a workspace, then written.
Before::

    with T.sp_iter([K0, I, J, K1], "SSRS", "spmm") as [k0, i, j, k1]:
        with T.init():
            C[i, k0 * 64 + k1] = 0.0
        C[i, k0 * 64 + k1] = C[i, k0 * 64 + k1] + A[i, j] * B[j, k0 * 64 + k1]

After `precompute("C", at=i, axes=[k1])`::

    C_ws = T.alloc_sparse_buffer((K1,), "float32", scope="local")
    with T.sp_iter([K0, I], "SS", "spmm") as [k0, i]:
        with T.sp_iter([K1], "S", "spmm_start") as [k1]:
            C_ws[k1] = 0.0
        with T.sp_iter([J, K1], "RS", "spmm_reduce") as [j, k1]:
            C_ws[k1] = C_ws[k1] + A[i, j] * B[j, k0 * 64 + k1]
        with T.sp_iter([K1], "S", "spmm_write") as [k1]:
            C[i, k0 * 64 + k1] = C_ws[k1]

If a visit does not see all terms of an element, as with a reduction among the loops up to `at`, the
workspace begins with the operator's identity, an iteration `spmm_init` sets the result beforehand,
and `spmm_write` combines both. If the statement before sets the whole result, as in a decomposed
program, it serves as the init (:mod:`sparsetir.sparse_ir.schedule.init_elimination`). Without axes
the workspace is one element, `C_ws[()]`. If the result is only written, an iteration `spmm_value`
stores the value to the workspace, and `spmm_write` writes it.

An **operand** is copied at the start of a visit of the loops up to `at`. After a further
`precompute("B", at=k0, axes=["J_", k1], scope="global")`::

    B_ws = T.alloc_sparse_buffer((J_, K1), "float32")
    with T.sp_iter([K0], "S", "spmm") as [k0]:
        with T.sp_iter([J_, K1], "SS", "B_ws_copy") as [j_, k1]:
            B_ws[j_, k1] = B[j_, k0 * 64 + k1]
        with T.sp_iter([I], "S", "spmm_rest") as [i]:
            ...
                C_ws[k1] = C_ws[k1] + A[i, j] * B_ws[j, k1]
            ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, SparseIteration, stores_of
from sparsetir.sparse_ir.schedule.copies import precompute_operand
from sparsetir.sparse_ir.schedule.loops import (
    SparseIterationRef,
    SpIter,
    find_iteration,
    iteration_of,
    loops_of,
    place_of,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.workspaces import precompute_result

NAME = "precompute"
SCOPES = ("local", "global", "shared")


@primitive
def precompute(
    func: SparseFunc,
    buffer: str,
    at: SpIter | SparseIterationRef,
    axes: Sequence[SpIter | str],
    *,
    lanes: Sequence[SpIter] = (),
    scope: str = "local",
    dtype: str | None = None,
    hoist: bool = False,
    name: str | None = None,
) -> tuple[SparseFunc, list[SparseIterationRef]]:
    """Buffer a result, or a tile of an operand, in a workspace.

    Parameters
    ----------
    buffer : str
        Name of a buffer that the iteration writes (a result) or only reads (an operand).
    at : SpIter or SparseIterationRef
        The innermost of the loops around each workspace; an iteration if there are none.
    axes : sequence of SpIter or str
        The axes of the workspace. For a result: all spatial loops inside `at`, of constant extent
        if the scope is "local". For an operand: loops inside `at`, and names of the operand's own
        axes, which are copied whole.
    lanes : sequence of SpIter
        Reduction loops inside `at` with separate accumulators, combined at the end (TVM's rfactor).
        That changes the order of summation.
    scope : {"local", "shared", "global"}
        "local" (registers), "shared" or "global".
    dtype : str, optional
        The type of the workspace; that of the buffer by default. Terms of a result are cast to it
        as they are loaded, and the result as it is written.
    hoist : bool
        Multiply by the factors of a sum that are invariant during a visit once, at the end; a sum
        without terms is 0 whatever they are. Infinite factors may give infinity instead of NaN, and
        the sum without its factors may overflow.
    name : str, optional
        Name of the workspace.

    Returns
    -------
    list of SparseIterationRef
        For a reduction start, reduce, (with lanes) sums and write; for another result value and
        write; for an operand the copy.
    """
    if isinstance(at, SparseIterationRef):
        it, place = find_iteration(func, at.name, NAME), -1
    else:
        it = iteration_of(NAME, func, at)
        place = place_of(NAME, func, it, at)
    named = [b for b in func.buffers if b.name == buffer]
    if not named:
        raise ScheduleError(
            f"{NAME}: argument 'buffer': expected one of {[b.name for b in func.buffers]}, "
            f"got {buffer!r}\n{show(it)}"
        )
    if scope not in SCOPES:
        raise ScheduleError(
            f"{NAME}: argument 'scope': expected one of {', '.join(SCOPES)}, got {scope!r}"
            f"\n{show(it)}"
        )
    target = named[0]
    if isinstance(dtype, str) and ("float" in dtype) != ("float" in target.dtype):
        raise ScheduleError(
            f"{NAME}: argument 'dtype': expected a type of the kind of '{buffer}', {target.dtype}, "
            f"got {dtype!r}\n{show(it)}"
        )
    outer, inner = loops_of(it)[: place + 1], loops_of(it)[place + 1 :]
    options = (scope, dtype or target.dtype, name)
    if any(s.buffer.same_as(target.var) for s in stores_of(it.body, it.init)):
        held = [_inside(func, it, inner, handle) for handle in axes]
        kept = [_inside(func, it, inner, handle) for handle in lanes]
        return precompute_result(func, it, target, outer, inner, held, kept, *options, hoist)
    if lanes or hoist:
        what = "lanes" if lanes else "hoist"
        raise ScheduleError(
            f"{NAME}: argument '{what}': expected none, as '{buffer}' is only read here\n{show(it)}"
        )
    return precompute_operand(func, it, target, outer, inner, list(axes), *options)


def _inside(func: SparseFunc, it: SparseIteration, inner: list[Any], handle: Any) -> Any:
    loop = loops_of(it)[place_of(NAME, func, it, handle)]
    if loop.axes not in [other.axes for other in inner]:
        raise ScheduleError(
            f"{NAME}: expected loops inside of the place of the workspace, "
            f"{[x.name for x in inner]}, got '{loop.name}'; sparse_reorder can bring it there"
            f"\n{show(it)}"
        )
    return loop
