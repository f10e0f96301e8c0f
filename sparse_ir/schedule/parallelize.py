"""Run a loop on many workers (Senanayake's thesis, chapter 7).

Before::

    with T.sp_iter([P, O, I], "SSS", "spmm") as [p, o, i]:

After `parallelize([p, o], "cpu")`, where the two are one parallel loop in stage II::

    with T.sp_iter([P, O, I], "SSS", "spmm") as [p, o, i]:
        T.sp_iter_attr({"parallel": [{"loops": ["P", "O"], "unit": "cpu", "race": "none"}]})

A loop is free of races where each of its coordinates writes elements of its own, and reads of what
the iteration writes only those. What a tile that begins earlier computes again is the same again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, SparseIteration
from sparsetir.sparse_ir.races import FREE, private_buffers, races_of
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    changed,
    iteration_of,
    loops_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.tails import plain_accesses

__all__ = ["parallelize"]

WHO = "parallelize"
UNITS = ("cpu", "block", "warp", "thread", "vector")
RACES = ("none", "ignore", "atomics", "temporary")


def parallelize(
    func: SparseFunc, loop: SpIter | Sequence[SpIter], unit: str = "cpu", *, race: str = "none"
) -> tuple[SparseFunc, None]:
    """The function with a loop, or neighbouring loops as one, divided among workers.

    unit : "cpu", threads of a CPU
    race : "none", refused unless it is proven that there is none; "ignore", what several workers
        write is the same or of no account, which is the caller's word
    """
    handles = [loop] if isinstance(loop, SpIter) else list(loop)
    if not handles:
        raise ScheduleError(f"{WHO}: argument 'loop': expected one or more loops, got none")
    it = iteration_of(WHO, func, handles[0])
    places = [place_of(WHO, it, handle) for handle in handles]
    _refuse_words(it, unit, race)
    if places != list(range(places[0], places[0] + len(places))):
        raise ScheduleError(
            f"{WHO}: argument 'loop': expected neighbours in the order of the iteration, got "
            f"{[h.name for h in handles]}; sparse_reorder can bring them together\n{show(it)}"
        )
    if race == "none":
        _refuse_races(func, it, places)
    old = [dict(p.items()) for p in it.annotations.get("parallel", [])]
    new = {"loops": [loops_of(it)[p].name for p in places], "unit": unit, "race": race}
    annotations = {**dict(it.annotations.items()), "parallel": [*old, new]}
    return replaced(WHO, func, it, changed(it, annotations=annotations)), None


def _refuse_words(it: SparseIteration, unit: str, race: str) -> None:
    for name, value, allowed in (("unit", unit, UNITS), ("race", race, RACES)):
        if value not in allowed:
            raise ScheduleError(
                f"{WHO}: argument '{name}': expected one of {', '.join(allowed)}, got {value!r}"
                f"\n{show(it)}"
            )


def _refuse_races(func: SparseFunc, it: SparseIteration, places: list[int]) -> None:
    plain = plain_accesses(it, func)
    private = private_buffers(func).get(it.name, set())
    facts = races_of(plain, private)
    for place in places:
        if facts[place] == FREE:
            continue
        name = loops_of(it)[place].name
        raise ScheduleError(
            f"{WHO}: loop '{name}' is not proven free of races ({facts[place]}); legal are loops "
            "whose coordinate is in each index of what is written\n"
            f"{show(it)}"
        )
