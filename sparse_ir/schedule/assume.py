"""Say what the program does not: facts about arrays that remove guards.

Before, where `etype` may hold anything, so that stage II asks each time::

    H[i, f] = H[i, f] + if_then_else(0 <= ETYPE[e] and ETYPE[e] < r, W[ETYPE[e], f], 0)

After `assume("coordinates", buffer="ETYPE", axis="R")`, and in stage II::

    T.func_attr({"assumed": [{"fact": "coordinates", "buffer": "ETYPE", "axis": "R"}]})

    H[i, f] = H[i, f] + W[ETYPE[e], f]

A wrong assumption makes kernels read and write what is not theirs. "filled" is checked by kernels
with the structure; "coordinates" and "inside" are the caller's word. What follows from the
structure, or from the recipe of a computed parameter, is known without saying it.
"""

from __future__ import annotations

from sparsetir.sparse_ir.assumptions import FACTS, with_fact
from sparsetir.sparse_ir.errors import IllFormedError, ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.verify import verify

__all__ = ["assume"]

WHO = "assume"


@primitive
def assume(
    func: SparseFunc, fact: str, *, axis: str, buffer: str | None = None
) -> tuple[SparseFunc, None]:
    """Say what the program does not: the word of whoever schedules it.

    Parameters
    ----------
    fact : {"coordinates", "filled"}
        "coordinates", the values of `buffer` are coordinates of `axis`; "filled", no slot of the
        sparse_fixed `axis` is padding; "inside", `buffer` is accessed at coordinates of its `axis`
        alone.
    axis : str
        Name of the axis.
    buffer : str, optional
        Name of the buffer.
    """
    if fact not in FACTS:
        raise ScheduleError(
            f"{WHO}: argument 'fact': expected one of {', '.join(FACTS)}, got {fact!r}"
        )
    if (buffer is not None) != ("buffer" in FACTS[fact]):
        wanted = "a name" if "buffer" in FACTS[fact] else "None"
        raise ScheduleError(
            f"{WHO}: argument 'buffer': expected {wanted} for {fact!r}, got {buffer!r}"
        )
    about = {"axis": axis} if buffer is None else {"buffer": buffer, "axis": axis}
    out = with_fact(func, fact, **about)
    try:
        verify(out)
    except IllFormedError as error:
        raise ScheduleError(f"{WHO}: {error}") from None
    return out, None
