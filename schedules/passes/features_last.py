"""Copy operands with strided features before an iteration, so that features are contiguous.

Before, with as many cache lines per term as there are features::

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
    """The function with copies, the other axes of each operand, and the axes around the features.

    None for a program without such operands, with several iterations, or without a reduction over a
    sparse axis, where no element is read twice.
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
    sch, rows = Schedule(func), []
    for buffer in func.buffers:
        place = _place(it, buffer, features.var)
        if place is None:
            continue
        others = [*(buffer.axes or ())]
        moved = others.pop(place)
        names = [axis.name for axis in (*others, moved)]
        try:
            at = sch.get_sparse_iteration(it.name)
            (copy,) = sch.precompute(buffer.name, at, names, scope="global")
        except ScheduleError:  # read at more than one place
            return None
        for key, value in it.annotations.items():  # such as the number of threads
            sch.annotate(copy, str(key), value)
        rows.append(others)
    return (sch.func, rows, axes) if rows else None


def _place(it: SparseIteration, buffer: SparseBuffer, features: Any) -> int | None:
    """The dimension of a dense operand that the features index, or None if it is the last one."""
    loads = loads_of(it.body, buffer.var)
    if not loads or any(axis.kind != "dense_fixed" for axis in buffer.axes or ()):
        return None
    if any(store.buffer.same_as(buffer.var) for store in stores_of(it.body, it.init)):
        return None
    indices = list(loads[0].indices)
    places = [n for n, index in enumerate(indices) if features in free_vars(index)]
    if len(places) != 1 or places[0] == len(indices) - 1:
        return None
    return places[0] if isinstance(indices[places[0]], ir.Var) else None
