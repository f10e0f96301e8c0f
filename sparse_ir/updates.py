"""Updates: the values that a program's iterations add to its results, or set them to."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.adjoint import is_float
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
    "expected X[..] = X[..] + term, X[..] = T.max(X[..], term), T.min likewise, or X[..] = value "
    "in an iteration without reductions, each perhaps under a condition"
)


class Update(NamedTuple):
    """An update of one buffer by an iteration, and the expression that it adds, sets or compares.

    operator : of a reduction, one of COMBINES; None where the iteration sets elements
    """

    it: SparseIteration
    conditions: list[Any]
    store: Any
    value: Any
    operator: str | None

    @property
    def target(self) -> Any:
        """The variable of the buffer that is written."""
        return self.store.buffer

    def reads(self, buffer: Any) -> bool:
        """Whether the iteration reads a buffer, other than an element that it updates."""
        return bool(loads_of((self.value, self.conditions, self.store.indices), buffer))


def refused(func: SparseFunc, why: str) -> ValueError:
    """The error for a program that has no derived gradient."""
    return ValueError(f"gradient: function '{func.name}': {why}")


def updates_of(func: SparseFunc, operand: SparseBuffer) -> tuple[list[Update], set[Any]]:
    """The updates of a function's iterations, in order, and the variables of the float buffers
    whose values depend on the operand's, with its own.

    Raises ValueError if one has a form without a derived gradient for the operand.
    """
    updates: list[Update] = []
    active = {operand.var}
    for it in statements_of(func.body):
        if not isinstance(it, SparseIteration):
            what = type(it).__name__
            raise refused(func, f"expected iterations one after the other, got a {what}")
        update = _update(func, it)
        updates.append(update)
        if is_float(update.store.value) and any(loads_of(update.value, b) for b in active):
            active.add(update.target)
    for n, u in enumerate(updates):
        _check_writes(func, updates, n, active)
        for later in updates[n:]:
            if u.reads(later.target):
                raise refused(
                    func,
                    f"'{u.it.name}' reads '{later.target.name}', which '{later.it.name}' writes; "
                    "expected iterations that read parameters and what earlier ones write",
                )
    return updates, active


def _check_writes(func: SparseFunc, updates: list[Update], n: int, active: set[Any]) -> None:
    """Raise ValueError if gradients cannot pass an update to those before it."""
    update, name = updates[n], updates[n].target.name
    it, others = update.it, [u for u in updates if u.target.same_as(update.target)]
    if it.init is not None:
        if any(not s.buffer.same_as(update.target) for s in stores_of(it.init)):
            raise refused(func, f"the init of '{it.name}' stores to what its body does not")
        for buffer in active:
            if loads_of(it.init, buffer):
                what = f"the init of '{it.name}' reads '{buffer.name}'"
                raise refused(func, f"{what}; expected zero")
    if it.init is not None or update.operator is None:
        for earlier in updates[:n]:
            same = earlier.target.same_as(update.target)
            if same and any(loads_of(earlier.value, b) for b in active):
                raise refused(func, f"'{it.name}' sets '{name}' after '{earlier.it.name}'")
    if update.target in active and update.operator not in (None, "sum"):
        if update.operator == "product":
            raise refused(func, f"'{it.name}' reduces by product; {FORMS}")
        if it.init is None or len(others) > 1:
            why = f"'{it.name}' reduces by {update.operator} into '{name}'"
            raise refused(func, f"{why}; expected an init, and no other writes")


def _update(func: SparseFunc, it: SparseIteration) -> Update:
    """The update of an iteration."""

    def unsupported(what: str) -> ValueError:
        return refused(func, f"'{it.name}' {what}; {FORMS}")

    conditions, store = split_guards(_inlined(it.body))
    if not isinstance(store, tirx.BufferStore):
        raise unsupported(f"has a {type(store).__name__} in its body")
    reduction = reduction_of(add_guards(conditions, store))
    if reduction is not None:
        return Update(it, conditions, store, reduction.term, reduction.operator)
    if loads_of(store.value, store.buffer):
        raise unsupported(f"updates '{store.buffer.name}' by no sum")
    if "R" in it.kinds:
        raise unsupported(f"sets '{store.buffer.name}' in visits of a reduction")
    return Update(it, conditions, store, uncast(store.value), None)


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
