"""Copies of operands to workspaces; see :mod:`sparsetir.sparse_ir.schedule.precompute`."""

from __future__ import annotations

from typing import Any, NoReturn

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    loads_of,
    nodes_of,
    same_indices,
    substitute,
)
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SparseIterationRef,
    SpIter,
    changed,
    loops_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.tir import free_vars
from sparsetir.sparse_ir.traversal import map_expr

NAME = "precompute"


def precompute_operand(
    func: SparseFunc, it: SparseIteration, operand: SparseBuffer, outer: list[Loop],
    inner: list[Loop], over: list[SpIter | str], scope: str, dtype: str, name: str | None,
) -> tuple[SparseFunc, list[SparseIterationRef]]:  # fmt: skip
    """The function with a copy of an operand's tile for each visit of the outer loops."""

    def refuse(message: str) -> NoReturn:
        raise ScheduleError(f"{NAME}: {message}\n{show(it)}")

    loads = loads_of(it.body, operand.var)
    if not loads or operand.axes is None:
        refuse(f"'{operand.name}' is not read here as a buffer over axes")
    index = list(loads[0].indices)
    if any(not same_indices(load.indices, index) for load in loads):
        refuse(f"'{operand.name}' is read at more than one place, so that no tile serves all")
    within = {x.name: x for x in _loops_around_reads(it, outer, operand)}
    whole = {a.name: (a, i) for a, i in zip(operand.axes or [], index, strict=True)}
    axes: list[Axis] = []
    places: list[Any] = []  # the index, per dimension, at which readers access the copy
    copies: list[Any] = []  # the copy's coordinates
    fresh: dict[Any, Any] = {}
    for item in over:
        label = item.name if isinstance(item, SpIter) else item
        if isinstance(item, SpIter) and label in within and isinstance(within[label].node, Axis):
            axis, place = within[label].node, within[label].var
        elif isinstance(item, str) and item in whole:
            axis, place = whole[item]
        else:
            handles = [x.name for x in within.values() if _is_dense(x.node)]
            refuse(
                "argument 'axes': expected handles of loops inside of the place of the copy, among "
                f"{handles}, or names of axes of '{operand.name}', among {list(whole)}, got "
                f"{'the name ' if isinstance(item, str) else 'a handle of '}{label!r}"
            )
        if axis.kind != "dense_fixed":
            refuse(
                f"argument 'axes': expected dense axes to copy over, got '{label}' ({axis.kind})"
            )
        var = tirx.Var(str(axis.name).lower(), axis.idtype)
        if isinstance(item, SpIter):
            fresh[place] = var
        axes.append(axis)
        places.append(place)
        copies.append(var)
    if it.init is not None and outer:
        refuse(
            f"a copy of '{operand.name}' would part the iteration from its init; expected its "
            "result to be precomputed first"
        )
    by_name = {
        a.name: v for a, v, item in zip(axes, copies, over, strict=True) if isinstance(item, str)
    }
    inside = {v for x in within.values() for v in x.vars}
    source: list[Any] = []
    for a, i in zip(operand.axes or [], index, strict=True):
        expr = by_name[a.name] if a.name in by_name else substitute(i, fresh)
        left = sorted(v.name for v in free_vars(expr) & inside)
        if a.name not in by_name and left:
            refuse(
                f"the index {i} of axis '{a.name}' depends on {left}, which the copy does not go "
                f"over; expected '{a.name}' or these loops among the axes"
            )
        source.append(expr)
    ws = buffer_var(
        [a.length for a in axes], dtype, fresh_name(func, name or f"{operand.name}_ws"), scope
    )
    value = tirx.BufferLoad(operand.var, source)
    if dtype != operand.dtype:
        value = tirx.Cast(dtype, value)
    copy = SparseIteration(
        span=it.span, axes=axes, kinds="S" * len(axes), name=fresh_name(func, f"{ws.name}_copy"),
        vars=copies, init=None, body=tirx.BufferStore(ws, value, copies), annotations={},
    )  # fmt: skip
    body = reading(it.body, operand, ws, places)
    rest: Any = body
    if inner:
        rest = changed(it, inner, name=fresh_name(func, f"{it.name}_rest") if outer else it.name,
                       body=body)  # fmt: skip
    both = tirx.SeqStmt([copy, rest])
    out = replaced(
        NAME, func, it, changed(it, outer, body=both) if outer else both,
        buffers=[SparseBuffer(var=ws, axes=axes, handle=None)],
    )  # fmt: skip
    return out, [SparseIterationRef(copy.name)]


def _is_dense(node: Any) -> bool:
    return isinstance(node, Axis) and node.kind == "dense_fixed"


def _loops_around_reads(
    it: SparseIteration, outer: list[Loop], operand: SparseBuffer
) -> list[Loop]:
    """The loops between the copy and the reads of the operand."""
    reading = [node for node in nodes_of(SparseIteration, it) if loads_of(node, operand.var)]
    names = [x.name for x in outer]
    return [x for node in reading for x in loops_of(node) if x.name not in names]


def reading(stmt: Any, operand: SparseBuffer, ws: Any, places: list[Any]) -> Any:
    """A statement that reads the copy instead of the operand."""
    dtype = str(ws.ty.dtype)

    def load(node: Any) -> Any:
        if not node.source.same_as(operand.var):
            return node
        held = tirx.BufferLoad(ws, places)
        return held if dtype == operand.dtype else tirx.Cast(operand.dtype, held)

    def cast(node: Any) -> Any:
        inner = node.value  # a cast to the copy's type and back
        again = isinstance(inner, tirx.Cast) and isinstance(inner.value, ir.TensorLoad)
        if again and inner.value.source.same_as(ws) and str(node.ty.dtype) == dtype:
            return inner.value
        return node

    return map_expr(stmt, [(ir.TensorLoad, load), (tirx.Cast, cast)])
