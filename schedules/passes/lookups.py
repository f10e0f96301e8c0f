"""Intersections of a row with many others: its elements are found in a table.

For `t = G[i, j] * G[j, k] * G[i, k]`, the triangles of a graph, co-iteration visits the row i again
for each j. A table of the row is filled once (:mod:`sparsetir.sparse_ir.schedule.locate`), and read
at the elements of the row j, in vectors. For threads the rows are in parts with a table each.
"""

from __future__ import annotations

from typing import NamedTuple

from sparsetir.schedules.passes.partial_sums import partial_sums
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    SparseFunc,
    SparseIteration,
    sparse_iterations,
)  # fmt: skip
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.loops import loops_of

PARTS = 16  # each clears a table first


class Lookups(NamedTuple):
    """A program with an intersection of rows.

    merged, located : by co-iteration, and by a table; with the same parameters
    outside : the axes of the loops around the intersection
    probe : the axis whose elements are looked up
    """

    merged: SparseFunc
    located: SparseFunc
    outside: list[Axis]
    probe: Axis


def lookups(func: SparseFunc, threads: int) -> Lookups | None:
    """Both forms of a program in which several visits intersect one row with others; None for
    another program, and for an iteration with annotations.
    """
    having = _intersecting(func)
    if len(having) != 1 or having[0].annotations:
        return None
    loops = loops_of(having[0])
    kinds = [getattr(x.node, "kind", None) for x in loops]
    place = kinds.index("intersect")
    outside = [x.node for x in loops[:place] if isinstance(x.node, Axis)]
    probes = [a for a in loops[place].node.of if isinstance(a, AttachedAxis)]
    if len(outside) < place or len(probes) != 1 or kinds.count("intersect") > 1:
        return None
    rows = None
    try:
        sums = partial_sums(func, PARTS) if threads > 1 else None
        sch = Schedule(func if sums is None else sums[0])
        at = sch.get_sparse_iteration(_intersecting(sch.func)[0].name)
        if sums is None and threads > 1 and loops[0].kinds == "S":
            rows, _ = sch.divide(sch.get_sp_iters(at)[0], PARTS, by="work")
        merged = sch.func
        loop = next(h for h in sch.get_sp_iters(at) if h.axes == loops[place].axes)
        sch.locate(loop, rows)
        if rows is not None:
            sch.parallelize(sch.get_sp_iters(at)[0])
    except ScheduleError:
        return None
    return Lookups(merged, sch.func, outside, probes[0].axis)


def _intersecting(func: SparseFunc) -> list[SparseIteration]:
    """The iterations that visit an intersection."""
    return [
        it for it in sparse_iterations(func)
        if any(isinstance(a, Axis) and a.kind == "intersect" for a in it.axes)
    ]  # fmt: skip
