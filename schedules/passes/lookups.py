"""Rows that many visits intersect or search: their elements are found in a table.

For `t = G[i, j] * G[j, k] * G[i, k]`, the triangles of a graph, co-iteration visits the row i again
for each j. A table of the row is filled once (:mod:`sparsetir.sparse_ir.schedule.locate`), and read
at the elements of the row j, in vectors; so are rows that are searched for each of these elements,
as in gradients of sparse products. For threads the rows are in parts with a table each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sparsetir.schedules.passes.partial_sums import partial_sums
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    SparseFunc,
    SparseIteration,
    iteration_with,
    names_inside,
    sparse_iterations,
)  # fmt: skip
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.loops import loops_of
from sparsetir.sparse_ir.traversal import map_expr

PARTS = 16  # each clears a table first


class Lookups(NamedTuple):
    """A program that looks elements of rows up.

    merged, located : by co-iteration or search, and by a table; with the same parameters
    outside : the axes of the loops around the one that does
    probe : the axis whose elements are looked up
    searched : the axis of rows that are searched; None for an intersection
    """

    merged: SparseFunc
    located: SparseFunc
    outside: list[Axis]
    probe: Axis
    searched: Axis | None


def lookups(func: SparseFunc, threads: int) -> Lookups | None:
    """Both forms of a program in which several visits look elements of a row up; None for another
    program, and for an iteration with annotations.
    """
    looks = _is_merged
    if not _looking(func, looks):
        looks = _is_attached
        if not _looking(func, looks) or any(map(names_inside, sparse_iterations(func))):
            return None  # the author has nested it
        func = _unfused(func)
    having = _looking(func, looks)
    if len(having) != 1 or having[0][0].annotations:
        return None
    ((it, place),) = having
    loops = loops_of(it)
    node = loops[place].node
    outside = [x.node for x in loops[:place] if isinstance(x.node, Axis)]
    probes = [a for a in getattr(node, "of", [node]) if isinstance(a, AttachedAxis)]
    if len(outside) < place or len(probes) != 1:
        return None
    rows = None
    try:
        sums = partial_sums(func, PARTS) if threads > 1 else None
        sch = Schedule(func if sums is None else sums[0])
        at = sch.get_sparse_iteration(_looking(sch.func, looks)[0][0].name)
        if sums is None and threads > 1 and loops[0].kinds == "S":
            rows, _ = sch.divide(sch.get_sp_iters(at)[0], PARTS, by="work")
        merged = sch.func
        loop = next(h for h in sch.get_sp_iters(at) if h.axes == loops[place].axes)
        _, fill, _ = sch.locate(loop, rows)
        (table,) = sch.get_sp_iters(fill)
        if rows is not None:
            sch.parallelize(sch.get_sp_iters(at)[0])
    except ScheduleError:
        return None
    searched = None if looks is _is_merged else func.axis(table.name)
    return Lookups(merged, sch.func, outside, probes[0].axis, searched)


def _looking(func: SparseFunc, looks: Callable[[Any], bool]) -> list[tuple[SparseIteration, int]]:
    """The loops that may look elements up: iterations, and places in them."""
    return [
        (it, n) for it in sparse_iterations(func) for n, x in enumerate(loops_of(it))
        if looks(x.node)
    ]  # fmt: skip


def _is_merged(node: Any) -> bool:
    return isinstance(node, Axis) and node.kind == "intersect"


def _is_attached(node: Any) -> bool:
    return isinstance(node, AttachedAxis)


def _unfused(func: SparseFunc) -> SparseFunc:
    """The function without fused axes around attached ones."""

    def visit(it: SparseIteration) -> SparseIteration:
        plain = [a for x in it.axes for a in (x.axes if isinstance(x, FusedAxis) else [x])]
        return iteration_with(it, axes=plain) if any(map(_is_attached, plain)) else it

    return func.replace(body=map_expr(func.body, [(SparseIteration, visit)]))
