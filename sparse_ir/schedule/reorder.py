"""Visit the axes of an iteration in another order, or as one loop (SparseTIR, section 3.2.2).

Before, with the order [K, I, J]::

    with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:

After `sparse_reorder`::

    with T.sp_iter([K, I, J], "RSS", "sddmm") as [k, i, j]:

After `sparse_fuse` of I and J instead, one loop over their joint positions, the nonzeros::

    with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import Axis, FusedAxis, SparseFunc, flat_axes
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    SparseIterationRef,
    SpIter,
    changed,
    find_iteration,
    handle_of,
    loops_of,
    name_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive


@primitive(reorders=True)
def sparse_reorder(
    func: SparseFunc, iteration: SparseIterationRef, order: Sequence[SpIter]
) -> tuple[SparseFunc, None]:
    """Visit an iteration's axes in another order; an axis stays after its parent.

    Parameters
    ----------
    iteration : SparseIterationRef
        The iteration.
    order : sequence of SpIter
        All of its loops, outermost first.

    Notes
    -----
    SparseTIR, section 3.2.2.
    """
    it = find_iteration(func, name_of("sparse_reorder", iteration), "sparse_reorder")
    loops = loops_of(it)
    places = [place_of("sparse_reorder", func, it, handle) for handle in order]
    if sorted(places) != list(range(len(loops))):
        have = [loop.name for loop in loops]
        got: list[Any] = [getattr(h, "name", h) for h in order]
        raise ScheduleError(f"sparse_reorder: expected each of {have} once, got {got}\n{show(it)}")
    return replaced("sparse_reorder", func, it, changed(it, [loops[p] for p in places])), None


@primitive
def sparse_fuse(
    func: SparseFunc, iteration: SparseIterationRef, axes: Sequence[SpIter]
) -> tuple[SparseFunc, SpIter]:
    """Iterate neighbouring axes as one loop over their joint positions.

    Parameters
    ----------
    iteration : SparseIterationRef
        The iteration.
    axes : sequence of SpIter
        Neighbouring loops, each over a dense_fixed axis or directly after its parent.

    Returns
    -------
    SpIter
        The fused loop.

    Notes
    -----
    SparseTIR, section 3.2.2.
    """
    it = find_iteration(func, name_of("sparse_fuse", iteration), "sparse_fuse")
    places = [place_of("sparse_fuse", func, it, handle) for handle in axes]
    if len(places) < 2:
        raise ScheduleError(
            f"sparse_fuse: expected at least two axes, got {len(places)}\n{show(it)}"
        )
    if places != list(range(places[0], places[0] + len(places))):
        got = [h.name for h in axes]
        raise ScheduleError(
            f"sparse_fuse: expected neighbours in the order of the iteration, got {got}; "
            f"sparse_reorder can bring them together\n{show(it)}"
        )
    loops = loops_of(it)
    chosen = [loops[p] for p in places]
    for loop in chosen:
        if not isinstance(loop.node, Axis | FusedAxis):
            what = "attached" if hasattr(loop.node, "to") else "visited in parts"
            raise ScheduleError(
                f"sparse_fuse: axis '{loop.name}' is {what} and cannot be fused\n{show(it)}"
            )
    node = FusedAxis(axes=[a for loop in chosen for a in flat_axes([loop.node])])
    fused = Loop(node, [v for c in chosen for v in c.vars], "".join(c.kinds for c in chosen))
    new = changed(it, [*loops[: places[0]], fused, *loops[places[-1] + 1 :]])
    return replaced("sparse_fuse", func, it, new), handle_of(it, fused)
