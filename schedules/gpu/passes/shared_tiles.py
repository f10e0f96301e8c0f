"""Tiles of operands in shared memory, including gathered rows.

`precompute` copies tiles over dense axes. If a factor runs over stored elements, such as the
columns of SR-BCRS, its tile is over their positions, which only exist in stage II. Before::

    for g, ii, k1, jt in T.grid(indptr[vio + 1] - indptr[vio], 8, 128, 16):
        with T.sblock("reduce0"):
            if 0 <= J[vio, vg, vjt]:
                C_ws[vii, vk1] += A[vio, vg, vjt, vii] * B[J[vio, vg, vjt], vk1]

After `shared_tiles(func, "reduce0", ["A", "B"], outer=1)`::

    for g in range(indptr[vio + 1] - indptr[vio]):
        with T.sblock("reduce0_visit"):
            for jt, ii in T.grid(16, 8):
                with T.sblock("A_copy0"): A_ws[jt, ii] = A[vio, g, jt, ii]
            for jt, k1 in T.grid(16, 128):
                with T.sblock("B_copy0"):
                    B_ws[jt, k1] = T.if_then_else(0 <= J[vio, g, jt], B[J[vio, g, jt], k1], 0)
            for ii, k1, jt in T.grid(8, 128, 16):
                with T.sblock("reduce0"):
                    C_ws[ii, k1] += A_ws[jt, ii] * B_ws[jt, k1]

A term whose condition fails becomes a product of zeros of the gathered operand with the stored
padding of the other one, which formats fill with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx

from sparsetir.schedules.passes.nests import block_of, find_nest, guarded, replaced
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.reduction import split_guards
from sparsetir.sparse_ir.tir import dtype_of, free_vars, loop_over
from sparsetir.sparse_ir.traversal import map_expr

NAME = "shared_tiles"


def shared_tiles(
    func: tirx.PrimFunc, block: str, operands: Sequence[str], *, outer: int
) -> tirx.PrimFunc:
    """A stage-II function whose block reads tiles of operands from shared memory.

    block : block that reads each operand with one set of indices
    operands : names of buffers; conditions around the block's statement move to the copy of the
        last
    outer : number of loops around the block that are also around a tile

    The copies are in blocks "<operand>_copy0", in a block "<block>_visit". Raises ScheduleError for
    operands that are read otherwise.
    """
    nest = find_nest(NAME, func, block)
    around, inner = nest.loops[:outer], nest.loops[outer:]
    conditions, statement = split_guards(nest.body)
    steps: list[Any] = []
    tiles: list[Any] = []
    for number, operand in enumerate(operands):
        value, load = _read(statement, operand, block)
        guards = [] if value is load else [value.args[0]]
        guards += conditions if number == len(operands) - 1 else []
        loops = _tile_loops([load, *guards], inner, operand, block)
        tile = buffer_var([int(x.extent) for x in loops], dtype_of(load), f"{operand}_ws", "shared")
        tiles.append(tile)
        steps.append(_copy(f"{operand}_copy0", tile, loops, load, guards))
        statement = _reading(statement, value, tirx.BufferLoad(tile, [x.loop_var for x in loops]))
    body: Any = block_of(block, statement)
    for loop in reversed(inner):
        body = loop_over(loop.loop_var, loop.extent, body)
    body = block_of(f"{block}_visit", tirx.SeqStmt([*steps, body]), tiles)
    for loop in reversed(around):
        body = loop_over(loop.loop_var, loop.extent, body)
    return replaced(func, nest, body)


def _read(statement: Any, operand: str, block: str) -> tuple[Any, Any]:
    """The read of an operand, zero if its condition fails, and the load in it."""
    loads = [x for x in nodes_of(ir.TensorLoad, statement) if str(x.source.name) == operand]
    if len(loads) != 1:
        raise ScheduleError(
            f"{NAME}: argument 'operands': expected '{operand}' to be read at one place in block "
            f"'{block}', got {len(loads)}"
        )
    for call in nodes_of(ir.Call, statement):
        if guarded(call)[1].same_as(loads[0]):
            return call, loads[0]
    return loads[0], loads[0]


def _tile_loops(used: list[Any], inner: list[Any], operand: str, block: str) -> list[Any]:
    """The loops of a tile, with that along memory last."""
    variables = set[Any]().union(*(free_vars(x) for x in used))
    load = used[0]
    along = [x for x in inner if x.loop_var in free_vars(load.indices[-1])]
    others = [x for x in inner if x.loop_var in variables and x not in along]
    constant = all(isinstance(x.extent, tirx.IntImm) for x in [*others, *along])
    if len(along) != 1 or not constant:
        raise ScheduleError(
            f"{NAME}: argument 'operands': expected one of the loops inside to go along the last "
            f"axis of '{operand}' in block '{block}', got {[x.loop_var.name for x in along]}"
        )
    return [*others, *along]


def _copy(name: str, tile: Any, loops: list[Any], load: Any, conditions: list[Any]) -> Any:
    fresh = {x.loop_var: tirx.Var(x.loop_var.name, dtype_of(x.loop_var)) for x in loops}
    value = load
    if conditions:
        value = tirx.if_then_else(tirx.all(*conditions), load, tirx.const(0, dtype_of(load)))
    store = tirx.BufferStore(tile, value, [x.loop_var for x in loops])
    body: Any = block_of(name, substitute(store, fresh))
    for loop in reversed(loops):
        body = loop_over(fresh[loop.loop_var], loop.extent, body)
    return body


def _reading(statement: Any, value: Any, tile: Any) -> Any:
    """The statement, reading an element of a tile instead of an operand."""
    kind = type(value)
    return map_expr(statement, [(kind, lambda node: tile if node.same_as(value) else node)])
