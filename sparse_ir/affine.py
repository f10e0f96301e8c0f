"""The affine form of index expressions, and the values that sums of coordinates take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tvm import ir, tirx
from tvm_ffi import StructuralKey

from sparsetir.sparse_ir.exact import is_signed
from sparsetir.sparse_ir.nodes import variables_of


class Affine(NamedTuple):
    """A sum of products, each with an integer coefficient; equal sums have equal terms.

    terms : the coefficient of each product, never 0. A product is a tuple of factors: variables,
        and keys of expressions that are not affine; `()` is the constant
    """

    terms: dict[tuple[Any, ...], int]

    def step(self, var: Any) -> int | None:
        """The change of the sum per step of a variable; None where that varies."""
        uses = [t for t in self.terms if any(var in variables_of(expr_of(x)) for x in t)]
        return self.terms.get((var,), 0) if uses in ([], [(var,)]) else None

    def weights(self, coords: Collection[Any]) -> dict[Any, int] | None:
        """The coefficients of a sum of these coordinates alone; None for any other sum."""
        only = all(len(t) == 1 and t[0] in coords for t in self.terms)
        return {var: number for (var,), number in self.terms.items()} if only else None


def affine(index: Any) -> Affine:
    """The affine form of an index over unbounded integers (:mod:`sparsetir.sparse_ir.exact`)."""
    if isinstance(index, tirx.IntImm):
        return Affine({(): int(index)} if int(index) else {})
    if isinstance(index, ir.Var):
        return Affine({(index,): 1})
    if isinstance(index, tirx.Cast) and is_signed(index) and is_signed(index.value):
        return affine(index.value)
    if not isinstance(index, tirx.Add | tirx.Sub | tirx.Mul):
        return Affine({(StructuralKey(index),): 1})
    a, b = affine(index.a).terms, affine(index.b).terms
    if isinstance(index, tirx.Mul):
        pairs = [((*s, *t), m * n) for s, m in a.items() for t, n in b.items()]
        more = [(tuple(sorted(t, key=hash)), n) for t, n in pairs]
        total: dict[tuple[Any, ...], int] = {}
    else:
        sign = 1 if isinstance(index, tirx.Add) else -1
        total, more = dict(a), [(t, sign * n) for t, n in b.items()]
    for term, number in more:
        total[term] = total.get(term, 0) + number
    return Affine({term: number for term, number in total.items() if number})


def expr_of(factor: Any) -> Any:
    """The expression that a factor of a product stands for."""
    return factor.key if isinstance(factor, StructuralKey) else factor


def is_surjective(
    weights: Mapping[Any, int], extents: Mapping[Any, Any], length: Any, analyzer: Any,
    limits: Sequence[Any] = (),
) -> bool:  # fmt: skip
    """Whether a sum of coordinates takes all values in [0, length).

    `i0 * 64 + i1 * 16 + i2` of 1, 4 and 16 positions takes each below 64.

    limits : pairs of the weights of a smaller sum and that sum's exclusive upper bound
    """
    reach: Any = 1  # all values below it are covered
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


def covered(
    indices: Sequence[Any], lengths: Sequence[Any], extents: Mapping[Any, Any], analyzer: Any,
    limits: Sequence[Any] = (),
) -> list[Any] | None:  # fmt: skip
    """The coordinates by which indices take all values of a box, or None if they may not.

    extents : by coordinate
    limits : as for :func:`is_surjective`, each of some coordinates of one index
    """
    used: list[Any] = []
    left = [*limits]
    for index, length in zip(indices, lengths, strict=True):
        weights = affine(index).weights(extents)
        mine = [x for x in left if weights is not None and set(x[0]) <= set(weights)]
        if weights is None or not is_surjective(weights, extents, length, analyzer, mine):
            return None
        used += weights
        left = [x for x in left if x not in mine]
    return None if left or len(set(used)) < len(used) else used


def is_injective(
    terms: Iterable[tuple[Any, int, int | None]],
    limits: Sequence[tuple[Mapping[Any, Any], int]] = (),
) -> bool:
    """Whether a sum is injective: different coordinates give different values.

    It is if each coefficient exceeds the largest sum of the terms with smaller coefficients.

    terms : (coordinate, coefficient, number of values it takes or None where unknown)
    limits : sums with a known exclusive bound, such as a position in the last, shorter tile
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
