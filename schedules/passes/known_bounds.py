"""Leave out the conditions of loads whose index a plan has checked.

An operator that is given the row and the column of each non-zero reads `X[rows[e], k]`, and the
lowering guards it: `rows[e]` may be anything. Where such arrays are known to be in range, the
conditions are not needed, and a loop without them can be a vector. Before::

    if_then_else(0 <= rows[e] and rows[e] < m, X[rows[e], k], 0)

After `trust_indices(func, "rows")`::

    X[rows[e], k]

Writes to a loaded index lose their condition too.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import map_expr

__all__ = ["trust_indices"]


def trust_indices(func: tirx.PrimFunc, *names: str) -> tirx.PrimFunc:
    """A stage-II function without guards on what these buffers hold, nor on where they are read.

    names : of buffers that hold coordinates in range of the axes they index
    """

    def load(call: Any) -> Any:
        if not _is_if(call):
            return call
        condition, value, _ = call.args
        return value if _reads(value, names) or _holds(condition, names) else call

    def store(branch: Any) -> Any:
        return branch.then_case if _holds(branch.condition, names) else branch

    return func.with_body(map_expr(func.body, [(ir.Call, load), (tirx.IfThenElse, store)]))


def _is_if(expr: Any) -> bool:
    named = isinstance(expr, ir.Call) and isinstance(expr.op, ir.Op)
    return named and str(expr.op.name).endswith(".if_then_else")


def _reads(expr: Any, names: tuple[str, ...]) -> bool:
    return isinstance(expr, ir.TensorLoad) and str(expr.source.name) in names


def _holds(condition: Any, names: tuple[str, ...]) -> bool:
    if _is_if(condition):  # the lowering's `a and b`, b evaluated only where a holds
        first, second, otherwise = condition.args
        never = isinstance(otherwise, tirx.IntImm) and not int(otherwise)
        return never and _holds(first, names) and _holds(second, names)
    if isinstance(condition, tirx.And):
        return _holds(condition.a, names) and _holds(condition.b, names)
    return isinstance(condition, tirx.GE | tirx.LT) and _reads(condition.a, names)
