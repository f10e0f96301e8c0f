"""Shapes of programs over rows: sums over blocks, steps for each row, rows in pieces."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tvm import ir

from sparsetir.schedules.templates.shapes import (
    Nest,
    RowReduction,
    over_rows,
    refuse_shape,
    set_and_updated,
)
from sparsetir.sparse_ir.nodes import Axis, SparseIteration, loads_of, sparse_iterations, stores_of
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import find_iteration, inside, loops_of


def block_reduction(sch: Schedule, caller: str) -> RowReduction:
    """The only reduction of a program, over blocks that rows of them store.

    Its other iterations only set the result. Rows may be those of a sparse axis.

    caller : the template, for messages
    Raises ShapeError if the program has another form, with the difference.
    """
    sums = [it for it in sparse_iterations(sch.func) if "R" in it.kinds]
    if len(sums) != 1:
        refuse_shape(caller, sch.func, f"one iteration that sums, got {[it.name for it in sums]}")
    nest = Nest(sch, caller, sums[0])
    if nest.reduction is None or not nest.plain:
        nest.refuse("to be a reduction over plain axes")
    reduction = over_parents(nest)
    if len(reduction.block) != 1:
        nest.refuse("to visit the rows of a block, of a constant number, for each of its columns")
    return reduction


def product_of_blocks(
    sch: Schedule, sums: RowReduction, caller: str, served: Collection[str]
) -> tuple[str, str, str]:
    """The names of the values and of the operand with features, and the type of both.

    served : the allowed types
    Raises ShapeError if the sums are not over products of two such operands.
    """
    body = find_iteration(sch.func, sums.iteration.name).body
    read = [b for b in sch.func.buffers if b.name != sums.result and loads_of(body, b.var)]
    dtypes = {b.dtype for b in read}
    if len(read) != 2 or sums.gathered is None or len(dtypes) > 1 or read[0].dtype not in served:
        expected = f"products of values and an operand with features, both {' or '.join(served)}"
        refuse_shape(caller, sch.func, expected)
    (values,) = (b for b in read if b.name != sums.gathered)
    return values.name, sums.gathered, values.dtype


def over_parents(nest: Nest) -> RowReduction:
    """The reduction of a nest over the rows that store its outermost columns."""
    columns = nest.loops_of_kind("R")
    under = columns[0].node.parent if nest.plain and columns else None
    return over_rows(nest, [x for x in nest.loops if under is not None and x.name == under.name])


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
    covers : whether each part updates all elements of its rows that are set before
    """

    first: Nest
    parts: list[RowReduction]
    operator: str
    covers: bool


def row_pieces(sch: Schedule, caller: str) -> RowPieces:
    """The loops of a program that sets a result, then adds parts of its rows to it.

    caller : the template, for messages
    Raises ShapeError if the program has another form, with the difference.
    """
    first, rest = set_and_updated(sch, caller)
    if first.along() != first.loops[-1:]:
        first.refuse("to set features side by side")
    parts: list[RowReduction] = []
    operators: set[str] = set()
    covers = len(first.loops) == 2
    for nest in rest:
        adds = nest.reduction is not None and nest.it.init is None
        if nest.reduction is None or not adds or nest.result != first.result:
            nest.refuse(f"to add to '{first.result}'")
        operators.add(nest.reduction.operator)
        parts.append(over_parents(nest))
        along = parts[-1].features.axes == first.loops[-1].axes
        covers = covers and along and not nest.reduction.conditions
    if len(operators) > 1:
        refuse_shape(caller, sch.func, f"one operator, got {sorted(operators)}")
    return RowPieces(first, parts, operators.pop(), covers)
