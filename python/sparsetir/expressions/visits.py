"""The iteration of a term: an order of its indices, and an axis for each.

A sparse operand in a product bounds the loops of its indices: it drives them. If several do, their
axes are intersected, and those of arguments of a function such as `maximum` are united; other
operands are read by search. For an index that no operand drives all coordinates are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sparsetir.expressions.assignments import Domain, least
from sparsetir.expressions.storage import Storage
from sparsetir.expressions.trees import Access


@dataclass(frozen=True)
class Drivers:
    """The accesses that bound an iteration.

    where : sets of accesses; it visits where all of any set store an element
    exact : whether that is exactly where the term may be nonzero
    """

    where: Domain
    exact: bool

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All accesses, in the order of the text."""
        return tuple(
            sorted(frozenset[Access]().union(*self.where), key=lambda x: (x.at, x.name, str(x)))
        )

    def without(self, gone: Iterable[Access]) -> Drivers:
        """The drivers without some accesses, so that more is visited."""
        where = least(s.difference(gone) for s in self.where)
        return Drivers(where, self.exact and where == self.where)


def drivers(where: Domain, usable: Callable[[Access], bool]) -> Drivers:
    """The accesses that bound an iteration over a domain.

    usable : whether the dimensions of an access are distinct single indices
    """
    usable_all = all(usable(x) for s in where for x in s)
    if not usable_all and len(where) > 1:
        return Drivers((frozenset.intersection(*where),), False)
    # At an index that only some have, one set's elements are visited where another's are.
    common = frozenset.intersection(*where)
    same = len({frozenset(x.plain) for s in where for x in s - common}) <= 1
    return Drivers(where, usable_all and (same or len(where) == 1))


def levels_of(access: Access, form: Storage, order: Sequence[str] = ()) -> list[int]:
    """The dimensions of an access by its levels, from the root down.

    order : order of an iteration's indices, which a storage without an order follows
    """
    if form.order is not None:
        return list(form.order)
    place = {name: n for n, name in enumerate(order)}
    plain = access.plain
    return sorted(range(form.rank), key=lambda d: (place.get(plain[d] or "", len(place)), d))


def driven(access: Access, levels: Sequence[int]) -> list[str]:
    """The indices of the levels that can drive loops: down to the first that is not a new index."""
    out: list[str] = []
    for d in levels:
        name = access.plain[d]
        if name is None or name in out:
            break
        out.append(name)
    return out


def stored_order(
    indices: Sequence[str], parts: Iterable[tuple[Access, Storage]]
) -> list[str] | None:
    """The order of indices in which changing values are stored, if nothing else is visited.

    Permuting them takes longer than adding each to its place in the result; with features it pays.
    None for other iterations.
    """
    orders = {x.plain for x, form in parts if form.order is None and form.changing}
    if len(orders) != 1 or any(form.order or not form.changing for _, form in parts):
        return None
    order = [n for n in next(iter(orders)) if n]
    return order if sorted(order) == sorted(indices) else None


def visit_order(
    indices: Sequence[str],
    result: Sequence[str],
    parts: Iterable[tuple[Access, Storage]],
    dense: Sequence[Access],
    rows: str | None = None,
) -> list[str] | None:
    """An order of indices in which each operand is visited in the order of its levels.

    It begins with the result's, follows operands from level to level, and ends with those that no
    sparse operand has. None if the orders of the operands conflict.

    parts : the drivers
    dense : accesses in row-major order, including the result's
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
