"""Updates: the values that a program's iterations add to its results, or set them to."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    loads_of,
    stores_of,
    substitute,
)
from sparsetir.sparse_ir.reduction import add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.tir import dtype_of, is_one, statements_of, uncast, zero
from sparsetir.sparse_ir.traversal import map_expr

FORMS = (
    "expected X[..] = X[..] + term, or X[..] = value in an iteration without reductions, each "
    "perhaps under a condition"
)


class Update(NamedTuple):
    """An update of one buffer by an iteration, and the expression that it adds or sets."""

    it: SparseIteration
    conditions: list[Any]
    store: Any
    value: Any


def refused(func: SparseFunc, why: str) -> ValueError:
    """The error for a program that has no derived gradient."""
    return ValueError(f"gradient: function '{func.name}': {why}")


def updates_of(func: SparseFunc, operand: SparseBuffer) -> list[Update]:
    """The updates of a function's iterations, in order.

    Raises ValueError if one has a form without a derived gradient for the operand.
    """
    updates: list[Update] = []
    for it in statements_of(func.body):
        if not isinstance(it, SparseIteration):
            what = type(it).__name__
            raise refused(func, f"expected iterations one after the other, got a {what}")
        update = _update(func, it)
        init = [] if it.init is None else stores_of(it.init)
        if any(not s.buffer.same_as(update.store.buffer) for s in init):
            raise refused(func, f"the init of '{it.name}' stores to what its body does not")
        if it.init is not None and loads_of(it.init, operand.var):
            raise refused(func, f"the init of '{it.name}' reads '{operand.name}'; expected zero")
        if it.init is not None or not _reads_itself(update.store):
            name = update.store.buffer.name
            for earlier in updates:
                same = earlier.store.buffer.same_as(update.store.buffer)
                if same and loads_of(earlier.value, operand.var):
                    raise refused(func, f"'{it.name}' sets '{name}' after '{earlier.it.name}'")
        updates.append(update)
    for u in updates:
        for other in updates:
            written = other.store.buffer
            if loads_of((u.value, u.conditions, u.store.indices), written):
                raise refused(
                    func,
                    f"'{u.it.name}' reads '{written.name}', which '{other.it.name}' writes; "
                    "expected iterations that read parameters alone",
                )
    return updates


def _update(func: SparseFunc, it: SparseIteration) -> Update:
    """The update of an iteration."""

    def unsupported(what: str) -> ValueError:
        return refused(func, f"'{it.name}' {what}; {FORMS}")

    conditions, store = split_guards(_inlined(it.body))
    if not isinstance(store, tirx.BufferStore):
        raise unsupported(f"has a {type(store).__name__} in its body")
    reduction = reduction_of(add_guards(conditions, store))
    if reduction is not None and reduction.operator != "sum":
        raise unsupported(f"reduces by {reduction.operator}")
    if reduction is not None:
        return Update(it, conditions, store, reduction.term)
    if _reads_itself(store):
        raise unsupported(f"updates '{store.buffer.name}' by no sum")
    if "R" in it.kinds:
        raise unsupported(f"sets '{store.buffer.name}' in visits of a reduction")
    return Update(it, conditions, store, uncast(store.value))


def _reads_itself(store: Any) -> bool:
    return bool(loads_of(store.value, store.buffer))


def _inlined(body: Any) -> Any:
    """A body with variables, such as `x` in `x = A[i, j] * 2.0`, replaced by their values."""
    *steps, last = body.seq if isinstance(body, tirx.SeqStmt) else [body]
    bound: dict[Any, Any] = {}
    held: dict[Any, Any] = {}  # by one-element buffer, which stands for a Python variable

    def inlined(node: Any) -> Any:
        loads = (ir.TensorLoad, lambda load: held.get(load.source, load))
        return substitute(map_expr(node, [loads]), bound)

    for step in steps:
        if isinstance(step, tirx.Bind):
            bound[step.var] = inlined(step.value)
        elif isinstance(step, tirx.AllocBuffer) and all(map(is_one, step.buffer.ty.shape)):
            held[step.buffer] = zero(dtype_of(step.buffer))
        elif isinstance(step, tirx.BufferStore) and step.buffer in held:
            held[step.buffer] = inlined(step.value)
        else:
            return body
    return inlined(last)
