"""Hoisting of factors that are the same for all edges of a node out of sums at nodes.

The gradient of `s = sigmoid(a * x_i + x_j)` at a node i is a sum of `g_i * s * (1 - s) * a`, and
that of `a` sums `g_i * s * (1 - s) * x_i`: both are factors of nodes times a sum of `s * (1 - s)`,
which is computed once. For a node without edges the sum is 0, whatever its factors are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx

from sparsetir.graph.expressions import (
    SAME,
    Size,
    aten,
    dtype_of,
    gather_of,
    is_cast,
    is_float,
    is_one,
    same,
    shape_of,
    wide,
)

PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
# Operators that are linear in their first argument. Those that select, such as threshold_backward,
# are not: a NaN that is not selected must not reach the result.
LINEAR = {
    aten.leaky_relu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
}


@dataclass(frozen=True)
class Linear:
    """A node of a `LINEAR` operator, with a product of terms as its first argument."""

    of: fx.Node
    inner: tuple[fx.Node | Linear, ...]

    def __str__(self) -> str:
        return f"{self.of.target}({', '.join(map(str, self.inner))}; {self.of.args[1:]})"


@dataclass(frozen=True)
class Split:
    """A value of edges as a product.

    terms : nodes and `Linear` that differ by edge, in an order that equal products share
    factors : nodes of the graph and numbers that are the same for all edges of a node
    divisors : likewise, nodes and numbers that divide the product
    """

    terms: tuple[fx.Node | Linear, ...]
    factors: tuple[fx.Node | float, ...] = ()
    divisors: tuple[fx.Node | float, ...] = ()

    @property
    def key(self) -> str:
        """A key that is equal for products of the same terms."""
        return "*".join(map(str, self.terms))

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the product of the terms."""
        return broadcast([_shape_of(term) for term in self.terms])

    def times(self, other: Split) -> Split:
        """The product of both."""
        terms = sorted((*self.terms, *other.terms), key=str)
        divisors = self.divisors + other.divisors
        return Split(tuple(terms), self.factors + other.factors, divisors)


def split(values: fx.Node, rows: fx.Node, count: Size) -> Split:
    """Split edge values into a product whose factors per node of `rows` are kept apart.

    count : number of nodes; only tensors with as many rows count as values of nodes
    """

    def of(value: fx.Node | float, whole: fx.Node) -> Split:
        if not isinstance(value, fx.Node):
            return Split((), (float(value),))
        if _is_for_all(value, whole):
            return Split((), (value,))
        if not is_float(value):
            return Split((value,))
        gathered = gather_of(value)
        if gathered is not None and gathered[1] is rows and same(shape_of(gathered[0])[0], count):
            return Split((), (gathered[0],))
        args: Any = value.args
        if is_cast(value) and wide(dtype_of(args[0])) == wide(dtype_of(value)):
            return of(args[0], whole)
        if value.op != "call_function" or value.kwargs:
            return Split((value,))
        if value.target in SAME:
            return of(args[0], whole)
        if value.target in PRODUCTS:
            return of(args[0], value).times(of(args[1], value))
        if value.target == aten.neg.default:
            return Split((), (-1.0,)).times(of(args[0], value))
        if value.target in QUOTIENTS:
            below = of(args[1], value)
            if not below.terms and not below.divisors:
                return of(args[0], value).times(Split((), (), below.factors))
        if value.target in LINEAR:
            inner = of(args[0], value)
            if inner.factors or inner.divisors:
                return Split((Linear(value, inner.terms),), inner.factors, inner.divisors)
        return Split((value,))

    return of(values, values)


def _is_for_all(value: fx.Node, whole: fx.Node) -> bool:
    """Whether a tensor is broadcast over the edges of the values that it is an argument of."""
    sizes, edges = shape_of(value), shape_of(whole)
    return len(sizes) < len(edges) or len(sizes) == len(edges) and is_one(sizes[0])


def product(terms: Sequence[fx.Node | Linear], call: Callable[..., fx.Node]) -> fx.Node:
    """The product of one or more terms of a split, as a node of a graph.

    call : makes a node of an operator, arguments and a shape
    """

    def of(term: fx.Node | Linear) -> fx.Node:
        if not isinstance(term, Linear):
            return term
        inner: Any = product(term.inner, call) if term.inner else 1.0
        return call(term.of.target, (inner, *term.of.args[1:]), _shape_of(term))

    result, *rest = map(of, terms)
    for term in rest:
        shape = broadcast([shape_of(result), shape_of(term)])
        result = call(aten.mul.Tensor, (result, term), shape)
    return result


def scaled(sums: fx.Node, of: Split, call: Callable[..., fx.Node]) -> fx.Node:
    """Sums at nodes, multiplied by the factors of a split."""
    result = sums
    parts = [(aten.mul.Tensor, f) for f in of.factors] + [(aten.div.Tensor, d) for d in of.divisors]
    for target, factor in parts:
        if isinstance(factor, float) and target == aten.mul.Tensor and factor in (1.0, -1.0):
            if factor < 0:
                result = call(aten.neg.default, (result,), shape_of(result))
            continue
        shape = broadcast([shape_of(result), shape_of(factor)])
        result = call(target, (result, factor), shape)
    return result


def _shape_of(term: fx.Node | Linear) -> tuple[Size, ...]:
    if not isinstance(term, Linear):
        return shape_of(term)
    return broadcast([*map(_shape_of, term.inner), *map(shape_of, term.of.args[1:])])


def broadcast(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The broadcast shape of compatible shapes."""
    columns = zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    sizes = [next((s for s in column if not is_one(s)), 1) for column in columns]
    return tuple(reversed(sizes))
