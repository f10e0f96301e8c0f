"""Visit the axes of an iteration in another order (SparseTIR, section 3.2.2).

Before, with the order [K, I, J]::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:

After::

    with T.sp_iter([K, I, J], "SSR", "spmm") as [k, i, j]:
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import (
    changed,
    find_iteration,
    loops_of,
    name_of,
    place_of,
    refuse_order,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.primitives import primitive

__all__ = ["sparse_reorder"]

WHO = "sparse_reorder"


@primitive
def sparse_reorder(
    func: SparseFunc, iteration: SparseIterationRef, order: Sequence[SpIter]
) -> tuple[SparseFunc, None]:
    """Visit an iteration's axes in another order; an axis stays behind its parent.

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
    it = find_iteration(func, name_of(WHO, iteration), WHO)
    refuse_order(WHO, func, it)
    loops = loops_of(it)
    places = [place_of(WHO, func, it, handle) for handle in order]
    if sorted(places) != list(range(len(loops))):
        have = [loop.name for loop in loops]
        got: list[Any] = [getattr(h, "name", h) for h in order]
        raise ScheduleError(f"{WHO}: expected each of {have} once, got {got}\n{show(it)}")
    return replaced(WHO, func, it, changed(it, [loops[p] for p in places])), None
