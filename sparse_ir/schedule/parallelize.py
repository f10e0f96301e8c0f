"""Run a loop on many workers (Senanayake's thesis, chapter 7; Sgap, section 5).

Before::

    with T.sp_iter([K0, I, J, K1], "SSRS", "spmm") as [k0, i, j, k1]:

After `parallelize([k0, i], "cpu")`, where the two are one parallel loop in stage II::

    with T.sp_iter([K0, I, J, K1], "SSRS", "spmm") as [k0, i, j, k1]:
        T.sp_iter_attr({"parallel": [{"loops": ["K0", "I"], "unit": "cpu", "race": "none"}]})

On a GPU a loop is over "block", thread blocks; "thread", the threads of a block; or "warp", groups
of 32 threads, which loops over threads inside it form. The innermost loop over threads is
`threadIdx.x`, the one around it `threadIdx.y`; likewise for blocks. With `per_block` one loop is
both: over blocks, with that many of its visits in each. Loops over "vector" become vectors.

A loop is free of races if each of its coordinates writes its own elements, and of the elements
written reads only those. A tile that begins earlier recomputes equal values. If visits update the
same elements, `race` selects how: see
:mod:`sparsetir.sparse_ir.schedule.gpu_races` for GPUs, and
:mod:`sparsetir.sparse_ir.schedule.temporary` for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetir.sparse_ir.annotations import GPU_UNITS, THREAD_UNITS, WORKERS
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.legal import parallelizable, races
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    flat_axes,
    iterations_around,
    visited_node,
)
from sparsetir.sparse_ir.parallel import is_one_visit
from sparsetir.sparse_ir.schedule import gpu_races
from sparsetir.sparse_ir.schedule.block_starts import with_block_starts
from sparsetir.sparse_ir.schedule.loops import (
    Change,
    SparseIterationRef,
    SpIter,
    change_of,
    changed,
    find_iteration,
    inside,
    replaced,
)
from sparsetir.sparse_ir.schedule.pieces import pieces_under
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.temporary import with_temporaries
from sparsetir.sparse_ir.workers import MAX_THREADS, entries_of, units_of

NAME = "parallelize"
UNITS = ("cpu", *GPU_UNITS, "vector")
RACES = ("none", "ignore", "temporary", "atomics", "group(r)", "segment(r)")
NO_ATOMICS = (
    "a CPU has no atomic update of what several workers add to; legal are loops over rows that one "
    'worker owns, or race "temporary", where workers have copies that are summed, for loops that '
    "are cut by their positions"
)


@primitive
def parallelize(
    func: SparseFunc,
    loop: SpIter | Sequence[SpIter],
    unit: str = "cpu",
    *,
    race: str = "none",
    per_block: int | None = None,
) -> tuple[SparseFunc, list[SparseIterationRef] | None]:
    """Divide a loop, or neighbouring ones as one, among workers; the last step applied to it.

    Parameters
    ----------
    loop : SpIter or sequence of SpIter
        The loop, or neighbouring ones, outermost first.
    unit : {"cpu", "block", "warp", "thread", "vector"}
        "cpu", threads of a CPU; "block", "warp" or "thread" of a GPU; "vector", lanes.
    race : str
        "none", refused unless there is provably no race; "ignore", the caller guarantees that
        several workers write equal values, or values that do not matter. "temporary": in a loop
        over chunks of fused rows and elements, alone or among loops free of races, chunks keep
        their sums for rows of other chunks, which one worker adds afterwards, in an order that does
        not depend on the workers; in another loop over threads of a GPU, these reduce their terms
        and one of them writes; their number is a power of two, above 32 that of all threads of the
        block. On a GPU also "atomics", visits update atomically; "group(r)", every r threads reduce
        their terms, and one writes; "segment(r)", the first one of each run of threads with the
        same row writes.
    per_block : int, optional
        For a GPU loop over "warp" or "thread", how many of its visits a thread block has; the loop
        is over blocks, too. None: the loop has a constant extent, within a block.

    Returns
    -------
    list of SparseIterationRef or None
        The iterations that write, for "atomics", "group(r)" and "segment(r)".

    Notes
    -----
    Threads of a CPU do not nest: no loop around these, and none inside, may be divided as well.
    A divided loop can no longer change, so loops are cut and moved first.

    For "temporary" over chunks the handles are those of the iterations that keep sums, that loop
    over the chunks afterwards, and that add; for GPU races those of the iterations that write.
    """
    handles = [loop] if isinstance(loop, SpIter) else list(loop)
    if not handles:
        raise ScheduleError(f"{NAME}: argument 'loop': expected one or more loops, got none")
    change = change_of(NAME, func, *handles)
    it, chosen, places = change.it, change.chosen, change.places
    kind, lanes = _race(change, unit, race)
    change.check_neighbours("argument 'loop': ")
    _refuse_dependent(change)
    _refuse_nested(change, unit)
    if unit in (*THREAD_UNITS, "vector"):
        _refuse_extent(change, unit, per_block)
    elif per_block is not None:
        change.refuse(
            f"argument 'per_block': expected None for unit \"{unit}\", whose visits are no "
            f"threads, got {per_block!r}"
        )
    new: dict[str, Any] = {"loops": [x.name for x in chosen], "unit": unit, "race": race}
    if per_block is not None:
        new["per_block"] = per_block
    if kind == "none":
        _refuse_races(change, places, unit)
    chunks = [p for p in places if pieces_under(func, it, change.loops[p].node)]
    if kind == "temporary" and (chunks or unit == "cpu"):
        chunks = chunks or places[-1:]
        _refuse_races(change, [p for p in places if p not in chunks], unit)
        return with_temporaries(NAME, func, it, chunks[0], _with_entry(it, new))
    if per_block is not None and (lanes or kind == "temporary"):
        change.refuse(
            f"argument 'per_block': expected None for race {race!r}, whose threads are all of one "
            f"block, got {per_block!r}"
        )
    refs = None
    if kind in ("atomics", "temporary", "group", "segment"):
        func, refs = gpu_races.with_race_strategy(NAME, func, it, places, kind, lanes)
        it = find_iteration(func, it.name)
    if unit == "block" or per_block is not None:
        func = with_block_starts(NAME, func, it, chosen, per_block or 1)
        it = find_iteration(func, it.name)
    return replaced(NAME, func, it, changed(it, annotations=_with_entry(it, new))), refs


def _with_entry(it: SparseIteration, new: dict[str, Any]) -> dict[str, Any]:
    """The annotations of an iteration with one more entry."""
    entries = list(it.annotations.get(WORKERS, []))
    return {**dict(it.annotations.items()), WORKERS: [*entries, new]}


def _race(change: Change, unit: str, race: str) -> tuple[str, int]:
    """The race strategy, and the lanes of a group."""
    if unit not in UNITS:
        legal = " or ".join(f'"{word}"' for word in UNITS)
        change.refuse(f"argument 'unit': expected {legal}, got {unit!r}")
    kind, lanes = gpu_races.parsed(race)
    allowed = ["none", "ignore"]
    if unit == "cpu":
        allowed += ["temporary"]
    elif unit in GPU_UNITS:
        allowed += [
            "atomics",
            *(["temporary", "group(r)", "segment(r)"] if unit == "thread" else []),
        ]
    if (f"{kind}(r)" if lanes else kind) not in allowed:
        legal = " or ".join(f'"{word}"' for word in allowed)
        why = f": {NO_ATOMICS}" if (unit, kind) == ("cpu", "atomics") else ""
        if any("(r)" in word for word in allowed):
            why = ", r a power of two up to 32"
        change.refuse(f"argument 'race': expected {legal} for unit \"{unit}\", got {race!r}{why}")
    return kind, lanes


def _refuse_dependent(change: Change) -> None:
    """Refuse loops whose visits are ordered, and loops whose extents depend on one another."""
    above: set[str] = set()
    for loop in change.chosen:
        merged = [a for a in flat_axes([loop.node]) if a.is_merged]
        if merged:
            change.refuse(
                f"argument 'loop': '{loop.name}' is the {merged[0].kind} of "
                f"{[a.name for a in merged[0].of]}, whose visits follow each other; legal are the "
                "loops around it, or inside of it"
            )
        visited = visited_node(loop.node)
        first = loop.node.by if isinstance(loop.node, PartAxis) else flat_axes([visited])[0]
        parents = {a.name for a in first.ancestors()[:-1]}
        if isinstance(visited, AttachedAxis):
            parents.add(visited.to.name)
        if parents & above and (first.is_variable or isinstance(visited, AttachedAxis)):
            change.refuse(
                f"argument 'loop': the extent of '{loop.name}' depends on "
                f"{sorted(parents & above)}, so that they are not one loop; legal is one of them, "
                "or sparse_fuse before"
            )
        above |= {a.name for a in flat_axes([loop.node]) if not is_one_visit(a)}


def _refuse_nested(change: Change, unit: str) -> None:
    """Refuse loops divided already, CPU threads in CPU threads, and blocks in threads."""
    it, chosen = change.it, {x.name for x in change.chosen}
    for other in [it, *iterations_around(change.func, it), *inside(it)]:
        where = "" if other is it else f" of '{other.name}'"
        before = [x.name for x in change.loops[: change.places[0]]] if other is it else []
        outside = other is not it and it.name in {n.name for n in inside(other)}
        for names, what, *_ in entries_of(other):
            own = other is it and chosen & set(names)
            if own or "cpu" in (unit, what) and "vector" not in (unit, what):
                change.refuse(
                    f"{names}{where} is divided among threads already, which do not nest; legal "
                    "are neighbouring loops as one, such as parallelize([outer, inner])"
                )
            is_outer = outside or set(names) <= set(before)
            wrong = (unit, what) if is_outer else (what, unit)  # (inner, outer)
            if wrong[0] == "block" and wrong[1] in THREAD_UNITS or wrong[1] == "vector":
                change.refuse(
                    f'a loop over "{wrong[0]}" cannot lie in one over "{wrong[1]}", as of '
                    f"{names}{where} and this; sparse_reorder can change their order"
                )


def _refuse_extent(change: Change, unit: str, per_block: int | None) -> None:
    """Refuse loops that are longer than a block, or whose extent is not constant."""
    if per_block is not None:
        fits = isinstance(per_block, int) and not isinstance(per_block, bool)
        if unit == "vector" or not fits or not 0 < per_block <= MAX_THREADS:
            change.refuse(
                f"argument 'per_block': expected None or 1 to {MAX_THREADS} visits of a loop over "
                f'"warp" or "thread", got {per_block!r} for "{unit}"'
            )
        return
    for loop in change.chosen:
        if not loop.is_constant or len(change.chosen) > 1:
            instead = "" if unit == "vector" else ", or per_block=n"
            change.refuse(
                "argument 'loop': expected one loop over a dense axis of constant extent for unit "
                f'"{unit}", as split makes, or steps of what rows store{instead}, got '
                f"{[x.name for x in change.chosen]}"
            )
        if int(loop.node.length) > MAX_THREADS and unit in THREAD_UNITS:
            change.refuse(
                f"argument 'loop': expected at most {MAX_THREADS} visits, as a block has threads, "
                f"got {int(loop.node.length)} of '{loop.name}'; split it"
            )


def _refuse_races(change: Change, places: list[int], unit: str) -> None:
    func, it = change.func, change.it
    facts = parallelizable(func, it)
    for place in places:
        if not races(it, facts[place], unit):
            continue
        loop = change.loops[place]
        gpu = unit in GPU_UNITS or bool(units_of(it) & set(GPU_UNITS))
        over_chunks = pieces_under(func, it, loop.node) is not None
        also = ', and race="temporary" of this one' if over_chunks else ""
        if gpu:
            of_threads = ' or "segment(r)" of a sum, and "group(r)" of threads of one row'
            also = f', race="atomics"{of_threads}'
            if unit != "thread":
                also = ', and race="atomics" of a sum'
        change.refuse(
            f"loop '{loop.name}' is not proven free of races ({facts[place]}); legal are loops "
            'whose coordinates each write elements of their own, or race="ignore" where you know '
            f"that no two visits write the same element{also}"
        )
