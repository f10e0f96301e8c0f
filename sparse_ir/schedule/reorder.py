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

from sparsetir.sparse_ir.nodes import Axis, FusedAxis, SparseFunc, flat_axes
from sparsetir.sparse_ir.schedule.loops import Loop, SparseIterationRef, SpIter, change_in, changed
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
    change = change_in("sparse_reorder", func, iteration, *order)
    if sorted(change.places) != list(range(len(change.loops))):
        have, got = ([loop.name for loop in loops] for loops in (change.loops, change.chosen))
        change.refuse(f"expected each of {have} once, got {got}")
    return change.put(changed(change.it, change.chosen)), None


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
    change = change_in("sparse_fuse", func, iteration, *axes)
    chosen = change.chosen
    if len(chosen) < 2:
        change.refuse(f"expected at least two axes, got {len(chosen)}")
    change.check_neighbours()
    for loop in chosen:
        if not isinstance(loop.node, Axis | FusedAxis):
            what = "attached" if hasattr(loop.node, "to") else "visited in parts"
            change.refuse(f"axis '{loop.name}' is {what} and cannot be fused")
    node = FusedAxis(axes=[a for loop in chosen for a in flat_axes([loop.node])])
    fused = Loop(node, [v for c in chosen for v in c.vars], "".join(c.kinds for c in chosen))
    return change.put(changed(change.it, change.with_loops(fused))), change.handles(fused)[0]
