"""Adjoints of expressions: the factor by which each load contributes to a weighted result.

The adjoint of a load in `e`, for the adjoint g of `e` itself, is g * de/dload: of `A[i] * B[j]`
it is `g * B[j]` for A and `A[i] * g` for B. Each load has its own term (the product rule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import loads_of, nodes_of, same_indices
from sparsetir.sparse_ir.reduction import factors_of
from sparsetir.sparse_ir.tir import cast, dtype_of, zero

Term = tuple[Any, Any]


class NoAdjointError(Exception):
    """An expression without a derivation rule; the message says which."""


def adjoints(expr: Any, adjoint: Any, operand: Any) -> list[Term]:
    """(indices, adjoint) of an operand in an expression, summed over loads at equal indices.

    expr : a float expression
    adjoint : the adjoint of `expr`; widened to the type of `expr`, never narrowed
    operand : the operand's buffer variable

    At a kink, `max` and `min` pass the adjoint to a constant operand, else to the first one; that
    of `abs` is 0. Expressions that are not differentiable have none: conditions, integers, `floor`.

    Raises NoAdjointError for a node without a rule.
    """
    terms: list[Term] = []
    for load, term in _terms(expr, adjoint, operand):
        same = [n for n, (indices, _) in enumerate(terms) if same_indices(indices, load.indices)]
        if same:
            terms[same[0]] = (load.indices, terms[same[0]][1] + term)
        else:
            terms.append((load.indices, term))
    return terms


def _terms(expr: Any, g: Any, operand: Any) -> list[Term]:
    """(load, adjoint) of each load in an expression."""
    if not loads_of(expr, operand) or not is_float(expr):
        return []
    if isinstance(expr, ir.TensorLoad):
        return [(expr, g)]
    if isinstance(expr, tirx.Mul):
        return _product(factors_of(expr), g, operand)
    if isinstance(expr, tirx.Select):
        test, yes, no = expr.condition, expr.true_value, expr.false_value
        return _choice(tirx.Select, test, yes, no, g, operand)
    if isinstance(expr, tirx.Max | tirx.Min):
        return _choice(tirx.Select, _is_first(expr), expr.a, expr.b, g, operand)
    if isinstance(expr, ir.Call):
        return _call(expr, g, operand)
    rule = RULES.get(type(expr))
    if rule is None:
        raise NoAdjointError(f"{type(expr).__name__}, in {expr}")
    return [term for part, adjoint in rule(expr, g) for term in _terms(part, adjoint, operand)]


def is_float(expr: Any) -> bool:
    """Whether an expression has a float type."""
    return dtype_of(expr).startswith(("float", "bfloat"))


def _product(factors: Sequence[Any], g: Any, operand: Any) -> list[Term]:
    """The adjoint of a product with respect to each factor; equal factors are counted."""
    terms: list[Term] = []
    for n, factor in enumerate(factors):
        same = [k for k, other in enumerate(factors) if tvm_ffi.structural_equal(factor, other)]
        if same[0] == n and loads_of(factor, operand):
            count = [tirx.const(float(len(same)), dtype_of(g))] if len(same) > 1 else []
            others = reduce(mul, [*count, *factors[:n], g, *factors[n + 1 :]])
            terms += _terms(factor, others, operand)
    return terms


def _choice(choose: Any, test: Any, yes: Any, no: Any, g: Any, operand: Any) -> list[Term]:
    """The adjoint of a choice: a branch not taken gets none, even where its derivative is NaN."""

    def none(term: Any) -> Any:
        return zero(dtype_of(term))

    taken = [(load, choose(test, t, none(t))) for load, t in _terms(yes, g, operand)]
    return taken + [(load, choose(test, none(t), t)) for load, t in _terms(no, g, operand)]


def _is_first(expr: Any) -> Any:
    """Whether a maximum or minimum takes its first operand; on a tie, its constant."""
    a, b, greater = expr.a, expr.b, isinstance(expr, tirx.Max)
    if nodes_of(ir.TensorLoad, b):
        return a >= b if greater else a <= b
    return a > b if greater else a < b


def _call(expr: Any, g: Any, operand: Any) -> list[Term]:
    name = str(getattr(expr.op, "name", expr.op)).rpartition(".")[2]
    if name == "if_then_else":
        test, yes, no = expr.args
        return _choice(tirx.if_then_else, test, yes, no, g, operand)
    if name in CONSTANT:
        return []
    x, *others = expr.args
    at, value = (cast(v, dtype_of(g)) if dtype_of(v).endswith("16") else v for v in (x, expr))
    if name == "pow":
        (exponent,) = others
        # As in torch, a power of zero does not change with its exponent.
        still = tirx.all(tirx.EQ(x, zero(dtype_of(x))), exponent >= zero(dtype_of(exponent)))
        changes = tirx.Select(still, zero(dtype_of(g)), g * value * tirx.log(at))
        of_base = _terms(x, _power(g, x, exponent), operand)
        return of_base + _terms(exponent, changes, operand)
    if name not in DERIVATIVES or others:
        raise NoAdjointError(f"{name}, in {expr}")
    return _terms(x, DERIVATIVES[name](g, at, value), operand)


def _power(g: Any, x: Any, exponent: Any) -> Any:
    """The adjoint of x in a power of x; small integer powers become products."""
    constant = float(exponent.value) if isinstance(exponent, tirx.FloatImm) else None
    if constant in (1.0, 2.0, 3.0):
        return reduce(mul, [exponent, g, *[x] * (int(constant) - 1)])
    return exponent * g * tirx.pow(x, exponent - 1.0)


# The (operand, adjoint) pairs of a node.
RULES: dict[type, Callable[[Any, Any], list[Term]]] = {
    tirx.Add: lambda e, g: [(e.a, g), (e.b, g)],
    tirx.Sub: lambda e, g: [(e.a, g), (e.b, -g)],
    tirx.Div: lambda e, g: [(e.a, g / e.b), (e.b, -(g * e / e.b))],
    tirx.Cast: lambda e, g: [(e.value, g)],
}

# The adjoint of the argument x of a call e, by function.
DERIVATIVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "exp": lambda g, x, e: g * e,
    "exp2": lambda g, x, e: g * e * math.log(2),
    "exp10": lambda g, x, e: g * e * math.log(10),
    "log": lambda g, x, e: g / x,
    "log2": lambda g, x, e: g / (x * math.log(2)),
    "log10": lambda g, x, e: g / (x * math.log(10)),
    "log1p": lambda g, x, e: g / (x + 1.0),
    "sqrt": lambda g, x, e: g / (e * 2.0),
    "rsqrt": lambda g, x, e: g * -0.5 * e / x,
    "tanh": lambda g, x, e: g * (1.0 - e * e),
    "sigmoid": lambda g, x, e: g * e * (1.0 - e),
    "sin": lambda g, x, e: g * tirx.cos(x),
    "cos": lambda g, x, e: -(g * tirx.sin(x)),
    "tan": lambda g, x, e: g * (1.0 + e * e),
    "sinh": lambda g, x, e: g * tirx.cosh(x),
    "cosh": lambda g, x, e: g * tirx.sinh(x),
    "erf": lambda g, x, e: g * (2 / math.sqrt(math.pi)) * tirx.exp(-(x * x)),
    "fabs": lambda g, x, e: tirx.Select(
        x > 0.0, g, tirx.Select(x < 0.0, -g, zero(dtype_of(g)))
    ),
}  # fmt: skip

# Calls that are piecewise constant.
CONSTANT = {"floor", "ceil", "trunc", "round", "nearbyint", "isnan"}
