"""Visit coordinates that consecutive iterations share once: loop fusion.

The inverse of :mod:`~sparsetir.sparse_ir.schedule.distribute`. Before, in three passes over
memory::

    TOTAL = T.alloc_sparse_buffer((I, H), "float32")
    with T.sp_iter([I, J, H], "SSS", "powers") as [i, j, h]:
        Y[i, j, h] = T.exp(X[i, j, h])
    with T.sp_iter([I, J, H], "SRS", "total") as [i, j, h]:
        with T.init():
            TOTAL[i, h] = 0.0
        TOTAL[i, h] = TOTAL[i, h] + Y[i, j, h]
    with T.sp_iter([I, J, H], "SSS", "divide") as [i, j, h]:
        Y[i, j, h] = Y[i, j, h] / TOTAL[i, h]

After `fuse_steps([powers, total, divide], [i, h])`, while a row is in cache, and with a register
for each sum::

    TOTAL_of_visit = T.alloc_sparse_buffer((), "float32", "local")
    with T.sp_iter([I, H], "SS", "powers_steps") as [i, h]:
        with T.sp_iter([J], "S", "powers") as [j]:
            Y[i, j, h] = T.exp(X[i, j, h])
        with T.sp_iter([J], "R", "total") as [j]:
            with T.init():
                TOTAL_of_visit[()] = 0.0
            TOTAL_of_visit[()] = TOTAL_of_visit[()] + Y[i, j, h]
        with T.sp_iter([J], "S", "divide") as [j]:
            Y[i, j, h] = Y[i, j, h] / TOTAL_of_visit[()]

Legal where the order of visits of each iteration is free, and no visit of the shared loops uses an
element that another one writes. Allocated arrays with one element per visit become a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.legal import parallelizable, reorderable
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    buffer_var,
    same_indices,
    substitute,
)
from sparsetir.sparse_ir.races import FREE
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SparseIterationRef,
    SpIter,
    changed,
    find_iteration,
    inside,
    loops_of,
    name_of,
    place_of,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.tir import as_one, statements_of
from sparsetir.sparse_ir.traversal import access_rules, map_expr
from sparsetir.sparse_ir.verify import find_problem

NAME = "fuse_steps"


@primitive
def fuse_steps(
    func: SparseFunc, steps: Sequence[SparseIterationRef], loops: Sequence[SpIter]
) -> tuple[SparseFunc, SparseIterationRef]:
    """Visit coordinates that consecutive iterations share once, with all iterations inside.

    Parameters
    ----------
    steps : sequence of SparseIterationRef
        Two or more iterations that follow each other and are in no other one, in their order,
        without iterations in them and without annotations.
    loops : sequence of SpIter
        Spatial loops of the first over dense axes, outermost first; each of the others has one over
        the same axis.

    Returns
    -------
    SparseIterationRef
        The iteration over the shared loops.
    """
    its = [find_iteration(func, name_of(NAME, step), NAME) for step in steps]
    every = statements_of(func.body)
    at = next((n for n, stmt in enumerate(every) if its and stmt.same_as(its[0])), len(every))
    rest = every[at + len(its) :]
    follow = zip(its, every[at:], strict=False)
    if len(its) < 2 or sum(a.same_as(b) for a, b in follow) < len(its):
        raise ScheduleError(
            f"{NAME}: argument 'steps': expected two or more iterations that follow each other, in "
            f"their order and in no other one, got {[it.name for it in its]}"
        )
    if not loops or len({*loops}) < len(loops):
        names = [loop.name for loop in loops]
        raise ScheduleError(f"{NAME}: argument 'loops': expected different loops, got {names}")
    shared = [loops_of(its[0])[place_of(NAME, func, its[0], loop)] for loop in loops]
    inner = [_step(func, it, shared) for it in its]
    outer = [Loop(x.node, [tirx.Var(x.var.name, x.var.ty.dtype)], "S") for x in shared]
    body = [substitute(stmt, dict(zip(given, (x.var for x in outer), strict=True)))
            for stmt, given in inner]  # fmt: skip
    name = fresh_name(func, f"{its[0].name}_steps")
    whole = changed(SparseIteration(None, [], "", name, [], None, as_one(body), {}), outer)
    buffers, values = _numbers(func, [*every[:at], *rest], whole)
    whole = map_expr(whole, access_rules(lambda of, _: (values[of], []) if of in values else None))
    fused = func.replace(body=as_one([*every[:at], whole, *rest]), buffers=buffers)
    for loop, fact in zip(shared, parallelizable(fused, whole), strict=True):
        if fact != FREE:
            raise ScheduleError(
                f"{NAME}: loop '{loop.name}' is not proven free of races ({fact}): a step of one "
                f"visit may use what a step of another one writes\n{show(whole)}"
            )
    problem = find_problem(fused)
    if problem is not None:
        raise ScheduleError(f"{NAME}: {problem}\n{show(whole)}")
    return fused, SparseIterationRef(name)


def _step(func: SparseFunc, it: SparseIteration, shared: list[Loop]) -> tuple[Any, list[Any]]:
    """An iteration without the shared loops, or its body, and its variables of these."""

    def refuse(reason: str) -> None:
        raise ScheduleError(f"{NAME}: {reason}\n{show(it)}")

    if inside(it):
        refuse(f"expected iterations without others inside, got '{it.name}'")
    if it.annotations:
        refuse(f"expected iterations without annotations, got {dict(it.annotations)}")
    problem = reorderable(func, it)
    if problem is not None:
        refuse(f"the order of visits of '{it.name}' matters: {problem}")
    there = {loop.name: loop for loop in loops_of(it)}
    for name in (loop.name for loop in shared):
        loop = there.get(name)
        if loop is None or loop.kinds != "S" or not loop.is_dense:
            refuse(f"expected a spatial loop over the dense axis '{name}' in '{it.name}'")
    own = {loop.name for loop in shared}
    loops = [loop for name, loop in there.items() if name not in own]
    if not loops and it.init is not None:
        refuse(f"expected more loops in '{it.name}', which has an init")
    return (changed(it, loops) if loops else it.body), [there[loop.name].var for loop in shared]


def _numbers(
    func: SparseFunc, outside: list[Any], whole: SparseIteration
) -> tuple[list[SparseBuffer], dict[Any, Any]]:
    """The buffers of a program, with a number for each array that has one per visit of an
    iteration; and these numbers, by the arrays' variables."""
    values: dict[Any, Any] = {}
    buffers: list[SparseBuffer] = []
    at = {axis.name: var for axis, var, _ in whole.axis_of()}
    for buffer in func.buffers:
        place = [at.get(axis.name) for axis in buffer.axes or ()]
        if (
            buffer.handle is None
            and buffer.axes
            and not any(accesses_of(stmt, buffer.var) for stmt in outside)
            and all(same_indices(list(x.indices), place) for x in accesses_of(whole, buffer.var))
        ):
            name = fresh_name(func, f"{buffer.name}_of_visit")
            values[buffer.var] = buffer_var([], buffer.dtype, name, "local")
            buffer = SparseBuffer(values[buffer.var], [], None)
        buffers.append(buffer)
    return buffers, values
