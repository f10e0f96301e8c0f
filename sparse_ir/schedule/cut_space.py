"""Choose the space that a later cut of a loop divides (Senanayake's thesis, section 5.1).

A loop over a sparse axis visits stored elements: their positions are counted, their coordinates
stored. `split` and `divide` cut positions, so that tiles hold equally many elements, unless
`coord` has been applied; a dense axis is cut by coordinates, and `pos` makes its tiles parts of
its positions, so that other axes may depend on it. Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:

After `coord(j)`, with which `split(j, [None, 64])` makes ranges of 64 columns::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        T.sp_iter_attr({"cut": {"J": "coordinates"}})

The next cut consumes the choice.
"""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.annotations import CUT
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, SparseIteration
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SpIter,
    changed,
    iteration_of,
    loops_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive


@primitive
def pos(func: SparseFunc, loop: SpIter) -> tuple[SparseFunc, None]:
    """Let later cuts of a loop cut positions.

    Parameters
    ----------
    loop : SpIter
        The loop.
    """
    return _chosen("pos", func, loop, "positions")


@primitive
def coord(func: SparseFunc, loop: SpIter) -> tuple[SparseFunc, None]:
    """Let later cuts of a loop cut coordinates.

    Parameters
    ----------
    loop : SpIter
        A loop over one axis, whose coordinates are distinct under each parent.
    """
    return _chosen("coord", func, loop, "coordinates")


def _chosen(caller: str, func: SparseFunc, handle: SpIter, space: str) -> tuple[SparseFunc, None]:
    it = iteration_of(caller, func, handle)
    loop = loops_of(it)[place_of(caller, func, it, handle)]
    node = loop.node
    if space == "coordinates" and not isinstance(node, Axis):
        raise ScheduleError(
            f"{caller}: '{loop.name}' has positions alone; expected a loop over one axis, which is "
            f"neither fused nor attached nor in parts\n{show(it)}"
        )
    if space == "coordinates" and (node.kind == "sparse_fixed" or not node.unique):
        raise ScheduleError(
            f"{caller}: the coordinates of '{loop.name}' are in no order, so that no range of them "
            "lies together; expected a dense axis, or a sparse_variable one whose coordinates "
            f"differ\n{show(it)}"
        )
    choices = {**_choices(it), loop.name: space}
    annotations = {**dict(it.annotations.items()), CUT: choices}
    return replaced(caller, func, it, changed(it, annotations=annotations)), None


def space_of(it: SparseIteration, loop: Loop) -> str:
    """The space that a cut of the loop divides: "positions" or "coordinates"."""
    dense = isinstance(loop.node, Axis) and loop.node.kind == "dense_fixed"
    return _choices(it).get(loop.name, "coordinates" if dense else "positions")


def without_choice(it: SparseIteration, loop: Loop) -> dict[str, Any]:
    """The annotations of an iteration without the choice for a loop."""
    rest = {k: v for k, v in it.annotations.items() if str(k) != CUT}
    choices = {k: v for k, v in _choices(it).items() if k != loop.name}
    return {**rest, CUT: choices} if choices else rest


def _choices(it: SparseIteration) -> dict[str, str]:
    return {str(k): str(v) for k, v in dict(it.annotations.get(CUT, {})).items()}
