"""A block's body only where a loop inside of it has visits.

What is added up in a loop and then to a result changes nothing where the loop has no visits, but
still takes a load and a store of each element, or an atomic addition. Before::

    with T.sblock("spmm0"):
        S[0] = 0.0
        for e in range(n[vp]):
            with T.sblock("reduce0"): ...  # S[0] = S[0] + ..
        C[vp] = C[vp] + S[0]

After `where_visited(func, "spmm0", "reduce")`, on the word of who calls it that the rest does
nothing then::

    with T.sblock("spmm0"):
        if n[vp] > 0:
            ...
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.schedules.passes.nests import bound_in
from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import as_dtype, dtype_of, free_vars
from sparsetir.sparse_ir.nodes import map_expr, nodes_of
from sparsetir.sparse_ir.statements import block_with

__all__ = ["where_visited"]


def where_visited(func: tirx.PrimFunc, block: str, iteration: Any) -> tirx.PrimFunc:
    """The function with the body of a block under the condition that an iteration has visits.

    func : of stage II
    block : its name
    iteration : its reference or name; the outermost loop of its innermost block has an extent that
        is known where the block begins

    Raises ScheduleError where there is no such loop or block.
    """
    sch = s_tir.Schedule(func)
    loops = sch.get_loops(innermost_block(sch, iteration, "where_visited"))
    if not loops:
        raise ScheduleError(
            "where_visited: argument 'iteration': expected one with a loop, got none"
        )
    extent = sch.get(loops[0]).extent
    some = extent > as_dtype(0, dtype_of(extent))
    var = sch.get(loops[0]).loop_var
    around = [
        b.body
        for b in nodes_of(s_tir.SBlock, func.body)
        if str(b.name_hint) == block and var in bound_in(b.body)
    ]
    if len(around) != 1 or free_vars(extent) & bound_in(around[0]):
        name = getattr(iteration, "name", iteration)
        raise ScheduleError(
            f"where_visited: argument 'block': expected one around '{name}' in which the extent of "
            f"its loop is known, got {block!r}"
        )

    def visit(node: Any) -> Any:
        if str(node.name_hint) != block:
            return node
        return block_with(node, body=tirx.IfThenElse(some, node.body, None))

    return func.with_body(map_expr(func.body, [(s_tir.SBlock, visit)]))
