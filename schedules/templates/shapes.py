"""Shapes of programs: what templates recognise by loops instead of names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    SparseIteration,
    flat_axes,
    loads_of,
    sparse_iterations,
)  # fmt: skip
from sparsetir.sparse_ir.races import FREE, races_of
from sparsetir.sparse_ir.reduction import reduction_of, split_guards
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import Loop, loops_of
from sparsetir.sparse_ir.tir import dtype_of, free_vars


@dataclass(frozen=True)
class RowReduction:
    """Terms over the elements of rows, reduced per row, for contiguous features.

    heads : dense spatial loops around the rows
    rows : over a root axis; None if there is no loop around the reductions
    columns : reductions over the elements of rows, outermost first
    features : spatial, contiguous in the result and in the gathered operand; None if there are none
    result, gathered : names of buffers; there may be no gathered one
    gathered_axis : the axis of the gathered operand that columns index
    dtype, total : type of the result, and the type in which terms are reduced
    free : whether visits of heads and of rows are proven not to race
    inside : spatial loops inside of the rows
    block : heads of constant extent that the gathered operand does not depend on, such as the rows
        of a block: one loaded row serves all of them
    """

    iteration: SparseIterationRef
    heads: list[SpIter]
    rows: Any
    columns: list[SpIter]
    features: Any
    result: str
    gathered: str | None
    gathered_axis: str | None
    dtype: str
    total: str
    free: bool
    inside: list[SpIter] = field(default_factory=list)
    block: list[SpIter] = field(default_factory=list)


@dataclass(frozen=True)
class ElementReduction:
    """A sum over features for each stored element.

    elements : one loop, over rows and their elements
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


def element_reduction(sch: Schedule, caller: str) -> ElementReduction:
    """The loops of a program that sums over features for each stored element.

    caller : the template, for messages

    Features come last, and rows and columns visited by separate loops are fused; loops inside these
    stay there. Raises ShapeError if the program has another form, with the difference.
    """
    nest = only_nest(sch, caller)
    reduction = nest.reduction
    axes = {axis.name: var for axis, var, kind in nest.it.axis_of() if kind == "S"}
    columns = [a for a, _, kind in nest.it.axis_of() if kind == "S" and a.kind == "sparse_variable"]
    features = nest.loops_of_kind("R")
    fits = nest.it.init is not None and len(columns) == len(features) == 1
    fits = fits and getattr(features[0].node, "kind", "") == "dense_fixed"
    fits = fits and all(isinstance(x.node, Axis | FusedAxis) for x in nest.loops)
    above = {p.name for axis, _, _ in nest.it.axis_of() for p in axis.ancestors()[:-1]}
    fits = fits and columns[0].name not in above  # the elements come last
    rows: Any = columns[0].parent if columns else None
    if reduction is None or not fits or rows.name not in axes or rows.kind != "dense_fixed":
        nest.refuse("to reduce over features for each stored element")
    pair = (rows.name, columns[0].name)
    heads = [x.node for x in nest.loops if x not in features and not {*x.axes} & {*pair}]
    if any(getattr(node, "kind", "") != "dense_fixed" for node in heads):
        nest.refuse("to visit dense axes around rows and columns")
    over = [b.axes for b in sch.func.buffers if b.name == nest.result]
    if not {*pair} <= {a.name for axes in over for a in axes or ()}:
        nest.refuse(f"to store to a buffer over {list(pair)}")
    operands: list[tuple[str, str]] = []
    for buffer in sch.func.buffers:
        for load in loads_of(reduction.term, buffer.var):
            if not buffer.axes or features[0].var not in free_vars(load.indices[-1]):
                continue
            for axis, index in zip(buffer.axes, load.indices, strict=True):
                if isinstance(index, ir.Var) and any(index.same_as(axes[n]) for n in pair):
                    operands.append((buffer.name, axis.name))
    ref, handles = nest.handles()
    both: list[SpIter] = []
    if pair not in handles:
        if any((name,) not in handles for name in pair):
            refuse_shape(caller, sch.func, f"loops of their own, or one loop, over {list(pair)}")
        both = [handles.pop((name,)) for name in pair]
    summed = handles.pop(features[0].axes)
    loops, visited = sch.get_sp_iters(ref), both or [handles[pair]]
    first, others = (
        min(map(loops.index, visited)),
        [h for h in loops if h not in (*visited, summed)],
    )
    outside = [h for h in others if loops.index(h) < first]
    order = [*outside, *visited, *others[len(outside) :], summed]
    if order != loops:
        sch.sparse_reorder(ref, order)
    elements = sch.sparse_fuse(ref, both) if both else handles[pair]
    return ElementReduction(ref, elements, summed, nest.result, operands, nest.dtype)


