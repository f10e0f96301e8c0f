"""Store large values of lets in memory first (CPU).

Code generation of TVM 0.27 simplifies values of lets after divisions have become several choices
that repeat their operands; for nested choices this takes exponential time, minutes for three
guarded divisions. It does not look into stores, which LLVM turns into registers. Before and
after::

    t: T.let[T.int32] = <large>       held = T.alloc_buffer((1,), "int32")
                                      held[0] = <large>
                                      t: T.let[T.int32] = held[0]
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.exact import is_choice
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of
from sparsetir.sparse_ir.tir import dtype_of, with_body, zero
from sparsetir.sparse_ir.traversal import map_expr

FEW = 2  # choices and divisions that are simplified quickly
CHOICES = (tirx.Select, tirx.FloorDiv, tirx.FloorMod, tirx.And, tirx.Or)


def held_choices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function whose lets bind few choices and divisions, except for those in lanes."""
    lanes = [x for x in nodes_of(tirx.For, func.body) if x.kind == tirx.ForKind.VECTORIZED]
    in_lanes = {let.__chandle__() for let in nodes_of(tirx.Bind, *lanes)}

    def visit(let: Any) -> Any:
        choices = [*nodes_of(CHOICES, let.value), *filter(is_choice, nodes_of(ir.Call, let.value))]
        if len(choices) <= FEW or let.__chandle__() in in_lanes:
            return let
        held = buffer_var((1,), dtype_of(let.value), let.var.name)
        first = [zero("int32")]
        store = tirx.BufferStore(held, let.value, first)
        bind = tirx.Bind(let.var, tirx.BufferLoad(held, first), let.span)
        return tirx.SeqStmt([tirx.AllocBuffer(held), store, bind])

    return with_body(func, map_expr(func.body, [(tirx.Bind, visit)]))
