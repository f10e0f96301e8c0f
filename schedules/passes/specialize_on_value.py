"""Specialise code on each value of a coordinate, or of an array's element.

If a loop over few coordinates is over thread blocks, or is too long to unroll, the
body's expressions of a coordinate are not constant. Before, with `vq` a coordinate below 3::

    with T.sblock("spmm0"):
        vp, vq = T.axis.remap("SS", [p, q])
        for e in range(n):
            S[vq] = S[vq] + ..

After `specialize_on_value(func, "spmm0", "vq", range(3))`, by bisection, so that few conditions are
evaluated::

    with T.sblock("spmm0"):
        vp, vq = T.axis.remap("SS", [p, q])
        if vq < 1:
            for e in range(n):
                S[0] = S[0] + ..
        else:
            if vq < 2:
                ...
            else:
                ...

(Albakri and Cheshmi, enumerate-and-sparse-coarsen, figure 4 and section 3.5.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import bound_in, with_block, with_fresh
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import nodes_of, same_indices
from sparsetir.sparse_ir.tir import as_dtype, block_with, dtype_of, free_vars
from sparsetir.sparse_ir.traversal import map_expr


def specialize_on_value(
    func: tirx.PrimFunc, block: str, what: str, values: Sequence[int]
) -> tirx.PrimFunc:
    """The function with the body of a block specialised for each value.

    func : a stage-II function; one of the last steps, since blocks inside have equal names in each
        case
    block : the block's name
    what : a coordinate of the block; or a buffer that its body loads with one set of indices, known
        at the start of the body
    values : all possible values, increasing

    Raises ScheduleError if there is no such block, coordinate or load.
    """
    caller = "specialize_on_value"
    blocks = [b for b in nodes_of(s_tir.SBlock, func.body) if str(b.name_hint) == block]
    if len(blocks) != 1:
        raise ScheduleError(
            f"{caller}: argument 'block': expected the name of one block, got {block!r}"
        )
    if not values or [*values] != sorted(set(values)):
        raise ScheduleError(
            f"{caller}: argument 'values': expected increasing integers, got {[*values]}"
        )
    (node,) = blocks
    chosen = _chosen(caller, node, what)

    def with_value(value: int) -> Any:
        constant = as_dtype(value, dtype_of(chosen))
        if isinstance(chosen, ir.Var):
            return with_fresh(node.body, {chosen: constant}, blocks=True)

        def load(other: Any) -> Any:
            return constant if other.source.same_as(chosen.source) else other

        return with_fresh(map_expr(node.body, [(ir.TensorLoad, load)]), {}, blocks=True)

    def by_halves(some: Sequence[int]) -> Any:
        if len(some) == 1:
            return with_value(some[0])
        half = len(some) // 2
        less = chosen < as_dtype(some[half], dtype_of(chosen))
        return tirx.IfThenElse(less, by_halves(some[:half]), by_halves(some[half:]))

    body = by_halves(list(values))
    return with_block(func, block, lambda other: block_with(other, body=body))


def _chosen(caller: str, block: Any, what: str) -> Any:
    """The coordinate, or the load."""
    coordinates = {str(v.var.name): v.var for v in block.iter_vars}
    if what in coordinates:
        return coordinates[what]
    loads = [x for x in nodes_of(ir.TensorLoad, block.body) if str(x.source.name) == what]
    inner = bound_in(block.body)
    same = loads and all(same_indices(x.indices, loads[0].indices) for x in loads)
    if not same or any(free_vars(i) & inner for i in loads[0].indices):
        raise ScheduleError(
            f"{caller}: argument 'what': expected a coordinate of block '{block.name_hint}', "
            f"{[*coordinates]}, or a buffer that it loads at one place known there, got {what!r}"
        )
    return loads[0]
