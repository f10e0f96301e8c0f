"""Sums over all rows in parts, each with a sum of its own, so that threads can compute them.

Before, one after the other, as all visits add to the same element::

    with T.sp_iter([I, J], "RR", "z") as [i, j]:
        z[()] = z[()] + x[i] * A[i, j] * y[j]

After, with parts of equal work that do not depend on the number of threads::

    with T.sp_iter([I_parts], "S", "z_reduce") as [i_parts]:
        z_ws_ws[()] = 0.0
        with T.sp_iter([T.part(I, I_part), J], "RR", "z_reduce_reduce") as [i, j]:
            z_ws_ws[()] = z_ws_ws[()] + x[i] * A[i, j] * y[j]
        z_ws[i_parts] = z_ws_ws[()]
    ...                                            # z[()], the sum of z_ws
"""

from __future__ import annotations

from math import prod

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, SparseIteration, nodes_of
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.loops import loops_of

PARTS = 64
LARGEST = 64  # elements of a result that each part has


def partial_sums(func: SparseFunc, count: int = PARTS) -> tuple[SparseFunc, list[Axis]] | None:
    """The function with a sum for each part of the rows, and the axes of its loops.

    count : the number of parts

    None for a program of another shape: several iterations, an outermost loop that is no reduction
    over a dense axis of rows, a result of more than LARGEST elements; or with annotations.
    """
    it = func.body
    nested = isinstance(it, SparseIteration) and nodes_of(SparseIteration, it.body)
    if not isinstance(it, SparseIteration) or nested or it.annotations:
        return None
    loops, reduction = loops_of(it), reduction_of(it.body)
    rows = loops[0].node if loops else None
    if reduction is None or not isinstance(rows, Axis) or loops[0].kinds != "R":
        return None
    if rows.kind != "dense_fixed" or rows.parent is not None or len(loops) < 2:
        return None
    spatial = [x.node for x in loops if x.kinds == "S" and isinstance(x.node, Axis)]
    held = prod(constant_length(axis) or LARGEST + 1 for axis in spatial)
    if len(spatial) < it.kinds.count("S") or held > LARGEST:
        return None
    sch, result = Schedule(func), str(reduction.store.buffer.name)
    at = sch.get_sparse_iteration(it.name)
    over_elements = any(isinstance(x.node, Axis) and x.node.is_variable for x in loops)
    try:
        parts, _ = sch.divide(
            sch.get_sp_iters(at)[0], count, by="work" if over_elements else "positions"
        )
        names = [(axis.name,) for axis in spatial]
        over = [x for x in sch.get_sp_iters(at) if x.axes in names]
        _, reduce, *_ = sch.precompute(result, at, over, lanes=[parts], scope="global")
        first, *others = sch.get_sp_iters(reduce)
        sch.precompute(f"{result}_ws", first, [x for x in others if x.axes in names])
        sch.parallelize(sch.get_sp_iters(reduce)[0])
    except ScheduleError:
        return None
    return sch.func, [x.node for x in loops if isinstance(x.node, Axis)]
