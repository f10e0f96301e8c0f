"""Makes loops serial that TVM cannot run at once: vectorised ones that get no vectors.

It fails for a number of lanes that is no constant, for `while` loops inside, such as those of a
search, and for vectorised ones, and gives all lanes one value of a variable. Before and after::

    for q in T.vectorized(n):
        C[i, q] = 1.0

    for q in range(n):
        C[i, q] = 1.0

So are parallel loops in which something is asserted: TVM's workers may lose an error.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import loop_with, with_body
from sparsetir.sparse_ir.traversal import map_expr


def serial_lanes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of stage III whose vectorised and parallel loops TVM takes."""

    def visit(loop: Any) -> Any:
        if loop.kind == tirx.ForKind.PARALLEL and nodes_of(tirx.AssertStmt, loop.body):
            return loop_with(loop, kind=tirx.ForKind.SERIAL)
        if not vectorised(loop):
            return loop
        inside = nodes_of((tirx.While, tirx.Bind, tirx.For), loop.body)
        fits = isinstance(loop.extent, tirx.IntImm)
        if fits and all(isinstance(x, tirx.For) and not vectorised(x) for x in inside):
            return loop
        return loop_with(loop, kind=tirx.ForKind.SERIAL)

    def vectorised(loop: Any) -> bool:
        return loop.kind == tirx.ForKind.VECTORIZED

    return with_body(func, map_expr(func.body, [(tirx.For, visit)]))
