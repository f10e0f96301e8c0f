"""Bits are shifted by less than an integer has, for all that TVM can see.

Where it knows no bound of what a number is shifted by, such as the row `x // panels` of a fused
loop, TVM takes the largest, and with it that nothing is left of the number. Before and after::

    (pattern + 1 >> x // panels) % 2 == 1
    (pattern + 1 >> x // panels % 32) % 2 == 1

To shift by more is undefined, so it means the same; where a bound is known the remainder goes.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from sparsetir.sparse_ir.tir import as_dtype, dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr


def bounded_shifts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of stage III whose shifts are by remainders, where they are by no constants."""

    def visit(node: Any) -> Any:
        if isinstance(node.b, tirx.IntImm):
            return node
        bits = as_dtype(tvm.DataType(dtype_of(node)).bits, dtype_of(node.b))
        return type(node)(node.a, tirx.floormod(node.b, bits))

    return with_body(func, map_expr(func.body, [(tirx.RShift, visit), (tirx.LShift, visit)]))
