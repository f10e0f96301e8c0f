"""Operands whose features are not side by side are copied so that they are, before all else.

Before, where each term reads memory from as many places as there are features::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * X[k, j]

After::

    with T.sp_iter([N, K], "SS", "X_ws_copy") as [n, k]:
        X_ws[n, k] = X[k, n]
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * X_ws[j, k]
"""

from __future__ import annotations

from typing import Any

from tvm import ir

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    loads_of,
    stores_of,
)
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.loops import loops_of
from sparsetir.sparse_ir.tir import free_vars


def features_last(func: SparseFunc) -> tuple[SparseFunc, list[list[Axis]], list[Axis]] | None:
    """The function with copies, the axes of the rows of each, and those visited around features.

    None for a program that has no such operand, is more than one iteration, or does not reduce over
    what a sparse axis stores, in which case nothing is read more than once.
    """
    it = func.body
    if not isinstance(it, SparseIteration) or "R" not in it.kinds:
        return None
    *around, features = loops_of(it)
    axes = [x.node for x in around if isinstance(x.node, Axis)]
    if not any(axis.is_sparse for axis in axes) or len(axes) < len(around):
        return None
    if not isinstance(features.node, Axis) or features.node.kind != "dense_fixed":
        return None
    strided = [b for b in func.buffers if _is_strided(it, b, features.var)]
    sch, rows = Schedule(func), []
    for buffer in strided:
        (place,) = _places(it, buffer, features.var)
        others = [axis for n, axis in enumerate(buffer.axes or ()) if n != place]
        names = [axis.name for axis in (*others, (buffer.axes or ())[place])]
        try:
            sch.precompute(buffer.name, sch.get_sparse_iteration(it.name), names, scope="global")
        except ScheduleError:  # read at more than one place
            return None
        rows.append(others)
    return (sch.func, rows, axes) if rows else None


def _is_strided(it: SparseIteration, buffer: SparseBuffer, features: Any) -> bool:
    """Whether an iteration reads features of a dense operand that are in rows of their own."""
    if any(axis.kind != "dense_fixed" for axis in buffer.axes or ()):
        return False
    if any(store.buffer.same_as(buffer.var) for store in stores_of(it.body, it.init)):
        return False
    places = _places(it, buffer, features)
    return len(places) == 1 and places[0] < len(buffer.axes or ()) - 1


def _places(it: SparseIteration, buffer: SparseBuffer, features: Any) -> list[int]:
    """The dimensions of a buffer that features index; two where they index one by more."""
    loads = loads_of(it.body, buffer.var)
    if not loads:
        return []
    indices = list(enumerate(loads[0].indices))
    places = [n for n, index in indices if features in free_vars(index)]
    plain = all(isinstance(index, ir.Var) for n, index in indices if n in places)
    return places if plain else [*places, *places]
