"""Run a loop on many workers (Senanayake's thesis, chapter 7).

Before::

    with T.sp_iter([K0, I, J, K1], "SSRS", "spmm") as [k0, i, j, k1]:

After `parallelize([k0, i], "cpu")`, where the two are one parallel loop in stage II::

    with T.sp_iter([K0, I, J, K1], "SSRS", "spmm") as [k0, i, j, k1]:
        T.sp_iter_attr({"parallel": [{"loops": ["K0", "I"], "unit": "cpu", "race": "none"}]})

A loop is free of races where each of its coordinates writes elements of its own, and reads of what
the iteration writes only those. What a tile that begins earlier computes again is the same again.
Rows that several visits add to are kept apart by race="temporary", see
:mod:`sparsetir.sparse_ir.schedule.temporary`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    flat_axes,
    visited_node,
)
from sparsetir.sparse_ir.races import FREE, private_buffers, races_of
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    around,
    changed,
    inside,
    iteration_of,
    loops_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.pieces import pieces_under
from sparsetir.sparse_ir.schedule.temporary import with_temporaries
from sparsetir.sparse_ir.tails import plain_accesses
from sparsetir.sparse_ir.workers import WORKERS, divided

__all__ = ["parallelize"]

WHO = "parallelize"
UNITS = ("cpu",)
RACES = ("none", "ignore", "temporary")
ELSEWHERE = {
    "block": "lower() and bind the loop to a thread axis there",
    "warp": "lower() and bind the loop to a thread axis there",
    "thread": "lower() and bind the loop to a thread axis there",
    "vector": "lower() and vectorize the loop there",
    "atomics": "a CPU has no atomic update of what several workers add to; legal are loops over "
    'rows that one worker owns, or race "temporary", where workers have copies that are summed, '
    "for loops that are cut by their positions",
}


def parallelize(
    func: SparseFunc, loop: SpIter | Sequence[SpIter], unit: str = "cpu", *, race: str = "none"
) -> tuple[SparseFunc, list[SparseIterationRef] | None]:
    """The function with a loop, or neighbouring loops as one, divided among workers.

    unit : "cpu", threads of a CPU
    race : "none", refused unless it is proven that there is none; "ignore", what several workers
        write is the same or of no account, which is the caller's word; "temporary", of a loop over
        chunks of fused rows and elements, alone or among loops free of races: chunks keep what they
        have of rows of others, which a loop on one worker adds afterwards

    Threads do not nest: no loop around these, and none inside, may be divided as well. What is
    divided stays as it is, so that loops are cut and moved before.

    For "temporary" the handles are those of the iterations that keep, that go over the chunks
    afterwards, and that add.
    """
    handles = [loop] if isinstance(loop, SpIter) else list(loop)
    if not handles:
        raise ScheduleError(f"{WHO}: argument 'loop': expected one or more loops, got none")
    it = iteration_of(WHO, func, handles[0])
    places = [place_of(WHO, func, it, handle) for handle in handles]
    _refuse_words(it, unit, race)
    if places != list(range(places[0], places[0] + len(places))):
        raise ScheduleError(
            f"{WHO}: argument 'loop': expected neighbours in the order of the iteration, got "
            f"{[h.name for h in handles]}; sparse_reorder can bring them together\n{show(it)}"
        )
    chosen = [loops_of(it)[p] for p in places]
    _refuse_dependent(it, chosen)
    _refuse_nested(func, it, chosen)
    if race == "none":
        _refuse_races(func, it, places)
    chunks = places[-1:]
    if race == "temporary":
        chunks = [p for p in places if _is_over_chunks(func, it, p)] or chunks
        _refuse_races(func, it, [p for p in places if p not in chunks])
    new = {"loops": [loop.name for loop in chosen], "unit": unit, "race": race}
    annotations = {**dict(it.annotations.items()), WORKERS: [new]}
    if race == "temporary":
        return with_temporaries(WHO, func, it, chunks[0], annotations)
    return replaced(WHO, func, it, changed(it, annotations=annotations)), None


def _refuse_words(it: SparseIteration, unit: str, race: str) -> None:
    for name, value, allowed in (("unit", unit, UNITS), ("race", race, RACES)):
        if value not in allowed:
            legal = " or ".join(f'"{word}"' for word in allowed)
            why = f": {ELSEWHERE[value]}" if value in ELSEWHERE else ""
            raise ScheduleError(
                f"{WHO}: argument '{name}': expected {legal}, got {value!r}{why}\n{show(it)}"
            )


def _refuse_dependent(it: SparseIteration, chosen: list[Loop]) -> None:
    """Refuse loops that are no box together."""
    above: set[str] = set()
    for loop in chosen:
        visited = visited_node(loop.node)
        first = loop.node.by if isinstance(loop.node, PartAxis) else flat_axes([visited])[0]
        parents = {a.name for a in first.ancestors()[:-1]}
        if isinstance(visited, AttachedAxis):
            parents.add(visited.to.name)
        if parents & above and (first.is_variable or isinstance(visited, AttachedAxis)):
            raise ScheduleError(
                f"{WHO}: argument 'loop': the extent of '{loop.name}' depends on "
                f"{sorted(parents & above)}, so that they are not one loop; legal is one of them, "
                f"or sparse_fuse before\n{show(it)}"
            )
        above |= set(loop.axes)


def _refuse_nested(func: SparseFunc, it: SparseIteration, chosen: list[Loop]) -> None:
    for other in [it, *around(func, it), *inside(it)]:
        for names in divided(other):
            where = "" if other is it else f" of '{other.name}'"
            raise ScheduleError(
                f"{WHO}: {names}{where} is divided among threads already, which do not nest; "
                "legal are neighbouring loops as one, such as parallelize([outer, inner])"
                f"\n{show(it)}"
            )


def _is_over_chunks(func: SparseFunc, it: SparseIteration, place: int) -> bool:
    node = loops_of(it)[place].node
    return isinstance(node, Axis) and pieces_under(func, it, node) is not None


def _refuse_races(func: SparseFunc, it: SparseIteration, places: list[int]) -> None:
    plain = plain_accesses(it, func)
    private = private_buffers(func).get(it.name, set())
    facts = races_of(plain, private)
    for place in places:
        if facts[place] == FREE:
            continue
        name = loops_of(it)[place].name
        also = ', and race="temporary" of this one' if _is_over_chunks(func, it, place) else ""
        raise ScheduleError(
            f"{WHO}: loop '{name}' is not proven free of races ({facts[place]}); legal are loops "
            'whose coordinates each write elements of their own, or race="ignore" where you know '
            f"that visits do not meet{also}\n{show(it)}"
        )
