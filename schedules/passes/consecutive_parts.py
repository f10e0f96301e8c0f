"""Successive parts that one thread runs become one part (CPU).

How many threads share a parallel loop is known when it starts, and on a busy machine the calling
thread runs it alone. Before::

    for part in T.parallel(2):                         # annotated with :data:`CONSECUTIVE`
        first[0] = part
        last[0] = part + 1
        ...                                            # parts first[0] to last[0]

After, in a region that each thread runs once, where TVM divides the inner loop::

    with T.attr({"pragma_parallel_launch_point": 1}):
        first[0] = 2
        last[0] = 0
        for part in T.parallel(2):
            first[0] = T.min(first[0], part)
            last[0] = part + 1
        if first[0] < last[0]:
            ...

This pass runs after TVM's `StorageRewrite`, which moves allocations out of such regions, so that
threads would share them (TVM 0.27).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import stores_of
from sparsetir.sparse_ir.search import load_one, store_one
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, loop_with
from sparsetir.sparse_ir.traversal import map_expr

CONSECUTIVE = "sparsetir.consecutive"
LAUNCH = "pragma_parallel_launch_point"  # TVM's attribute of such a region


def consecutive_parts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function for a CPU, lowered but for TVM's builtins, with regions in place of the loops."""

    def visit(loop: Any) -> Any:
        if CONSECUTIVE not in loop.annotations:
            return loop
        part, kind = loop.loop_var, dtype_of(loop.loop_var)
        first, last = (x.buffer for x in stores_of(loop.body) if part in free_vars(x.value))
        rules = [
            (tirx.BufferStore, lambda x: x if part not in free_vars(x.value) else tirx.Evaluate(0)),
            (tirx.AllocBuffer, lambda x: x if x.buffer not in (first, last) else tirx.Evaluate(0)),
        ]
        mine = [
            store_one(first, tirx.min(load_one(first), part)),
            store_one(last, part + as_dtype(1, kind)),
        ]
        steps = [
            *(tirx.AllocBuffer(x) for x in (first, last)),
            store_one(first, loop.extent),
            store_one(last, as_dtype(0, kind)),
            loop_with(loop, body=tirx.SeqStmt(mine), annotations={}),
            tirx.IfThenElse(load_one(first) < load_one(last), map_expr(loop.body, rules), None),
        ]
        return tirx.AttrStmt(0, LAUNCH, as_dtype(1, "int32"), tirx.SeqStmt(steps))

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))
