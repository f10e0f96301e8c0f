"""End loops over the rows of a tile where the axis ends (CPU).

The last tile of an axis may have one row, and so may the only one. Before, with a test of all
elements of a tile::

    for i0, k0, i1, k1 in T.grid((n + 1023) // 1024, (feat + 15) // 16, 1024, 16):
        if i0 * 1024 + i1 < n and k0 * 16 + k1 < feat:
            ...

After::

    for i0, k0 in T.grid((n + 1023) // 1024, (feat + 15) // 16):
        for i1, k1 in T.grid(T.min(1024, n - i0 * 1024), 16):
            ...

The innermost loop keeps its constant length.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.tile_marks import conjuncts
from sparsetir.sparse_ir.tir import as_dtype, constant, dtype_of, free_vars, loop_with
from sparsetir.sparse_ir.traversal import map_expr


def short_tails(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A lowered function whose loops around others end with the condition of their body."""

    def visit(loop: Any) -> Any:
        if not _is_counted(loop) or not _is_counted(loop.body):
            return loop
        body, inner = loop.body, set[Any]()
        while _is_counted(body):
            inner.add(body.loop_var)
            body = body.body
        if not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
            return loop
        for test in conjuncts(body.condition):
            end = _end(test, loop.loop_var)
            if end is not None and not free_vars(end) & inner:
                least = as_dtype(0, dtype_of(loop.loop_var))
                return loop_with(loop, extent=tirx.max(tirx.min(loop.extent, end), least))
        return loop

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))


def _is_counted(loop: Any) -> bool:
    """Whether a loop is serial, and its length constant."""
    serial = isinstance(loop, tirx.For) and loop.kind == tirx.ForKind.SERIAL
    return serial and constant(loop.extent) is not None


def _end(test: Any, var: Any) -> Any:
    """The first value of a variable for which `start + var < end` does not hold, or None."""
    dtype = dtype_of(var)
    if not isinstance(test, tirx.LT) or dtype_of(test.a) != dtype or var in free_vars(test.b):
        return None
    if affine(test.a).step(var) != 1:
        return None
    return test.b - substitute(test.a, {var: as_dtype(0, dtype)})