def row_reduction(sch: Schedule, caller: str) -> RowReduction:
    """The loops of a program that reduces over the elements of rows, recognised by their kinds.

    caller : the template, for messages
    Raises ShapeError if the program has another form, with the difference.
    """
    nest = only_nest(sch, caller)
    if nest.reduction is None or nest.it.init is None or not nest.plain:
        nest.refuse("to be a reduction with an init over plain axes")
    parents = {x.node.parent.name for x in nest.loops if x.node.parent is not None}
    roots = [x for x in nest.loops_of_kind("S") if x.node.parent is None]
    return over_rows(nest, [x for x in roots if x.name in parents])


def over_rows(nest: Nest, rows: list[Loop]) -> RowReduction:
    """The reduction of a nest over `rows`, which must be one loop: its columns and features."""
    spatial, columns = nest.loops_of_kind("S"), nest.loops_of_kind("R")
    features = [x for x in nest.along() if x in spatial]
    heads = [x for x in spatial if x not in (*features, *rows)]
    dense = all(x.node.kind == "dense_fixed" for x in heads)
    if len(features) != 1 or len(rows) != 1 or features == rows or not columns or not dense:
        nest.refuse("to visit rows, what they store, and features")
    gathered = gathered_operand(nest, features[0].var, {x.var for x in columns})
    above = {axis.parent.name for axis, _, _ in nest.it.axis_of() if axis.parent is not None}
    leaves = [x for x in heads if x.name not in above]
    block = [x for x in leaves if nest.is_row_of_block(x, gathered[0])]
    ref, handles = nest.handles()
    return RowReduction(
        ref, [handles[x.axes] for x in heads], handles[rows[0].axes],
        [handles[x.axes] for x in columns], handles[features[0].axes], nest.result, *gathered,
        nest.dtype, nest.total, all(map(nest.is_free, [*heads, *rows])),
        block=[handles[x.axes] for x in block],
    )  # fmt: skip


def row_sum(sch: Schedule, caller: str) -> RowReduction:
    """The loops of a program that reduces over the elements of rows, and besides visits dense axes.

    caller : the template, for messages
    There are no features. Raises ShapeError if the program has another form, with the difference.
    """
    visited = {it.name: flat_axes(it.axes) for it in sparse_iterations(sch.func)}
    over_elements = [name for name, axes in visited.items() if any(a.is_sparse for a in axes)]
    nest = only_nest(sch, caller, over_elements)
    parents = [getattr(getattr(x.node, "parent", None), "name", None) for x in nest.loops]
    if nest.it.kinds != "SR" or nest.reduction is None or parents[1:] != [nest.loops[0].name]:
        nest.refuse("to reduce over what rows store, without features")
    ref, handles = nest.handles()
    rows, columns = handles.values()
    return RowReduction(
        ref, [], rows, [columns], None, nest.result, None, None, nest.dtype, nest.total, False
    )


def gathered_operand(nest: Nest, feature: Any, columns: set[Any]) -> tuple[Any, Any]:
    """The dense operand whose rows columns index: its name, and the indexed axis."""
    for buffer in nest.sch.func.buffers:
        for load in loads_of(nest.it.body, buffer.var):
            if buffer.axes is None or not any(feature in free_vars(i) for i in load.indices):
                continue
            for axis, index in zip(buffer.axes, load.indices, strict=True):
                if free_vars(index) & columns and axis.kind == "dense_fixed":
                    return buffer.name, axis.name
    return None, None


