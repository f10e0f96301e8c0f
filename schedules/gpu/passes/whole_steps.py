"""A loop of any length in steps of some visits, and what is left visit by visit (GPU).

The visits of a step are written out, so that what they load is under way at the same time. TVM's
`split` asks before each visit whether there is one, of a loop whose length is no constant; nvcc,
left to itself, writes out four visits of a small loop. Before::

    for e in range(n):
        with T.sblock("reduce1"): ...

After `whole_steps(func, "reduce", 4)`::

    for e_0 in range(n // 4):
        for e_1 in T.unroll(4):
            with T.sblock("reduce1"): ...  # with e_0 * 4 + e_1 for e
    for e_2 in range(n % 4):
        with T.sblock("reduce1"): ...  # with n // 4 * 4 + e_2 for e

Both loops over what is not known say `#pragma unroll 1`; for steps of one the loop itself does.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.schedules.passes.nests import renewed
from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import as_dtype
from sparsetir.sparse_ir.nodes import map_expr
from sparsetir.sparse_ir.statements import as_one, loop_over, loop_with

__all__ = ["whole_steps"]

AS_IT_IS = {"disable_unroll": True}  # which TVM prints as a pragma


def whole_steps(func: tirx.PrimFunc, iteration: Any, count: int) -> tirx.PrimFunc:
    """The function with the outermost loop of an iteration's innermost block in whole steps.

    func : of stage II; one of the last steps, since blocks inside have the same name twice
    iteration : its reference or name
    count : visits of a step

    Raises ScheduleError where there is no such loop.
    """
    who = "whole_steps"
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScheduleError(f"{who}: argument 'count': expected a positive integer, got {count!r}")
    sch = s_tir.Schedule(func)
    block = innermost_block(sch, iteration, who)
    loops = sch.get_loops(block)
    if not loops:
        raise ScheduleError(f"{who}: argument 'iteration': expected a block in a loop, got none")
    loop = sch.get(loops[0])
    var = loop.loop_var
    if count == 1:
        parts = [loop_with(loop, annotations={**loop.annotations, **AS_IT_IS})]
    else:
        parts = _parts(loop, count)

    def replace(node: Any) -> Any:
        return as_one(parts) if node.loop_var.same_as(var) else node

    return func.with_body(map_expr(func.body, [(tirx.For, replace)]))


def _parts(loop: Any, count: int) -> list[Any]:
    """The loop over whole steps, and that over what is left."""
    var = loop.loop_var
    dtype = str(var.ty.dtype)
    step, visit, left = (tirx.Var(f"{var.name}_{n}", dtype) for n in range(3))
    size, extent = as_dtype(count, dtype), as_dtype(loop.extent, dtype)
    whole = tirx.floordiv(extent, size)

    def at(place: Any) -> Any:
        return renewed(loop.body, {var: place}, blocks=True)

    inside = loop_over(visit, size, at(step * size + visit), tirx.ForKind.UNROLLED)
    rest = tirx.floormod(extent, size)
    return [
        loop_over(step, whole, inside, annotations=AS_IT_IS),
        loop_over(left, rest, at(whole * size + left), annotations=AS_IT_IS),
    ]
