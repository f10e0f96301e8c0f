"""Shapes of programs over rows: sums of any format, steps for each row, rows in pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from sparsetir.schedules.templates.shapes import (
    DenseLoops,
    Nest,
    RowReduction,
    gathered_operand,
    over_rows,
    refuse_shape,
)
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseIteration,
    accesses_of,
    nodes_of,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import Loop, inside, loops_of
from sparsetir.sparse_ir.tir import free_vars


@dataclass(frozen=True)
class RowSums:
    """Sums over the elements of rows of any format, for contiguous features.

    Or iterations that initialise these, or compute a result from them.

    rows : spatial loops around the sums, outermost first
    columns : reductions; none if elements are set, or computed from sums
    block : spatial, of constant extent, the rows of a block
    block_rows : their number
    features : spatial, contiguous in the result
    result : name of a buffer
    gathered, gathered_axis : the operand that has features, and the axis of it that columns index;
        None if there is none
    stored : the operand over rows and columns alone; None if there is none
    """

    iteration: SparseIterationRef
    rows: list[SpIter]
    columns: list[SpIter]
    block: list[SpIter]
    block_rows: int
    features: SpIter
    result: str
    gathered: str | None
    gathered_axis: str | None
    stored: str | None


def row_sums(sch: Schedule, caller: str) -> list[RowSums]:
    """The loops of the iterations of a program that computes sums, such as a decomposed one.

    caller : the template, for messages
    Raises ShapeError if one of them has another form, with the difference.
    """
    stages = [sch.func.body, *getattr(sch.func.body, "seq", [])]
    iterations = [it for it in stages if isinstance(it, SparseIteration)]
    results = {s.buffer for it in iterations if "R" in it.kinds for s in stores_of(it.body)}
    if not results:
        refuse_shape(caller, sch.func, "sums over what rows store")
    return [_row_sum(sch, caller, it) for it in iterations if _accesses(it, results)]


def _accesses(it: SparseIteration, buffers: set[Any]) -> bool:
    return any(accesses_of(it.body, buffer) for buffer in buffers)


def _row_sum(sch: Schedule, caller: str, it: SparseIteration) -> RowSums:
    nest = Nest(sch, caller, it)
    features, columns = nest.along() if nest.plain else [], nest.loops_of_kind("R")
    if len(features) != 1 or features[0] in columns:
        nest.refuse("to store features side by side")
    if columns and nest.reduction is None:
        nest.refuse("to be a reduction")
    summed = {x.name for x in columns}
    parents = {a.name for x in nest.loops for a in x.node.ancestors()[:-1]}
    block: list[Loop] = []
    rows: list[Loop] = []
    for loop in nest.loops:
        if loop in columns or loop in features:
            continue
        if summed & {a.name for a in loop.node.ancestors()}:
            refuse_shape(caller, sch.func, f"the rows of '{it.name}' to come before their columns")
        inner = loop.name not in parents and (
            _is_part(loop, nest.store, rows)
            or bool(columns and rows and _is_axis_of_blocks(loop, nest.store, it, features[0]))
        )
        (block if columns and inner else rows).append(loop)
    gathered, gathered_axis = gathered_operand(nest, features[0].var, {x.var for x in columns})
    ref, handles = nest.handles()
    return RowSums(
        iteration=ref,
        rows=[handles[x.axes] for x in rows],
        columns=[handles[x.axes] for x in columns],
        block=[handles[x.axes] for x in block],
        block_rows=math.prod(int(x.node.length) for x in block),
        features=handles[features[0].axes],
        result=nest.result,
        gathered=gathered,
        gathered_axis=gathered_axis,
        stored=_stored_operand(nest, {x.var for x in columns}, features[0].var),
    )


def _stored_operand(nest: Nest, columns: set[Any], feature: Any) -> str | None:
    """The name of the operand indexed by all columns directly, and by no features."""
    for load in nodes_of(ir.TensorLoad, nest.store.value):
        used = {i for i in load.indices if isinstance(i, ir.Var)}
        if columns and columns <= used and feature not in used:
            return str(load.source.name)
    return None


def _is_part(loop: Any, store: Any, rows: list[Any]) -> bool:
    """Whether a loop of constant extent is inside one over rows, as `ii` in `io * 8 + ii`."""
    around = {x.var for x in rows}
    indices = [free_vars(i) for i in store.indices]
    part = any(loop.var in variables and variables & around for variables in indices)
    return part and loop.node.kind == "dense_fixed" and _length(loop) is not None


def _is_axis_of_blocks(loop: Any, store: Any, it: SparseIteration, features: Any) -> bool:
    """Whether a loop of constant extent visits a separate axis, as rows of blocks do.

    As `ii` in `C[io, ii, k] += A[io, jo, ii, ji] * B[jo, ji, k]`: the operand with features does
    not depend on it.
    """
    gathered = [
        load
        for load in nodes_of(ir.TensorLoad, it.body)
        if features.var in free_vars(load) and not load.source.same_as(store.buffer)
    ]
    alone = any(i.same_as(loop.var) for i in store.indices)
    shared = bool(gathered) and not any(loop.var in free_vars(load) for load in gathered)
    constant = loop.node.kind == "dense_fixed" and _length(loop) is not None
    return alone and shared and constant and _length(loop) != 1


def _length(loop: Any) -> int | None:
    return int(loop.node.length) if isinstance(loop.node.length, tirx.IntImm) else None


@dataclass(frozen=True)
class RowSteps:
    """Steps over the elements of a row, one after the other, for each row.

    rows : over a root axis
    others : dense spatial loops besides the rows
    features : the one of them that is contiguous in all results, or None
    dtypes : of the results of steps
    """

    iteration: SparseIterationRef
    rows: SpIter
    others: list[SpIter]
    features: SpIter | None
    dtypes: list[str]


def row_steps(sch: Schedule, caller: str) -> RowSteps:
    """The loops of a program of steps for each row.

    caller : the template, for messages
    Raises ShapeError if the program has another form, with the difference.
    """
    func = sch.func
    it = func.body
    nested = inside(it) if isinstance(it, SparseIteration) else []
    if not nested or it.init is not None or set(it.kinds) != {"S"}:
        refuse_shape(caller, func, "one iteration with steps for each of its visits")
    loops = loops_of(it)
    parents = {a.parent.name for s in nested for a, _, _ in s.axis_of() if a.parent is not None}
    rows = [x for x in loops if x.name in parents]
    dense = all(isinstance(x.node, Axis) and x.node.kind == "dense_fixed" for x in loops)
    if len(rows) != 1 or not dense:
        refuse_shape(caller, func, f"'{it.name}' to visit rows, the steps in it what they store")
    results = {b.var for b in func.buffers if b.handle is not None}
    last = [store.indices[-1] for store in stores_of(it.body) if store.buffer in results]
    along = [x for x in loops if all(isinstance(i, ir.Var) and i.same_as(x.var) for i in last)]
    ref, handles = Nest(sch, caller, it).handles()
    inner = [handles[x.axes] for x in loops if x not in rows]
    first = handles[along[0].axes] if along else None
    dtypes = [str(s.buffer.ty.dtype) for step in nested for s in stores_of(step.body)]
    return RowSteps(ref, handles[rows[0].axes], inner, first, dtypes)


@dataclass(frozen=True)
class RowPieces:
    """Reductions over rows in several formats or pieces, into one result.

    first : the iteration that sets the result before
    parts : one for each format; their rows are over a sparse axis
    operator : "sum", "max", ...
    """

    first: DenseLoops
    parts: list[RowReduction]
    operator: str


def row_pieces(sch: Schedule, caller: str) -> RowPieces:
    """The loops of a program that sets a result, then adds parts of its rows to it.

    caller : the template, for messages
    Raises ShapeError if the program has another form, with the difference.
    """
    first, *rest = (Nest(sch, caller, it) for it in sparse_iterations(sch.func))
    sets = first.dense and first.it.init is None
    if not sets or not rest or first.along() != first.loops[-1:]:
        refuse_shape(
            caller, sch.func, "an iteration that sets the result, and others that add to it"
        )
    parts: list[RowReduction] = []
    operators: set[str] = set()
    for nest in rest:
        adds = nest.reduction is not None and nest.it.init is None
        if nest.reduction is None or not adds or nest.result != first.result:
            nest.refuse(f"to add to '{first.result}'")
        operators.add(nest.reduction.operator)
        columns = nest.loops_of_kind("R")
        under = columns[0].node.parent if nest.plain and len(columns) == 1 else None
        parts.append(
            over_rows(nest, [x for x in nest.loops if under is not None and x.name == under.name])
        )
    if len(operators) > 1:
        refuse_shape(caller, sch.func, f"one operator, got {sorted(operators)}")
    ref, handles = first.handles()
    *outer, features = handles.values()
    set_first = DenseLoops(ref, outer, features, first.result, first.dtype)
    return RowPieces(set_first, parts, *operators)
