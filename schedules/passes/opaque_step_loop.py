"""Loops that LLVM does not unroll (CPU).

LLVM unrolls small loops two, four or eight times, with a second loop for the remainder: two
mispredicted trip counts instead of one, which costs more than it saves for a loop of a few dozen
visits of varying number. It does so if it can compute the trip count. (Zen 5, one thread, pruned
weights: panels of six rows take 1.0 to 2 times as long without this pass, of four 0.95 to 1.0.)
Before::

    for e in range(E_indptr[vi + 1] - E_indptr[vi]):
        with T.sblock("reduce1"): ...

After `opaque_step_loop(func, "reduce")`, with a step that is 1 whenever there is a visit, which
LLVM cannot know, and with visits counted by position in storage, the index of the arrays::

    at[0] = E_indptr[vi]
    while at[0] < E_indptr[vi + 1]:
        with T.sblock("reduce1"): ...  # with at[0] - E_indptr[vi] for e
        at[0] = at[0] + T.min(1, nnz)

With a parameter for the step, `opaque_step_loop(func, "reduce", "I_step")`, they are counted from
0, which saves a register if several such loops are in sequence.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import of_params, with_block, with_loop
from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, substitute
from sparsetir.sparse_ir.position_space import LAYOUTS
from sparsetir.sparse_ir.tir import as_dtype, block_with, dtype_of


def opaque_step_loop(func: tirx.PrimFunc, iteration: Any, step: str | None = None) -> tirx.PrimFunc:
    """The function with the outermost loop of an iteration's innermost block not unrolled.

    func : a stage-II function; one of the last steps
    iteration : its reference or name; its innermost block is in a block of an outer level, and has
        no init, as a reduction into a workspace
    step : name of a parameter that is 1; None for a loop over the elements of an axis

    Raises ScheduleError if there is no such parameter or loop, and for an init.
    """
    caller = "opaque_step_loop"
    sch = s_tir.Schedule(func)
    block = innermost_block(sch, iteration, caller)
    loops = sch.get_loops(block)
    above = sch.get_sref(loops[0]).parent if loops else None
    if above is None or not isinstance(above.stmt, s_tir.SBlock):
        raise ScheduleError(
            f"{caller}: argument 'iteration': expected a block in a loop, got "
            f"'{sch.get(block).name_hint}'"
        )
    if sch.get(block).init is not None:
        raise ScheduleError(
            f"{caller}: argument 'iteration': expected the step of a precompute that reduces, got "
            f"block '{sch.get(block).name_hint}', whose init is in the loop"
        )
    loop, owner = sch.get(loops[0]), above.stmt
    dtype = str(loop.loop_var.ty.dtype)
    if step is None:
        begin, end, one = _positions(func, loop.extent)
    else:
        begin, end, one = as_dtype(0, dtype), loop.extent, _parameter(func, step)
    one, end = as_dtype(one, dtype), as_dtype(end, dtype)
    cell = buffer_var([1], dtype, f"{loop.loop_var.name}_at", "local")
    here = tirx.BufferLoad(cell, [0])

    def visits(node: Any) -> Any:
        visit = here if step is not None else here - begin
        go_on = tirx.BufferStore(cell, here + one, [0])
        body = tirx.SeqStmt([substitute(node.body, {node.loop_var: visit}), go_on])
        return tirx.SeqStmt([tirx.BufferStore(cell, begin, [0]), tirx.While(here < end, body)])

    def declared(node: Any) -> Any:
        return block_with(node, alloc_buffers=[*node.alloc_buffers, cell])

    func = with_loop(func, loop.loop_var, visits)
    return with_block(func, str(owner.name_hint), declared)


def _positions(func: tirx.PrimFunc, extent: Any) -> tuple[Any, Any, Any]:
    """Loads of the start and the end of a loop with that extent, and of 1; opaque to LLVM."""
    end, begin = (extent.a, extent.b) if isinstance(extent, tirx.Sub) else (extent, extent)
    offsets = begin.source.name if isinstance(begin, ir.TensorLoad) else None
    for layout in func.attrs[LAYOUTS].values():
        for axis, indptr in zip(layout.axes, layout.indptr, strict=True):
            if indptr and indptr == offsets:
                nnz = of_params(func, axis.nnz)
                return begin, end, tirx.min(nnz, as_dtype(1, dtype_of(nnz)))
    raise ScheduleError(
        "opaque_step_loop: argument 'step': expected the name of a parameter where a loop is not "
        f"over what an axis stores, but over {extent}, got None"
    )


def _parameter(func: tirx.PrimFunc, step: str) -> Any:
    params = [p for p in func.params if p.name == step]
    if len(params) != 1:
        raise ScheduleError(
            f"opaque_step_loop: argument 'step': expected a parameter, got '{step}'; there are "
            f"{[str(p.name) for p in func.params]}"
        )
    return params[0]
