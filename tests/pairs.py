"""Products of parameters in the few combinations that have every pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of numbers below `sizes`, so that any two places have every pair of theirs.

    Each one is the first of the product that has most pairs which none before it has.
    """
    places = list(itertools.combinations(range(len(sizes)), 2))
    product = list(itertools.product(*map(range, sizes)))
    if not places:
        return product
    pairs = {c: {(p, q, c[p], c[q]) for p, q in places} for c in product}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(product, key=lambda c: len(pairs[c] & left)))
        left -= pairs[chosen[-1]]
    return chosen


def by_default(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters; those that are not among `quick` are marked slow."""
    marks = {False: [pytest.mark.slow], True: []}
    return [pytest.param(value, marks=marks[value in quick]) for value in values]


def by_turns(values: Iterable[Any], every: int) -> list[Any]:
    """Parameters; all but each `every`-th one are marked slow. A tuple holds several values."""
    params = []
    for number, value in enumerate(values):
        if isinstance(value, tuple) and hasattr(value, "marks"):  # made by `pytest.param`
            param = pytest.param(*value.values, id=value.id)
        else:
            param = pytest.param(*(value if isinstance(value, tuple) else (value,)))
        params.append(param if number % every == 0 else param._replace(marks=[pytest.mark.slow]))
    return params


def in_pairs(**choices: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Arguments of `pytest.mark.parametrize`: the whole product; what no pair needs is slow."""
    names, values = list(choices), list(choices.values())
    default = set(covering([len(v) for v in values]))
    params = []
    for chosen in itertools.product(*(range(len(v)) for v in values)):
        these = [v[i] for v, i in zip(values, chosen, strict=True)]
        marks = [] if chosen in default else [pytest.mark.slow]
        params.append(pytest.param(*these, marks=marks, id="-".join(map(str, these))))
    return names, params
