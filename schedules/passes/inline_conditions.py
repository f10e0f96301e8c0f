"""Conditions without variables of their own.

TVM 0.27 simplifies a condition, and once more its opposite for the other branch, with one analyzer:
a variable of a `Let` in it is bound twice there, which is an error where the values differ by then.
Before::

    if T.Let(x * x, where={x: A[i] + B[i]}) < 1.0:
        ...

After::

    if (A[i] + B[i]) * (A[i] + B[i]) < 1.0:
        ...

LLVM computes what is there several times once.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import with_body
from sparsetir.sparse_ir.traversal import map_expr, replace_variables


def inline_conditions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of stage III in which no condition has a variable of its own."""
    if not nodes_of(tirx.Let, func.body):
        return func
    inlined = map_expr(func.body, [
        (tirx.IfThenElse, _branch),
        (tirx.While, lambda x: tirx.While(_plain(x.condition), x.body, x.span)),
        (tirx.AssertStmt, _assertion),
        (tirx.Select, _select),
        (ir.Call, _call),
    ])  # fmt: skip
    return with_body(func, inlined)


def _branch(x: Any) -> Any:
    return tirx.IfThenElse(_plain(x.condition), x.then_case, x.else_case, x.span)


def _assertion(x: Any) -> Any:
    return tirx.AssertStmt(_plain(x.condition), x.error_kind, x.message_parts, x.span)


def _select(x: Any) -> Any:
    return tirx.Select(_plain(x.condition), x.true_value, x.false_value, x.span)


def _call(x: Any) -> Any:
    if str(getattr(x.op, "name", "")) != "tirx.if_then_else" or not nodes_of(tirx.Let, x.args[0]):
        return x
    args = [_plain(x.args[0]), *x.args[1:]]
    return ir.Call(x.op, args, x.attrs, x.ty_args, x.span, ret_ty=x.ty)


def _plain(condition: Any) -> Any:
    """A condition with values in place of its variables."""
    if not nodes_of(tirx.Let, condition):
        return condition
    value = lambda x: replace_variables(x.body, {x.var.__chandle__(): x.value})  # noqa: E731
    return map_expr(condition, [(tirx.Let, value)])
