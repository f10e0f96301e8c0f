"""Reductions, each defined by one record. The module imports no package, as `sparsetir --help`
needs the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

Function = Callable[..., Any]


@dataclass(frozen=True)
class Combine:
    """An associative operator that combines two values.

    symbol : "+" or "*"; for an extremum, the comparison by which a term replaces the current value
    ufunc : NumPy's name of the operator
    identity : the neutral value; for integers, the least or greatest replaces an infinity
    atomic : types that a GPU combines atomically; in 16 bits each addition would be rounded
    """

    symbol: str
    ufunc: str
    identity: float
    atomic: tuple[str, ...] = ()

    @property
    def is_extremum(self) -> bool:
        """Whether the result is one of the combined values."""
        return self.symbol in "<>"


# By the names of reductions in iterations.
COMBINES = {
    "sum": Combine("+", "add", 0, ("float32", "float64", "int32")),
    "product": Combine("*", "multiply", 1),
    "max": Combine(">", "maximum", float("-inf"), ("float32", "int32")),
    "min": Combine("<", "minimum", float("inf"), ("float32", "int32")),
}


class Semiring(NamedTuple):
    """Operations of a product: `combine`, one of COMBINES, of terms made by "*", "+" or "and"."""

    combine: str
    times: str


SEMIRINGS = {
    "plus_times": Semiring("sum", "*"), "min_plus": Semiring("min", "+"),
    "max_plus": Semiring("max", "+"), "max_times": Semiring("max", "*"),
    "or_and": Semiring("max", "and"),
}  # fmt: skip


def check_semiring(caller: str, semiring: object) -> None:
    """Raise ValueError unless `semiring` is one of SEMIRINGS."""
    if not isinstance(semiring, str) or semiring not in SEMIRINGS:
        raise ValueError(
            f"{caller}: argument 'semiring': expected one of {[*SEMIRINGS]}, got {semiring!r}"
        )


@dataclass(frozen=True)
class Steps:
    """Steps of a reduction that takes several passes of a row.

    each, finish : the functions applied to each term, and to their combination
    gradient : of the result for each term, a function of the term and the result, which is 0 where
        it is -inf
    shift : the reduction whose result, if it is finite, is first subtracted from each term, and
        added back at last; "" for none

    The first argument of functions is a module, which has exp and so on: NumPy, torch, or
    tvm.script.tirx in kernels.
    """

    each: Function
    finish: Function
    gradient: Function
    shift: str = ""


@dataclass(frozen=True)
class Reducer:
    """A reduction of the terms of each row; rows without terms give zero.

    combine : one of COMBINES
    aliases : names of PyG and torch
    row : recipe of a number per row that kernels read: the initial value of an extremum, or else
        the factor of each term; None without one
    steps : those of a reduction that takes several passes of a row
    """

    combine: str
    aliases: tuple[str, ...] = ()
    row: str | None = None
    steps: Steps | None = None

    @property
    def is_extremum(self) -> bool:
        """Whether the gradient of a row goes to a single term."""
        return COMBINES[self.combine].is_extremum

    @property
    def is_scaled(self) -> bool:
        """Whether each term is multiplied by a number of its row."""
        return self.row is not None and not self.is_extremum

    @property
    def is_linear(self) -> bool:
        """Whether the result is a linear function of the terms."""
        return self.combine == "sum" and self.steps is None


REDUCERS = {
    "sum": Reducer("sum", ("add",)),
    "mean": Reducer("sum", row="inverse_counts"),
    "max": Reducer("max", ("amax",), row="least_of_rows"),
    "min": Reducer("min", ("amin",), row="greatest_of_rows"),
    "logsumexp": Reducer("sum", steps=Steps(
        lambda of, x: of.exp(x), lambda of, x: of.log(x), lambda of, x, y: of.exp(x - y), "max"
    )),
}  # fmt: skip
EXTREMA = tuple(name for name, r in REDUCERS.items() if r.is_extremum)
LINEAR = tuple(name for name, r in REDUCERS.items() if r.is_linear)
# The reduction that each name stands for.
REDUCTION_NAMES = {alias: name for name, r in REDUCERS.items() for alias in (name, *r.aliases)}


def names_of(reductions: Iterable[str]) -> tuple[str, ...]:
    """All names of some reductions."""
    return tuple(alias for alias, name in REDUCTION_NAMES.items() if name in reductions)


LINEAR_NAMES = names_of(LINEAR)
