"""Nested iterations as a sequence, with a buffer for each value that is updated in place.

Before::

    TOTAL = T.alloc_sparse_buffer((), "float32", "local")
    with T.sp_iter([I], "S", "rows") as [i]:
        with T.sp_iter([J], "R", "total") as [j]:
            with T.init():
                TOTAL[()] = 0.0
            TOTAL[()] = TOTAL[()] + Y[i, j]
        with T.sp_iter([J], "S", "divide") as [j]:
            Y[i, j] = Y[i, j] / TOTAL[()]

After `sequence_of`, where Y_before has what earlier iterations write to Y::

    TOTAL_each = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I, J], "SR", "total") as [i, j]:
        with T.init():
            TOTAL_each[i] = 0.0
        TOTAL_each[i] = TOTAL_each[i] + Y_before[i, j]
    with T.sp_iter([I, J], "SS", "divide") as [i, j]:
        Y[i, j] = Y_before[i, j] / TOTAL_each[i]
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.legal import parallelizable
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    buffer_var,
    iteration_with,
    loads_of,
    stores_of,
    substitute,
)
from sparsetir.sparse_ir.races import FREE, private_buffers
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.tir import as_one, statements_of
from sparsetir.sparse_ir.traversal import access_rules, map_expr


def sequence_of(func: SparseFunc) -> SparseFunc:
    """A program whose outermost iterations have no others in them, as far as visits of these do not
    depend on each other, and in which no iteration updates a whole buffer by its own elements."""
    for it in [s for s in statements_of(func.body) if isinstance(s, SparseIteration)]:
        func = without_nest(func, it)
    for n in range(len(statements_of(func.body))):
        func = _with_version(func, n)
    return func


def without_nest(func: SparseFunc, it: SparseIteration) -> SparseFunc:
    """The program with the steps of an outermost iteration, of all levels, in its place."""
    steps = _steps([it])
    nests = list({x.name: x for around, _ in steps for x in around}.values())
    if not nests or not all(_is_sequence(func, nest) for nest in nests):
        return func
    places: dict[Any, tuple[Any, list[Any]]] = {}  # what an access has before its own indices
    buffers: list[SparseBuffer] = []
    private = [private_buffers(func, nest) for nest in nests]
    for buffer in func.buffers:
        missing = [
            (axis, var)
            for nest, own in zip(nests, private, strict=True)
            for axis, var, _ in (nest.axis_of() if buffer.var in own else [])
            if not all(any(map(var.same_as, x.indices)) for x in accesses_of(nest.body, buffer.var))
        ]
        if buffer.axes is not None and missing:
            axes = [*(axis for axis, _ in missing), *buffer.axes]
            name = fresh_name(func, f"{buffer.name}_each")
            var = buffer_var([axis.length for axis in axes], buffer.dtype, name)
            places[buffer.var] = var, [v for _, v in missing]
            buffer = SparseBuffer(var, axes, None)
        buffers.append(buffer)

    def place(buffer: Any, indices: Any) -> Any:
        var, before = places.get(buffer, (buffer, []))
        return var, [*before, *indices]

    out: list[Any] = []
    for around, step in steps:
        inner = step
        if not isinstance(step, SparseIteration):
            name = fresh_name(func, f"{around[-1].name}_step", [s.name for s in out])
            inner = SparseIteration(None, [], "", name, [], None, step, {})
        levels = [*around, inner]
        whole = iteration_with(
            inner, axes=[a for x in levels for a in x.axes],
            vars=[v for x in levels for v in x.vars], kinds="".join(str(x.kinds) for x in levels),
        )  # fmt: skip
        fresh = {v: tirx.Var(v.name, v.ty.dtype) for v in whole.vars}
        changed = map_expr(whole, access_rules(place))
        init = None if changed.init is None else substitute(changed.init, fresh)
        out.append(
            iteration_with(
                changed, vars=list(fresh.values()), init=init, body=substitute(changed.body, fresh)
            )
        )
    body = [s for stmt in statements_of(func.body) for s in (out if stmt.same_as(it) else [stmt])]
    return func.replace(body=as_one(body), buffers=buffers)


def _steps(its: list[Any]) -> list[tuple[list[Any], Any]]:
    """The innermost steps of a nest's last iteration, with the iterations around each."""
    *around, step = its
    inside = statements_of(step.body) if isinstance(step, SparseIteration) else []
    if not any(isinstance(s, SparseIteration) for s in inside):
        return [(around, step)]
    return [pair for s in inside for pair in _steps([*its, s])]


def _is_sequence(func: SparseFunc, nest: SparseIteration) -> bool:
    """Whether an iteration with others in it is equal to their sequence."""
    steps = statements_of(nest.body)
    whole = all(isinstance(s, SparseIteration | tirx.BufferStore) for s in steps)
    alone = whole and nest.init is None and "R" not in nest.kinds
    return alone and all(fact == FREE for fact in parallelizable(func, nest))


def _with_version(func: SparseFunc, n: int) -> SparseFunc:
    """The program in which a statement that sets a whole buffer reads another one instead."""
    steps = statements_of(func.body)
    it, store = steps[n], (stores_of(steps[n]) or [None])[-1]
    if not isinstance(it, SparseIteration) or it.init is not None or "R" in it.kinds:
        return func
    reduction = reduction_of(it.body)
    adds = reduction is not None and reduction.operator == "sum"
    if not isinstance(it.body, tirx.BufferStore) or adds:
        return func
    buffer = func.buffer(str(store.buffer.name))
    at = {axis.name: var for axis, var, _ in it.axis_of()}
    whole = [at.get(a.name) for a in buffer.axes or ()]
    if len(whole) != len(at) or not all(isinstance(node, Axis) for node in it.axes):
        return func
    plain = all(v is not None and i.same_as(v) for v, i in zip(whole, store.indices, strict=True))
    if not plain or not loads_of(it.body, buffer.var):
        return func
    name = fresh_name(func, f"{buffer.name}_before")
    var = buffer_var(list(buffer.var.ty.shape), buffer.dtype, name)

    def place(of: Any, indices: Any) -> Any:
        return (var, list(indices)) if of.same_as(buffer.var) else None

    def load(x: Any) -> Any:
        return tirx.BufferLoad(var, x.indices) if x.source.same_as(buffer.var) else x

    before = [map_expr(step, access_rules(place)) for step in steps[:n]]
    update = iteration_with(it, body=map_expr(it.body, [(ir.TensorLoad, load)]))
    buffers = [*func.buffers, SparseBuffer(var, buffer.axes, None)]
    return func.replace(body=as_one([*before, update, *steps[n + 1 :]]), buffers=buffers)
