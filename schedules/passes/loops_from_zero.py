"""Make all loops begin with 0.

`CanonicalizeLoop` of TVM 0.27 does so, too, but for a loop that begins with the variable of an
enclosing one it takes that variable's new value, from 0, for the old. Before and after::

    for i in range(1, 5):             for i in range(4):
        for j in range(i, 5): ...         for j in range(5 - (i + 1)): ...  # with j + (i + 1)
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.schedules.passes.nests import is_zero
from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, is_one, loop_with, with_body
from sparsetir.sparse_ir.traversal import map_expr


def loops_from_zero(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function whose loops begin with 0, except for those with steps."""

    def visit(loop: Any) -> Any:
        if is_zero(loop.min) or not (loop.step is None or is_one(loop.step)):
            return loop
        var = tirx.Var(loop.loop_var.name, dtype_of(loop.loop_var))
        body = substitute(loop.body, {loop.loop_var: var + loop.min})
        return loop_with(loop, loop_var=var, min=as_dtype(0, dtype_of(loop.min)), body=body)

    return with_body(func, map_expr(func.body, [(tirx.For, visit)]))
