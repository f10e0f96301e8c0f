"""What an iteration visits for a term: an order of its indices, and an axis for each.

A sparse operand under a product bounds the loops of its indices: it drives them. Where several do,
their axes are intersected, or united where any of them may differ from zero; the others are read by
search. An index that no operand drives has all its coordinates visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sparsetir.expressions.assignments import Domain
from sparsetir.expressions.storage import Storage
from sparsetir.expressions.trees import Access


@dataclass(frozen=True)
class Drivers:
    """The accesses that bound an iteration.

    meet : "intersect" or "union"
    exact : whether they visit just where the term may differ from zero
    """

    accesses: tuple[Access, ...]
    meet: str
    exact: bool


def drivers(where: Domain, usable: Callable[[Access], bool]) -> Drivers:
    """What bounds an iteration over a domain.

    usable : whether all dimensions of an access are indices by themselves, which differ
    """
    if len(where) == 1:
        (required,) = where
        taken = tuple(sorted(required, key=lambda x: x.at))
        return Drivers(taken, "intersect", all(map(usable, taken)))
    single = [x for s in where if len(s) == 1 for x in s]
    same = len({x.plain for x in single}) == 1 and all(map(usable, single))
    if same and len(single) == len(where):
        return Drivers(tuple(single), "union", True)
    common = frozenset.intersection(*where)
    return Drivers(tuple(sorted(common, key=lambda x: x.at)), "intersect", False)


def levels_of(access: Access, form: Storage, order: Sequence[str] = ()) -> list[int]:
    """The dimensions of an access by its levels, from the root down.

    order : of the indices of an iteration, that a storage without an order follows
    """
    if form.order is not None:
        return list(form.order)
    place = {name: n for n, name in enumerate(order)}
    plain = access.plain
    return sorted(range(form.rank), key=lambda d: (place.get(plain[d] or "", len(place)), d))


def driven(access: Access, levels: Sequence[int]) -> list[str]:
    """The indices of the levels that can drive loops: those down to one that is no new index."""
    out: list[str] = []
    for d in levels:
        name = access.plain[d]
        if name is None or name in out:
            break
        out.append(name)
    return out


def visit_order(
    indices: Sequence[str],
    result: Sequence[str],
    parts: Iterable[tuple[Access, Storage]],
    dense: Sequence[Access],
    rows: str | None = None,
) -> list[str] | None:
    """An order of indices that visits each operand in the order of its levels.

    It begins with the result's, follows operands from level to level, and ends with those that no
    sparse operand has. None where the orders of the operands exclude each other.

    parts : the drivers
    dense : accesses that lie in memory row by row, the result's among them
    rows : an index to begin with
    """
    fixed: list[list[str]] = []
    together: list[list[str]] = []
    for access, form in parts:
        names = driven(access, levels_of(access, form)) if form.order else [
            n for n in dict.fromkeys(access.plain) if n
        ]  # fmt: skip
        together.append(names)
        if form.order:
            fixed.append(names)
    inner = {n: sum(x.plain[-1:] == (n,) for x in dense if len(x.plain) > 1) for n in indices}
    out: list[str] = []

    def preference(name: str) -> tuple[object, ...]:
        near = any(name in names and set(names) & {*out} for names in together)
        driven_ = any(name in names for names in together)
        at = result.index(name) if name in result else len(result)
        return (
            name != rows,
            not driven_,
            bool(out) and not near,
            0 if driven_ else inner[name],
            at,
            indices.index(name),
        )

    while len(out) < len(indices):
        ready = [
            n for n in indices if n not in out
            and not any(n in names and {*names[: names.index(n)]} - {*out} for names in fixed)
        ]  # fmt: skip
        if not ready:
            return None
        out.append(min(ready, key=preference))
    return out
