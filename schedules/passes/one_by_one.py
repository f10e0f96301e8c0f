"""Loops that LLVM is to leave as they are, visit by visit (CPU).

LLVM writes small loops out two or four times, with the rest in a second loop: two ends that no
processor foresees where there was one, which costs more than it saves where a loop has a few dozen
visits of a varying number. It does so where it can compute the number of visits. Before::

    for e in range(n):
        with T.sblock("reduce1"): ...

After `one_by_one(func, "reduce", "I_step")`, where `I_step` is a parameter that is 1, which LLVM
does not know::

    at[0] = 0
    while at[0] < n:
        with T.sblock("reduce1"): ...  # with at[0] for e
        at[0] = at[0] + I_step
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, map_expr, substitute
from sparsetir.sparse_ir.position_space import as_dtype
from sparsetir.sparse_ir.statements import block_with

__all__ = ["one_by_one"]


def one_by_one(func: tirx.PrimFunc, iteration: Any, step: str) -> tirx.PrimFunc:
    """The function with the outermost loop of an iteration's innermost block visit by visit.

    func : of stage II; one of the last steps
    iteration : its reference or name; its innermost block is in a block of a level above
    step : name of a parameter that is 1

    Raises ScheduleError where there is no such parameter or loop.
    """
    who = "one_by_one"
    found = [p for p in func.params if p.name == step]
    if len(found) != 1:
        raise ScheduleError(
            f"{who}: argument 'step': expected a parameter, got '{step}'; there are "
            f"{[str(p.name) for p in func.params]}"
        )
    sch = s_tir.Schedule(func)
    block = innermost_block(sch, iteration, who)
    loops = [sch.get(loop) for loop in sch.get_loops(block)]
    above = sch.get_sref(loops and sch.get_loops(block)[0]).parent
    if not loops or not isinstance(above.stmt, s_tir.SBlock):
        raise ScheduleError(f"{who}: argument 'iteration': expected a block in a loop, got {block}")
    loop, owner = loops[0], above.stmt
    dtype = str(loop.loop_var.ty.dtype)
    at = buffer_var([1], dtype, f"{loop.loop_var.name}_at", "local")
    zero, here = as_dtype(0, dtype), tirx.BufferLoad(at, [0])

    def visits(node: Any) -> Any:
        if not node.loop_var.same_as(loop.loop_var):
            return node
        go_on = tirx.BufferStore(at, here + as_dtype(found[0], dtype), [0])
        body = tirx.SeqStmt([substitute(node.body, {node.loop_var: here}), go_on])
        whole = tirx.While(here < as_dtype(node.extent, dtype), body)
        return tirx.SeqStmt([tirx.BufferStore(at, zero, [0]), whole])

    def declared(node: Any) -> Any:
        if node.name_hint != owner.name_hint:
            return node
        return block_with(node, alloc_buffers=[*node.alloc_buffers, at])

    return func.with_body(map_expr(func.body, [(tirx.For, visits), (s_tir.SBlock, declared)]))