class Nest:
    """An iteration that a template examines, and its store.

    store : the one store in it, possibly under conditions; None for other bodies
    plain, dense : whether there is a store, in loops over one axis each, or dense axes
    reduction : the reduction that the body performs; None for other bodies
    """

    def __init__(self, sch: Schedule, caller: str, it: SparseIteration) -> None:
        self.sch, self.caller, self.it = sch, caller, it
        self.loops = loops_of(it)
        _, store = split_guards(it.body)
        self.store: Any = store if isinstance(store, tirx.BufferStore) else None
        nodes = [m for x in self.loops for m in getattr(x.node, "of", None) or [x.node]]
        self.plain = self.store is not None and all(isinstance(n, Axis) for n in nodes)
        self.dense = self.plain and all(x.node.kind == "dense_fixed" for x in self.loops)
        self.reduction = reduction_of(it.body)

    def loops_of_kind(self, kind: str) -> list[Loop]:
        """The loops that are spatial, "S", or reductions, "R"."""
        return [x for x in self.loops if x.kinds == kind]

    def along(self) -> list[Loop]:
        """The loop along contiguous elements of the result, if there is one."""
        last: Any = self.store.indices[-1] if self.store.indices else None
        return [x for x in self.loops if isinstance(last, ir.Var) and x.var.same_as(last)]

    def is_free(self, loop: Loop) -> bool:
        """Whether visits of a loop are proven not to race."""
        return races_of(self.it, set())[self.loops.index(loop)] == FREE

    def is_row_of_block(self, loop: Loop, gathered: str | None) -> bool:
        """Whether a loop of constant extent is one on which an operand does not depend."""
        if gathered is None or not isinstance(loop.node.length, tirx.IntImm):
            return False
        loads = loads_of(self.it.body, self.sch.func.buffer(gathered).var)
        return not any(loop.var in free_vars(load) for load in loads)

    def handles(self) -> tuple[SparseIterationRef, dict[tuple[str, ...], SpIter]]:
        """Handles of the iteration, and of its loops by the names of their axes."""
        ref = self.sch.get_sparse_iteration(self.it.name)
        return ref, {h.axes: h for h in self.sch.get_sp_iters(ref)}

    @property
    def result(self) -> str:
        """The name of the stored buffer."""
        return str(self.store.buffer.name)

    @property
    def dtype(self) -> str:
        """The type of the result."""
        return str(self.store.buffer.ty.dtype)

    @property
    def total(self) -> str:
        """The type in which terms are reduced."""
        return self.dtype if self.reduction is None else dtype_of(self.reduction.term)

    def refuse(self, expected: str) -> NoReturn:
        """Raise ShapeError: another form of iteration was expected."""
        refuse_shape(self.caller, self.sch.func, f"'{self.it.name}' {expected}")


def only_nest(sch: Schedule, caller: str, among: Collection[str] | None = None) -> Nest:
    """The only iteration of a program, or of some by name; raises ShapeError for several."""
    iterations = [it for it in sparse_iterations(sch.func) if among is None or it.name in among]
    if len(iterations) != 1:
        refuse_shape(caller, sch.func, f"one iteration, got {[it.name for it in iterations]}")
    return Nest(sch, caller, iterations[0])


def set_and_updated(sch: Schedule, caller: str) -> tuple[Nest, list[Nest]]:
    """The iteration that sets the result of a program, and those that update it."""
    first, *rest = (Nest(sch, caller, it) for it in sparse_iterations(sch.func))
    if not first.dense or first.it.init is not None or not rest:
        refuse_shape(
            caller, sch.func, "an iteration that sets the result, and others that add to it"
        )
    return first, rest


class ShapeError(ScheduleError):
    """A program has another form than those that a template is for."""


def refuse_shape(caller: str, func: Any, expected: str) -> NoReturn:
    """Raise ShapeError, naming what `caller` expected of the function."""
    raise ShapeError(f"{caller}: argument 'sch': expected {expected} in '{func.name}'")
