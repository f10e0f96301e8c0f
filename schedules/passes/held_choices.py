"""Large values of lets held in memory first (CPU).

Code generation of TVM 0.27 simplifies what a let binds, after divisions have become several
choices that hold their operands twice; for choices inside of each other this takes exponential
time (`Y[i] = x // a % b // c` under guards: over ten minutes). It does not look into stores, and
LLVM makes registers of them. Before and after::

    t: T.let[T.int32] = <large>       held = T.alloc_buffer((1,), "int32")
                                      held[0] = <large>
                                      t: T.let[T.int32] = held[0]
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.exact import is_choice
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr

# Choices and divisions that are simplified in no time.
FEW = 2
CHOICES = (tirx.Select, tirx.FloorDiv, tirx.FloorMod, tirx.And, tirx.Or)


def held_choices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of stage III whose lets bind few choices and divisions, but for those in lanes."""
    lanes = [x for x in nodes_of(tirx.For, func.body) if x.kind == tirx.ForKind.VECTORIZED]
    left = {let.__chandle__() for let in nodes_of(tirx.Bind, *lanes)}

    def visit(let: Any) -> Any:
        choices = [*nodes_of(CHOICES, let.value), *filter(is_choice, nodes_of(ir.Call, let.value))]
        if len(choices) <= FEW or let.__chandle__() in left:
            return let
        held = buffer_var((1,), dtype_of(let.value), let.var.name)
        at = [as_dtype(0, "int32")]
        store = tirx.BufferStore(held, let.value, at)
        bind = tirx.Bind(let.var, tirx.BufferLoad(held, at), let.span)
        return tirx.SeqStmt([tirx.AllocBuffer(held), store, bind])

    return with_body(func, map_expr(func.body, [(tirx.Bind, visit)]))
