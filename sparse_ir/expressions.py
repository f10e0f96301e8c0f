"""Expressions of TIR: their types, constants and variables."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import nodes_of, variables_of


def dtype_of(expr: Any) -> str:
    """The dtype of an expression."""
    return str(expr.ty.dtype)


def as_dtype(expr: Any, dtype: str) -> Any:
    """`expr` as `dtype`; integer constants are made anew, the rest is cast where it must be."""
    if isinstance(expr, int):
        return tirx.IntImm(dtype, expr)
    if dtype_of(expr) == dtype:
        return expr
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(dtype, expr.value)
    return tirx.Cast(dtype, expr)


def cast(expr: Any, dtype: str) -> Any:
    """A value as `dtype`, as it is where that is its type."""
    return expr if dtype_of(expr) == dtype else tirx.Cast(dtype, expr)


def uncast(expr: Any) -> Any:
    """What is cast, or the expression itself."""
    return expr.value if isinstance(expr, tirx.Cast) else expr


def is_one(expr: Any) -> bool:
    """Whether an expression is the constant 1."""
    return isinstance(expr, tirx.IntImm) and int(expr) == 1


def free_vars(expr: Any) -> set[Any]:
    """All variables, buffers included, that occur in an expression."""
    return set(variables_of(expr))


def conjunction(guards: list[Any]) -> Any:
    """All guards; one that loads is only evaluated where those before it hold."""
    out = guards[-1]
    for guard in reversed(guards[:-1]):
        if nodes_of(ir.TensorLoad, out):
            out = tirx.if_then_else(guard, out, tirx.const(False, "bool"))
        else:
            out = tirx.all(guard, out)
    return out


def zero(dtype: str) -> Any:
    """The zero of a dtype."""
    return tirx.const(0, dtype)
