"""Let an iteration update its result atomically, on a GPU.

Before, and after `atomic(spmm)`::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        T.sp_iter_attr({"atomic": 1})
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

Visits then meet at the result in any way, so all loops may be divided among blocks and threads
(:mod:`sparsetir.sparse_ir.atomics`). `parallelize(.., race="atomics")` is that of single loops.
"""

from __future__ import annotations

from sparsetir.sparse_ir.annotations import ATOMIC
from sparsetir.sparse_ir.atomics import UPDATE, atomic_reduction
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef
from sparsetir.sparse_ir.schedule.loops import changed, find_iteration, name_of, replaced, show
from sparsetir.sparse_ir.schedule.primitives import primitive

__all__ = ["atomic"]

WHO = "atomic"


@primitive
def atomic(func: SparseFunc, iteration: SparseIterationRef) -> tuple[SparseFunc, None]:
    """Let an iteration update its result atomically, on a GPU, whatever visits it.

    Parameters
    ----------
    iteration : SparseIterationRef
        Of a body `X[..] = X[..] + term` (or max, min) of a type that has atomics, without an init;
        what is before it has set the result.
    """
    it = find_iteration(func, name_of(WHO, iteration), WHO)
    if atomic_reduction(it) is None:
        raise ScheduleError(f"{WHO}: expected {UPDATE}, got another body\n{show(it)}")
    marked = changed(it, annotations={**dict(it.annotations.items()), ATOMIC: 1})
    return replaced(WHO, func, it, marked), None
