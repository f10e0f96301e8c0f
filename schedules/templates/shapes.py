"""What a program looks like: where templates and programs meet, by loops and not by names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import Axis, loads_of, sparse_iterations
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import handle_of, loops_of
from sparsetir.sparse_ir.translate import free_vars

__all__ = ["RowReduction", "row_reduction"]


@dataclass(frozen=True)
class RowReduction:
    """Terms of what rows store, reduced over it, for features side by side.

    heads : dense spatial loops around the rows
    rows : over a root axis
    columns : reductions over what rows store, outermost first
    features : spatial, contiguous in the result and in the gathered operand
    result, gathered : names of buffers; nothing may be gathered
    gathered_axis : the axis of the gathered operand that columns index
    dtype : of the result
    """

    iteration: SparseIterationRef
    heads: list[SpIter]
    rows: SpIter
    columns: list[SpIter]
    features: SpIter
    result: str
    gathered: str | None
    gathered_axis: str | None
    dtype: str


def row_reduction(sch: Schedule, who: str) -> RowReduction:
    """The loops of a program that reduces over what rows store, found by what they are.

    who : the template, for messages
    Raises ScheduleError where the program looks different, and says how.
    """
    func = sch.func
    iterations = list(sparse_iterations(func))
    if len(iterations) != 1:
        _refuse(who, func, f"one iteration, got {[it.name for it in iterations]}")
    it = iterations[0]
    loops = loops_of(it)
    found = reduction_of(it.body)
    if found is None or it.init is None or any(not isinstance(x.node, Axis) for x in loops):
        _refuse(who, func, f"'{it.name}' to be a reduction with an init over plain axes")
    assert found is not None
    last = found.store.indices[-1]
    features = [x for x in loops if x.kinds == "S" and isinstance(last, ir.Var) and x.var is last]
    features = features or [
        x for x in loops if x.kinds == "S" and isinstance(last, ir.Var) and x.var.same_as(last)
    ]
    columns = [x for x in loops if x.kinds == "R"]
    parents = {x.node.parent.name for x in loops if x.node.parent is not None}
    rows = [x for x in loops if x.kinds == "S" and x.name in parents and x.node.parent is None]
    if len(features) != 1 or len(rows) != 1 or features == rows or not columns:
        _refuse(who, func, f"'{it.name}' to visit rows, what they store, and features")
    heads = [x for x in loops if x.kinds == "S" and x not in (features[0], rows[0])]
    gathered = _gathered(func, it, features[0].var, [x.var for x in columns])
    ref = sch.get_sparse_iteration(it.name)
    handles = {h.axes: h for h in sch.get_sp_iters(ref)}

    def handle(loop: Any) -> SpIter:
        return handles[handle_of(it, loop).axes]

    result = next(b for b in func.buffers if b.var.same_as(found.store.buffer))
    return RowReduction(
        ref, [handle(x) for x in heads], handle(rows[0]), [handle(x) for x in columns],
        handle(features[0]), result.name, *gathered, result.dtype,
    )  # fmt: skip


def _gathered(func: Any, it: Any, feature: Any, columns: list[Any]) -> tuple[Any, Any]:
    """The dense operand whose rows columns point to: its name, and the axis that is indexed."""
    for buffer in func.buffers:
        for load in loads_of(it.body, buffer.var):
            if buffer.axes is None or not any(feature in free_vars(i) for i in load.indices):
                continue
            for axis, index in zip(buffer.axes, load.indices, strict=True):
                if free_vars(index) & set(columns) and axis.kind == "dense_fixed":
                    return buffer.name, axis.name
    return None, None


def _refuse(who: str, func: Any, expected: str) -> None:
    raise ScheduleError(f"{who}: argument 'sch': expected {expected} in '{func.name}'")
