"""The registry of recipes: functions by the names that programs and files know them by, and facts.

A fact is what a recipe's results always are. It is said once, where the recipe is registered;
guards, dependence analysis, primitives and kernels ask for it here (:func:`facts_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

RECIPES: dict[str, Callable[..., Any]] = {}


class RowsOf(NamedTuple):
    """Numbers of rows, of the axis whose `indptr` a keyword gives."""

    indptr: str

    def most(self, keywords: Mapping[str, Any]) -> int:
        """A number below which all are, by the values of keywords."""
        return len(keywords[self.indptr]) - 1


class NonzerosOf(NamedTuple):
    """Positions of nonzeros, of the axis whose `indptr` or `indices` a keyword gives.

    run : keyword of how many nonzeros there are from each position on, itself included

    Where there are no nonzeros at all, zeros which nothing reads.
    """

    indptr: str | None = None
    indices: str | None = None
    run: str | None = None

    def most(self, keywords: Mapping[str, Any]) -> int:
        """A number below which all are, as :meth:`RowsOf.most`."""
        nnz = keywords[self.indptr][-1] if self.indptr else len(keywords[self.indices or ""])
        return max(1, int(nnz) - (keywords[self.run] - 1 if self.run else 0))


class LengthOf(NamedTuple):
    """Coordinates of an axis, whose length a keyword gives."""

    length: str

    def most(self, keywords: Mapping[str, Any]) -> int:
        """A number below which all are, as :meth:`RowsOf.most`."""
        return keywords[self.length]


class Below(NamedTuple):
    """Numbers below the constant that a keyword gives."""

    bound: str

    def most(self, keywords: Mapping[str, Any]) -> int:
        """A number below which all are, as :meth:`RowsOf.most`."""
        return keywords[self.bound]


class SameAs(NamedTuple):
    """Some of the values of the array that a keyword gives."""

    array: str

    def most(self, keywords: Mapping[str, Any]) -> None:
        """No number: they are as far known as the array is."""


class TilesOf(NamedTuple):
    """Offsets of tiles, which hold as many rows at most as a keyword says.

    unless : keyword with which tiles are others
    """

    size: str
    unless: str | None = None


class FoundIn(NamedTuple):
    """Values that a kernel can find one by one, in the array that a keyword gives.

    by_search : the row that holds position p of the array's offsets; otherwise the array's p-th
        value. With a keyword "order" it is order[p] instead of p
    """

    array: str
    by_search: bool


@dataclass(frozen=True)
class Facts:
    """Facts about a recipe's results.

    open : a number that whoever makes a plan may choose otherwise (:func:`compute`)
    unknown : an open number that is right for any arguments, where none are there to compute it of
    values : which numbers they are, none of them negative; checked when they are made
    distinct : no value occurs twice; the name of a keyword: if none does in the array that it gives
    counted : 0, 1, .. under each parent
    tiles : offsets of tiles
    steps : how many steps there are through something; the keyword of how long each is
    pieces : the first piece of each chunk of nonzeros; a row's first piece is its owner
    of_values : made of values, in every call: the keyword "values" at those of "order"
    found_in : how kernels find one of them without the array
    finite : none is NaN or infinite
    """

    open: bool = False
    unknown: int | None = None
    values: RowsOf | NonzerosOf | LengthOf | Below | SameAs | None = None
    distinct: bool | str = False
    counted: bool = False
    tiles: TilesOf | None = None
    steps: str | None = None
    pieces: bool = False
    of_values: bool = False
    found_in: FoundIn | None = None
    finite: bool = False


_FACTS: dict[str, Facts] = {}


def recipe(function: Callable[..., Any] | None = None, /, **facts: Any) -> Callable[..., Any]:
    """Decorator: the function is a recipe, by its own name, which exported kernels know it by.

    facts : fields of :class:`Facts`, which are trusted but for `values`

    A program or file that takes it can be used where the module that registers it is imported.
    """
    if function is None:
        return lambda function: recipe(function, **facts)
    name = function.__name__
    if name in RECIPES:
        raise ValueError(f"recipe: argument 'function': there is a recipe '{name}' already")
    RECIPES[name], _FACTS[name] = function, Facts(**facts)
    return function


def facts_of(name: Any) -> Facts:
    """Facts about a recipe's results: none of one that is not registered."""
    return _FACTS.get(str(name), Facts())
