"""Sums of multiples of coordinates: which values they take, and whether each of them once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.sym import detect_linear_equation


def linear_sum(index: Any, coords: Sequence[Any]) -> dict[Any, int] | None:
    """The coefficients of the coordinates in a sum of nothing else."""
    *weights, rest = [*detect_linear_equation(index, list(coords))] or [None]
    numbers = [int(c) for c in weights if isinstance(c, tirx.IntImm)]
    zero = isinstance(rest, tirx.IntImm) and not int(rest)
    if not zero or len(numbers) < len(coords):
        return None
    return {v: c for v, c in zip(coords, numbers, strict=True) if c}


def takes_all(
    weights: Mapping[Any, int], extents: Mapping[Any, Any], length: Any, analyzer: Any,
    limits: Sequence[Any] = (),
) -> bool:  # fmt: skip
    """Whether a sum of coordinates takes all values from 0 up to a length.

    `i0 * 64 + i1 * 16 + i2` of 1, 4 and 16 positions takes each below 64.

    limits : (weights of a smaller sum, what that is less than)
    """
    reach: Any = 1  # all values below it are taken
    seen: dict[Any, int] = {}
    met = 0
    for v in sorted(weights, key=lambda v: (weights[v], not isinstance(extents[v], tirx.IntImm))):
        weight, extent = weights[v], extents[v]
        if not isinstance(reach, int) or not 0 < weight <= reach:
            return False
        if isinstance(extent, tirx.IntImm) and int(extent) > 0:
            reach += weight * (int(extent) - 1)
        elif weight == reach:
            reach = extent * weight
        else:
            return False
        seen[v] = weight
        for end in [end for smaller, end in limits if smaller == seen]:
            met += 1
            if isinstance(reach, int) and isinstance(end, tirx.IntImm):
                reach = min(reach, int(end))
            elif not analyzer.can_prove(end >= length):
                return False
    return met == len(limits) and analyzer.can_prove(length <= reach)


def tells_apart(
    terms: Iterable[tuple[Any, int, int | None]],
    limits: Sequence[tuple[Mapping[Any, Any], int]] = (),
) -> bool:
    """Whether a sum takes each value for one choice of its coordinates only.

    It does when each coefficient exceeds what the terms with smaller ones add up to.

    terms : (coordinate, coefficient, how many values it takes, None where that is not known)
    limits : sums that are known to be less than a number, as in the last of some tiles
    """
    reach: int | None = 0
    seen: dict[Any, Any] = {}
    for var, coefficient, extent in sorted(
        terms, key=lambda t: (abs(t[1]), t[2] is None, t[2] != 1)
    ):
        if reach is None or abs(coefficient) <= reach:
            return False
        reach = None if extent is None else reach + abs(coefficient) * max(extent - 1, 0)
        seen[var] = coefficient
        for known, end in limits:
            if known == seen:
                reach = end - 1 if reach is None else min(reach, end - 1)
    return True
