"""The registry of recipes: functions by the names that programs and files use, and their facts.

A fact holds for all results of a recipe. It is stated once, where the recipe is registered; guards,
dependence analysis, primitives and kernels query it here (:func:`facts_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

RECIPES: dict[str, Callable[..., Any]] = {}


class RowsOf(NamedTuple):
    """Row numbers of the axis whose `indptr` a keyword gives.

    run : keyword for the number of rows from each one on, itself included
    """

    indptr: str
    run: str | None = None

    def most(self, keywords: Mapping[str, Any]) -> int:
        """An exclusive bound of the values, given the values of keywords."""
        return len(keywords[self.indptr]) - 1 - (keywords[self.run] - 1 if self.run else 0)


class NonzerosOf(NamedTuple):
    """Positions of nonzeros, of the axis whose `indptr` or `indices` a keyword gives.

    run : keyword for the number of nonzeros from each position on, itself included

    If there are no nonzeros, the values are zeros that nothing reads.
    """

    indptr: str | None = None
    indices: str | None = None
    run: str | None = None

    def most(self, keywords: Mapping[str, Any]) -> int:
        """An exclusive bound, see :meth:`RowsOf.most`."""
        nnz = keywords[self.indptr][-1] if self.indptr else len(keywords[self.indices or ""])
        return max(1, int(nnz) - (keywords[self.run] - 1 if self.run else 0))


class LengthOf(NamedTuple):
    """Coordinates of an axis whose length a keyword gives.

    run : keyword for the number of coordinates from each one on, itself included
    """

    length: str
    run: str | None = None

    def most(self, keywords: Mapping[str, Any]) -> int:
        """An exclusive bound, see :meth:`RowsOf.most`."""
        return keywords[self.length] - (keywords[self.run] - 1 if self.run else 0)


class Below(NamedTuple):
    """Numbers below the constant that a keyword gives."""

    bound: str

    def most(self, keywords: Mapping[str, Any]) -> int:
        """An exclusive bound, see :meth:`RowsOf.most`."""
        return keywords[self.bound]


class SameAs(NamedTuple):
    """Some of the values of the array that a keyword gives."""

    array: str

    def most(self, keywords: Mapping[str, Any]) -> None:
        """No bound beyond that of the array."""


class TilesOf(NamedTuple):
    """Offsets of tiles of at most as many rows as a keyword says.

    unless : keyword in whose presence that does not hold
    """

    size: str
    unless: str | None = None


class FoundIn(NamedTuple):
    """Values that a kernel can compute one by one, from the array that a keyword gives.

    by_search : the row of the array's offsets that holds position p; otherwise the array's p-th
        value. With a keyword "order", order[p] takes the place of p
    """

    array: str
    by_search: bool


@dataclass(frozen=True)
class Facts:
    """Facts about a recipe's results.

    open : a number that callers may choose (:func:`compute`)
    unknown : an open number that is valid for any arguments, for use where these are missing
    values : the set that contains all values, none negative; checked when they are computed
    distinct : no value occurs twice; or a keyword: none does if none does in the array that it
        gives
    multiples : of the constant that a keyword gives
    counted : 0, 1, ... under each parent
    tiles : offsets of tiles
    steps : the number of steps that cover a length; the keyword of the length of a step
    pieces : the first piece of each chunk of nonzeros; a row's first piece is its owner
    of_values : depends on values, made in every call: the keyword "values" indexed by "order"
    found_in : how kernels compute a value without the array
    finite : no value is NaN or infinite
    """

    open: bool = False
    unknown: int | None = None
    values: RowsOf | NonzerosOf | LengthOf | Below | SameAs | None = None
    distinct: bool | str = False
    multiples: str | None = None
    counted: bool = False
    tiles: TilesOf | None = None
    steps: str | None = None
    pieces: bool = False
    of_values: bool = False
    found_in: FoundIn | None = None
    finite: bool = False


NO_FACTS = Facts()
_FACTS: dict[str, Facts] = {}


def recipe(function: Callable[..., Any] | None = None, /, **facts: Any) -> Callable[..., Any]:
    """Decorator: register a function as a recipe, under its name, which exported kernels refer to.

    facts : fields of :class:`Facts`, which are trusted except for `values`

    A program or file that uses it needs the module that registers it to be imported.
    """
    if function is None:
        return lambda function: recipe(function, **facts)
    name = function.__name__
    if name in RECIPES:
        raise ValueError(f"recipe: argument 'function': there is a recipe '{name}' already")
    RECIPES[name], _FACTS[name] = function, Facts(**facts)
    return function


def facts_of(name: Any) -> Facts:
    """Facts about a recipe's results; none if it is not registered."""
    return _FACTS.get(str(name), NO_FACTS)
