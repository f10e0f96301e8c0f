"""Parallel loops of one store, run on the calling thread if they are short.

Waking another thread takes as long as filling a result of 500 KB. Before::

    for i in T.parallel(m):
        y[i] = 0

After `short_loops(func, 131072)`::

    if m < 131072:
        for i in range(m):
            y[i] = 0
    else:
        for i in T.parallel(m):
            y[i] = 0

Loops over rows of a sparse axis are unchanged: their rows differ in length, and their code is long.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.nodes import nodes_of, stores_of, substitute
from sparsetir.sparse_ir.tir import as_dtype, constant, free_vars, loop_with
from sparsetir.sparse_ir.traversal import map_expr


def short_loops(func: tirx.PrimFunc, work: int) -> tirx.PrimFunc:
    """Give parallel loops of one store a version for the calling thread.

    func : a stage-III function
    work : the least stores for which other threads are woken
    """

    sizes = set(func.params)

    def visit(loop: Any) -> Any:
        count = _stores(loop, sizes) if loop.kind == tirx.ForKind.PARALLEL else None
        known = None if count is None else constant(count)
        if count is None or (known is not None and known >= work):
            return loop
        serial = loop_with(loop, kind=tirx.ForKind.SERIAL)
        if known is not None:
            return serial
        copy = s_tir.renew_defs(func.with_body(serial))
        serial = substitute(copy.body, dict(zip(copy.params, func.params, strict=True)))
        return tirx.IfThenElse(count < as_dtype(work, "int64"), serial, loop)

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))


def _stores(loop: Any, sizes: set[Any]) -> Any:
    """The number of stores of a nest, in int64; None if it does not only depend on sizes."""
    extents = [loop.extent, *(inner.extent for inner in nodes_of(tirx.For, loop.body))]
    if len(stores_of(loop.body)) != 1 or nodes_of(tirx.While, loop.body):
        return None
    if any(nodes_of(ir.TensorLoad, x) or not free_vars(x) <= sizes for x in extents):
        return None
    return prod(as_dtype(x, "int64") for x in extents)
