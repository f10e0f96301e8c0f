"""Make vectorised loops serial that TVM cannot vectorise.

It fails for a non-constant number of lanes, for `while` loops inside, such as those of a search,
and for nested vectorised ones, and gives all lanes one value of a variable. Before and after::

    for q in T.vectorized(n):
        C[i, q] = 1.0

    for q in range(n):
        C[i, q] = 1.0

Parallel loops with an assertion become serial, too: TVM's workers may lose an error.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import loop_with, with_body
from sparsetir.sparse_ir.traversal import map_expr


def serial_lanes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function whose vectorised and parallel loops TVM supports."""

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
