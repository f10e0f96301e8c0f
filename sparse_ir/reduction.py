"""Reductions of iterations: the terms that a body reduces into a buffer, and the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import DataType, ir, tirx
from tvm_ffi import structural_equal

from sparsetir.reductions import COMBINES
from sparsetir.sparse_ir.nodes import loads_of, same_indices
from sparsetir.sparse_ir.tir import cast, dtype_of
from sparsetir.sparse_ir.traversal import map_expr


@dataclass(frozen=True)
class Reduction:
    """`BUFFER[indices] = combine(BUFFER[indices], term)`, under conditions.

    operator : one of COMBINES
    keeps_nan : whether a maximum or minimum explicitly takes a NaN term
    """

    conditions: list[Any]
    store: Any
    term: Any
    operator: str
    combine: Callable[[Any, Any], Any]
    keeps_nan: bool = False

    def identity(self, dtype: str) -> Any:
        """The identity of the operator."""
        return identity(self.operator, dtype)

    def added(self, held: Any, value: Any) -> Any:
        """Combine a held value with another, in the latter's type, and cast to the stored type."""
        done = self.combine(cast(held, dtype_of(value)), value)
        return cast(done, dtype_of(self.store.value))


def identity(operator: str, dtype: str) -> Any:
    """The identity of one of COMBINES."""
    combine = COMBINES[operator]
    if not combine.is_extremum or dtype.startswith(("float", "bfloat")):
        return tirx.const(combine.identity, dtype)
    return tirx.min_value(dtype) if combine.identity < 0 else tirx.max_value(dtype)


def split_guards(stmt: Any) -> tuple[list[Any], Any]:
    """The conditions around a statement, and the statement itself."""
    conditions: list[Any] = []
    while isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        conditions.append(stmt.condition)
        stmt = stmt.then_case
    return conditions, stmt


def add_guards(conditions: Sequence[Any], stmt: Any) -> Any:
    """A statement under conditions; the inverse of :func:`split_guards`."""
    for condition in reversed(conditions):
        stmt = tirx.IfThenElse(condition, stmt, None)
    return stmt


def reduction_of(body: Any) -> Reduction | None:
    """The reduction that a body performs; None if it is another statement."""
    conditions, store = split_guards(body)
    if not isinstance(store, tirx.BufferStore):
        return None
    value = store.value
    if isinstance(value, tirx.Cast) and _is_float(value) and _is_float(value.value):
        value = value.value

    def is_own(expr: Any) -> bool:
        if isinstance(expr, tirx.Cast):  # a cast to a narrower type or integer rounds every visit
            return _is_float(expr) and _bits(expr) > _bits(expr.value) and is_own(expr.value)
        return loads_own(store, expr)

    operation = _operation(value, is_own)
    if operation is None or loads_of(operation[0], store.buffer):
        return None
    return Reduction(conditions, store, *operation)


def loads_own(store: Any, expr: Any) -> bool:
    """Whether an expression is the element that a store sets."""
    load = isinstance(expr, ir.TensorLoad) and expr.source.same_as(store.buffer)
    return load and same_indices(expr.indices, store.indices)


def masked(reduction: Reduction, test: Any) -> Any:
    """The unconditional store of a reduction that takes a term only where `test` holds.

    Otherwise it takes the operator's identity.
    """
    store, dtype = reduction.store, dtype_of(reduction.term)
    term = tirx.Select(test, reduction.term, reduction.identity(dtype))
    held = tirx.BufferLoad(store.buffer, store.indices)
    return tirx.BufferStore(store.buffer, reduction.added(held, term), store.indices)


def _operation(value: Any, is_own: Any) -> tuple[Any, str, Callable[[Any, Any], Any], bool] | None:
    """(term, operator, combine, whether NaN is kept) of an update."""
    kinds: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
        tirx.Add: ("sum", lambda a, b: a + b),
        tirx.Mul: ("product", lambda a, b: a * b),
        tirx.Max: ("max", tirx.max),
        tirx.Min: ("min", tirx.min),
    }
    if type(value) in kinds:
        for total, term in ((value.a, value.b), (value.b, value.a)):
            if is_own(total):
                return term, *kinds[type(value)], False
    if isinstance(value, tirx.Select) and is_own(value.false_value):
        term = value.true_value
        test = value.condition
        better = test.a if isinstance(test, tirx.Or) else test
        for kind, name in ((tirx.GT, "max"), (tirx.LT, "min")):
            if isinstance(better, kind) and is_own(better.b) and structural_equal(better.a, term):
                keeps_nan = isinstance(test, tirx.Or)
                if keeps_nan and not structural_equal(test.b, tirx.isnan(term)):
                    return None
                return term, name, partial(_better, name, keeps_nan), keeps_nan
    return None


def _better(operator: str, keeps_nan: bool, total: Any, term: Any) -> Any:
    test = term > total if COMBINES[operator].symbol == ">" else term < total
    return tirx.Select(tirx.any(test, tirx.isnan(term)) if keeps_nan else test, term, total)


def _is_float(expr: Any) -> bool:
    return dtype_of(expr).startswith(("float", "bfloat"))


def _bits(expr: Any) -> int:
    return DataType(dtype_of(expr)).bits


def factors_of(term: Any) -> list[Any]:
    """The factors of a product."""
    if isinstance(term, tirx.Mul):
        return [*factors_of(term.a), *factors_of(term.b)]
    return [term]


def widened(expr: Any, dtype: str, held: Callable[[Any], Any]) -> Any:
    """A float expression computed in `dtype`: operands are cast, not the result.

    held : returns the replacement of a load, of type `dtype`; None for other loads
    """

    def inner(e: Any) -> Any:
        return widened(e, dtype, held)

    if isinstance(expr, ir.TensorLoad) and (found := held(expr)) is not None:
        return found
    if isinstance(expr, tirx.LT | tirx.LE | tirx.GT | tirx.GE | tirx.EQ | tirx.NE):
        return type(expr)(inner(expr.a), inner(expr.b)) if _is_float(expr.a) else expr
    if isinstance(expr, tirx.And | tirx.Or):
        return type(expr)(inner(expr.a), inner(expr.b))
    if isinstance(expr, ir.Call) and getattr(expr.op, "name", "").endswith(".isnan"):
        return tirx.isnan(inner(expr.args[0]))
    if not _is_float(expr):
        return expr
    if isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.Div | tirx.Max | tirx.Min):
        return type(expr)(inner(expr.a), inner(expr.b))
    if isinstance(expr, tirx.Select):
        return tirx.Select(inner(expr.condition), inner(expr.true_value), inner(expr.false_value))
    if isinstance(expr, tirx.Cast) and _is_float(expr.value):
        return inner(expr.value)
    if isinstance(expr, tirx.FloatImm):
        return tirx.const(float(expr.value), dtype)

    def load(node: Any) -> Any:
        value = held(node)
        return node if value is None else cast(value, dtype_of(node))

    return cast(map_expr(expr, [(ir.TensorLoad, load)]), dtype)
