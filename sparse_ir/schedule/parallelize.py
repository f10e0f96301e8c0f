"""Run a loop on many workers (Senanayake's thesis, chapter 7).

Before::

    with T.sp_iter([P, O, I], "SSS", "spmm") as [p, o, i]:

After `parallelize([p, o], "cpu")`, where the two are one parallel loop in stage II::

    with T.sp_iter([P, O, I], "SSS", "spmm") as [p, o, i]:
        T.sp_iter_attr({"parallel": [{"loops": ["P", "O"], "unit": "cpu", "race": "none"}]})

A loop is free of races where each of its coordinates writes elements of its own, and reads of what
the iteration writes only those. What a tile that begins earlier computes again is the same again.
Rows that several visits add to are kept apart by race="temporary", see
:mod:`sparsetir.sparse_ir.schedule.temporary`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, SparseIteration
from sparsetir.sparse_ir.races import FREE, private_buffers, races_of
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.loops import (
    changed,
    iteration_of,
    loops_of,
    place_of,
    replaced,
    show,
)
from sparsetir.sparse_ir.schedule.pieces import pieces_under
from sparsetir.sparse_ir.schedule.temporary import with_temporaries
from sparsetir.sparse_ir.tails import as_if_unshifted

__all__ = ["parallelize"]

WHO = "parallelize"
UNITS = ("cpu", "block", "warp", "thread", "vector")
RACES = ("none", "ignore", "atomics", "temporary")


def parallelize(
    func: SparseFunc, loop: SpIter | Sequence[SpIter], unit: str = "cpu", *, race: str = "none"
) -> tuple[SparseFunc, list[SparseIterationRef] | None]:
    """The function with a loop, or neighbouring loops as one, divided among workers.

    unit : "cpu", threads of a CPU
    race : "none", refused unless it is proven that there is none; "ignore", what several workers
        write is the same or of no account, which is the caller's word; "temporary", of a loop over
        chunks of fused rows and elements, alone or among loops free of races: chunks keep what they
        have of rows of others, which a loop on one worker adds afterwards

    For "temporary" the handles are those of the iterations that keep, that go over the chunks
    afterwards, and that add.
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
    chunks = places[-1:]
    if race == "temporary":
        chunks = [p for p in places if _is_over_chunks(func, it, p)] or chunks
        _refuse_races(func, it, [p for p in places if p not in chunks])
    old = [dict(p.items()) for p in it.annotations.get("parallel", [])]
    new = {"loops": [loops_of(it)[p].name for p in places], "unit": unit, "race": race}
    annotations = {**dict(it.annotations.items()), "parallel": [*old, new]}
    if race == "temporary":
        return with_temporaries(WHO, func, it, chunks[0], annotations)
    return replaced(WHO, func, it, changed(it, annotations=annotations)), None


def _refuse_words(it: SparseIteration, unit: str, race: str) -> None:
    for name, value, allowed in (("unit", unit, UNITS), ("race", race, RACES)):
        if value not in allowed:
            raise ScheduleError(
                f"{WHO}: argument '{name}': expected one of {', '.join(allowed)}, got {value!r}"
                f"\n{show(it)}"
            )
    if race == "atomics":
        raise ScheduleError(
            f"{WHO}: argument 'race': \"atomics\" is legal on no unit so far; on a CPU "
            '"temporary" serves, or rows owned by one worker (divide(i, .., by="work"))'
            f"\n{show(it)}"
        )
    if race == "temporary" and unit != "cpu":
        raise ScheduleError(
            f'{WHO}: argument \'unit\': race="temporary" expects "cpu", got {unit!r}; on a GPU '
            f'rows owned by one block are legal (divide(i, .., by="work"))\n{show(it)}'
        )


def _is_over_chunks(func: SparseFunc, it: SparseIteration, place: int) -> bool:
    node = loops_of(it)[place].node
    return isinstance(node, Axis) and pieces_under(func, it, node) is not None


def _refuse_races(func: SparseFunc, it: SparseIteration, places: list[int]) -> None:
    plain = as_if_unshifted(it)
    private = private_buffers(func).get(it.name, set())
    facts = races_of(plain, private)
    for place in places:
        if facts[place] == FREE:
            continue
        name = loops_of(it)[place].name
        also = ', and race="temporary" of this one' if _is_over_chunks(func, it, place) else ""
        raise ScheduleError(
            f"{WHO}: loop '{name}' is not proven free of races ({facts[place]}); legal are loops "
            f"whose coordinate is in each index of what is written{also}\n"
            f"{show(it)}"
        )
