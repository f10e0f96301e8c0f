"""What a program looks like: where templates and programs meet, by loops and not by names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    loads_of,
    sparse_iterations,
)
from sparsetir.sparse_ir.reduction import reduction_of, taken_apart
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import handle_of, loops_of
from sparsetir.sparse_ir.translate import free_vars

__all__ = [
    "DenseLoops",
    "ElementReduction",
    "RowReduction",
    "RowSum",
    "dense_loops",
    "element_reduction",
    "gathered_operand",
    "refuse_shape",
    "row_reduction",
    "row_results",
    "row_sum",
]


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
    reduces : whether terms are combined by an operator; else elements are looked at in their order
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
    reduces: bool


@dataclass(frozen=True)
class ElementReduction:
    """A sum over features for each stored element.

    elements : one loop, over rows and what they store
    features : the reduction, contiguous in the operands
    result : name of a buffer over the elements
    operands : names of the buffers that have features, each with the axis that rows or columns
        index
    dtype : of the result
    """

    iteration: SparseIterationRef
    elements: SpIter
    features: SpIter
    result: str
    operands: list[tuple[str, str]]
    dtype: str


def element_reduction(sch: Schedule, who: str) -> ElementReduction:
    """The loops of a program that sums over features for each stored element.

    who : the template, for messages

    Rows and columns that are visited by a loop each are fused. Raises ScheduleError where the
    program looks different, and says how.
    """
    func = sch.func
    iterations = list(sparse_iterations(func))
    if len(iterations) != 1:
        refuse_shape(who, func, f"one iteration, got {[it.name for it in iterations]}")
    it = iterations[0]
    found = reduction_of(it.body)
    axes = {axis.name: (var, kind) for axis, var, kind in it.axis_of()}
    columns = [a for a, _, kind in it.axis_of() if kind == "S" and a.kind == "sparse_variable"]
    features = [x for x in loops_of(it) if x.kinds == "R"]
    fits = found is not None and it.init is not None and len(columns) == len(features) == 1
    if not fits or columns[0].parent.name not in axes:
        refuse_shape(who, func, f"'{it.name}' to reduce over features for each stored element")
    assert found is not None
    pair = (columns[0].parent.name, columns[0].name)
    operands: list[tuple[str, str]] = []
    for buffer in func.buffers:
        for load in loads_of(found.term, buffer.var):
            if buffer.axes is None or features[0].var not in free_vars(load.indices[-1]):
                continue
            for axis, index in zip(buffer.axes, load.indices, strict=True):
                if isinstance(index, ir.Var) and any(index.same_as(axes[n][0]) for n in pair):
                    operands.append((buffer.name, axis.name))
    ref = sch.get_sparse_iteration(it.name)
    handles = {h.axes: h for h in sch.get_sp_iters(ref)}
    if pair not in handles:
        if any((name,) not in handles for name in pair):
            refuse_shape(who, func, f"loops of their own, or one loop, over {list(pair)}")
        handles[pair] = sch.sparse_fuse(ref, [handles[(name,)] for name in pair])
    result = next(b for b in func.buffers if b.var.same_as(found.store.buffer))
    return ElementReduction(
        ref, handles[pair], handles[features[0].axes], result.name, operands, result.dtype
    )


@dataclass(frozen=True)
class DenseLoops:
    """Values of dense loops, or sums over the last of these.

    outer : spatial, one or more
    features : contiguous in the result, or the reduction
    result : name of a buffer
    dtype : of the result
    reduces : whether the loop over features is a reduction
    """

    iteration: SparseIterationRef
    outer: list[SpIter]
    features: SpIter
    result: str
    dtype: str
    reduces: bool


def dense_loops(sch: Schedule, who: str) -> DenseLoops:
    """The loops of a program of one iteration over dense axes.

    who : the template, for messages
    Raises ScheduleError where the program looks different, and says how.
    """
    func = sch.func
    iterations = list(sparse_iterations(func))
    if len(iterations) != 1:
        refuse_shape(who, func, f"one iteration, got {[it.name for it in iterations]}")
    it = iterations[0]
    loops = loops_of(it)
    _, store = taken_apart(it.body)
    dense = all(isinstance(x.node, Axis) and x.node.kind == "dense_fixed" for x in loops)
    if not dense or len(loops) < 2 or not isinstance(store, tirx.BufferStore):
        refuse_shape(
            who, func, f"'{it.name}' to store one value in two or more loops over dense axes"
        )
    summed = [x.kinds == "R" for x in loops]
    last = store.indices[-1]
    fits = reduction_of(it.body) is not None and it.init is not None
    if not any(summed):
        fits = isinstance(last, ir.Var) and last.same_as(loops[-1].var)
    if any(summed[:-1]) or not fits:
        refuse_shape(
            who, func, f"the last loop of '{it.name}' to be over features, or to sum over them"
        )
    ref = sch.get_sparse_iteration(it.name)
    *outer, features = sch.get_sp_iters(ref)
    result = next(b for b in func.buffers if b.var.same_as(store.buffer))
    return DenseLoops(ref, outer, features, result.name, result.dtype, summed[-1])


def row_reduction(sch: Schedule, who: str) -> RowReduction:
    """The loops of a program that reduces over what rows store, found by what they are.

    who : the template, for messages
    Raises ScheduleError where the program looks different, and says how.
    """
    func = sch.func
    iterations = list(sparse_iterations(func))
    if len(iterations) != 1:
        refuse_shape(who, func, f"one iteration, got {[it.name for it in iterations]}")
    if reduction_of(iterations[0].body) is None:
        refuse_shape(who, func, f"'{iterations[0].name}' to be a reduction")
    return _row_result(sch, who, iterations[0])


def row_results(sch: Schedule, who: str) -> list[RowReduction]:
    """As :func:`row_reduction`, of a program of several iterations one after the other.

    Each makes one result of what rows store: a reduction, or a search for an element.
    """
    iterations = list(sparse_iterations(sch.func))
    if not iterations:
        refuse_shape(who, sch.func, "an iteration")
    return [_row_result(sch, who, it) for it in iterations]


def _row_result(sch: Schedule, who: str, it: Any) -> RowReduction:
    func, loops = sch.func, loops_of(it)
    _, store = taken_apart(it.body)
    plain = isinstance(store, tirx.BufferStore) and all(isinstance(x.node, Axis) for x in loops)
    if it.init is None or not plain:
        refuse_shape(who, func, f"'{it.name}' to be a reduction with an init over plain axes")
    last = store.indices[-1]
    features = [x for x in loops if x.kinds == "S" and isinstance(last, ir.Var) and x.var is last]
    features = features or [
        x for x in loops if x.kinds == "S" and isinstance(last, ir.Var) and x.var.same_as(last)
    ]
    columns = [x for x in loops if x.kinds == "R"]
    parents = {x.node.parent.name for x in loops if x.node.parent is not None}
    rows = [x for x in loops if x.kinds == "S" and x.name in parents and x.node.parent is None]
    if len(features) != 1 or len(rows) != 1 or features == rows or not columns:
        refuse_shape(who, func, f"'{it.name}' to visit rows, what they store, and features")
    heads = [x for x in loops if x.kinds == "S" and x not in (features[0], rows[0])]
    gathered = gathered_operand(func, it, features[0].var, [x.var for x in columns])
    ref = sch.get_sparse_iteration(it.name)
    handles = {h.axes: h for h in sch.get_sp_iters(ref)}

    def handle(loop: Any) -> SpIter:
        return handles[handle_of(it, loop).axes]

    result = next(b for b in func.buffers if b.var.same_as(store.buffer))
    return RowReduction(
        ref, [handle(x) for x in heads], handle(rows[0]), [handle(x) for x in columns],
        handle(features[0]), result.name, *gathered, result.dtype,
        reduction_of(it.body) is not None,
    )  # fmt: skip


@dataclass(frozen=True)
class RowSum:
    """Terms of what rows store, reduced over it.

    rows, columns : over a dense axis, and over the sparse_variable axis under it
    result, stored : names of the buffers of the result, and of those over both axes
    dtype : of the result
    """

    rows: SpIter
    columns: SpIter
    result: str
    stored: list[str]
    dtype: str


def row_sum(sch: Schedule, who: str) -> RowSum:
    """The loops of a program that reduces over what rows store, and of nothing else.

    who : the template, for messages
    Raises ScheduleError where the program looks different, and says how.
    """
    func = sch.func
    iterations = list(sparse_iterations(func))
    if len(iterations) != 1:
        refuse_shape(who, func, f"one iteration, got {[it.name for it in iterations]}")
    it = iterations[0]
    if it.kinds != "SR" or reduction_of(it.body) is None or it.init is None:
        refuse_shape(who, func, f"'{it.name}' to reduce over what rows store")
    names = [loop.name for loop in loops_of(it)]
    rows, columns = sch.get_sp_iters(sch.get_sparse_iteration(it.name))
    over = {b.name: [a.name for a in b.axes or ()] for b in func.buffers}
    _, store = taken_apart(it.body)
    result = next(b for b in func.buffers if b.var.same_as(store.buffer))
    stored = [name for name, axes in over.items() if axes == names]
    return RowSum(rows, columns, result.name, stored, result.dtype)


def gathered_operand(func: Any, it: Any, feature: Any, columns: list[Any]) -> tuple[Any, Any]:
    """The dense operand whose rows columns point to: its name, and the axis that is indexed."""
    for buffer in func.buffers:
        for load in loads_of(it.body, buffer.var):
            if buffer.axes is None or not any(feature in free_vars(i) for i in load.indices):
                continue
            for axis, index in zip(buffer.axes, load.indices, strict=True):
                if free_vars(index) & set(columns) and axis.kind == "dense_fixed":
                    return buffer.name, axis.name
    return None, None


def refuse_shape(who: str, func: Any, expected: str) -> None:
    """Raise ScheduleError: `who` expected a function to look otherwise."""
    raise ScheduleError(f"{who}: argument 'sch': expected {expected} in '{func.name}'")
