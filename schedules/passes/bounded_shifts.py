"""Bound shift amounts below the width of an integer, as far as TVM can tell.

If TVM knows no bound of a shift amount, such as the row `x // panels` of a fused loop, it assumes
the largest, and concludes that all bits are shifted out. Before and after::

    (pattern + 1 >> x // panels) % 2 == 1
    (pattern + 1 >> x // panels % 32) % 2 == 1

Larger shifts are undefined, so the meaning is unchanged; where a bound is known TVM drops the `%`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from sparsetir.sparse_ir.tir import as_dtype, dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr


def bounded_shifts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function with non-constant shift amounts reduced modulo the width."""

    def visit(node: Any) -> Any:
        if isinstance(node.b, tirx.IntImm):
            return node
        bits = as_dtype(tvm.DataType(dtype_of(node)).bits, dtype_of(node.b))
        return type(node)(node.a, tirx.floormod(node.b, bits))

    return with_body(func, map_expr(func.body, [(tirx.RShift, visit), (tirx.LShift, visit)]))
