"""Intersections of short rows with long ones: the pointer into the long one gallops.

Before::

    with T.sp_iter([I, T.intersect(J1, J2)], "SR", "dot") as [i, j]:

After `gallop(j, 8)`, which the lowering implements (:mod:`sparsetir.sparse_ir.merge_loops`)::

    with T.sp_iter([I, T.intersect(J1, J2)], "SR", "dot") as [i, j]:
        T.sp_annotate({"gallop": {"J1_and_J2": 8}})

Each time the merged loop starts, an axis with at least eight times the elements of another one is
searched for the next coordinate of that one; other axes advance by one element. A row of s elements
with one of l takes s log(l / s) steps in place of s + l. (Demaine, Lopez-Ortiz and Munro, "Adaptive
set intersections, unions, and differences".)
"""

from __future__ import annotations

from sparsetir.sparse_ir.annotations import GALLOP
from sparsetir.sparse_ir.nodes import Axis, SparseFunc
from sparsetir.sparse_ir.schedule.loops import SpIter, change_of, changed
from sparsetir.sparse_ir.schedule.primitives import primitive

RATIO = 16  # the least ratio for which a search is faster than single steps


@primitive
def gallop(func: SparseFunc, loop: SpIter, ratio: int = RATIO) -> tuple[SparseFunc, None]:
    """Search the longer of the intersected axes for the elements of the shorter one.

    Parameters
    ----------
    loop : SpIter
        A loop over an intersection of axes without padding.
    ratio : int
        An axis with at least this many times the elements of another one is searched: 1 for all
        that are longer, 0 for none, so that all advance element by element.
    """
    change = change_of("gallop", func, loop)
    node = change.chosen[0].node
    if not isinstance(node, Axis) or node.kind != "intersect":
        change.refuse(f"argument 'loop': expected one over an intersection, got '{loop.name}'")
    if ratio < 0:
        change.refuse(f"argument 'ratio': expected 0 or more, got {ratio}")
    notes = dict(change.it.annotations.items())
    notes[GALLOP] = {**notes.get(GALLOP, {}), loop.name: ratio}
    return change.put(changed(change.it, annotations=notes)), None
