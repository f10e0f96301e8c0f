"""Expressions that may be evaluated speculatively, where no visit needs their value.

Searches run ahead of the conditions around them, factors are hoisted out of sums that may be empty,
and both sides of `and`, `or` and `T.Select` are evaluated. Guarded loads are safe. As to the rest:

- An integer division by zero ends the process, and so does that of the least integer by -1.
  Divisions are total here: by zero they give 0, as NumPy's do. Those by constants are unchanged,
  and so are those by sizes of axes where a visit needs them::

      60 // D[i]   becomes   60 // (D[i] ^ (-s & (D[i] ^ 1))) * (1 - s - (s & (D[i] >> 31)))

  where s is 1 if D[i] is 0 or -1, else 0.

  It uses bits, since TVM 0.27 simplifies `T.max(i, 1)` to `i` where a condition says that i is
  positive, then takes the quotient out of that condition as a common subexpression, and since its
  simplifier takes exponential time for nested choices.

- A load without a guard is only evaluated where the interpreter evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.sparse_ir.exact import Bounds, is_choice, type_bounds
from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, uncast, zero
from sparsetir.sparse_ir.traversal import Rule, map_expr

DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def any_number(expr: Any) -> tuple[int, int]:
    """Bounds of an integer about which nothing is known."""
    return type_bounds(dtype_of(expr))


def total_divisions(bounds: Bounds) -> list[Rule]:
    """Rules that make integer divisions total."""

    def total(node: Any) -> Any:
        if not _is_integral(node) or _is_total(node.b):
            return node
        low, high = bounds(node.b)
        return node if low > 0 or high < -1 else _total(node)

    return [(kind, total) for kind in DIVISIONS]


def speculative(expr: Any, unguarded: Callable[[Any], bool], bounds: Bounds = any_number) -> Any:
    """An expression made safe to evaluate ahead of all conditions.

    unguarded : returns whether a load may be out of bounds
    bounds : returns bounds that hold even if no axis is visited
    """

    def load(node: Any) -> Any:
        if not unguarded(node):
            return node
        tests: list[Any] = []
        for index, size in zip(node.indices, node.source.ty.shape, strict=True):
            dtype = dtype_of(index)
            tests += [index >= as_dtype(0, dtype), index < as_dtype(size, dtype)]
        return tirx.if_then_else(tirx.all(*tests), node, zero(dtype_of(node)))

    return map_expr(expr, [*total_divisions(bounds), (ir.TensorLoad, load)])


def is_speculatable(expr: Any) -> bool:
    """Whether a stage-II expression may be evaluated where no visit needs its value.

    Loads at positions may be, but not those at loaded indices, nor calls, nor divisions by values
    that may be zero.
    """
    divides = any(not _is_total(x.b) for x in nodes_of(DIVISIONS, expr))
    loads = nodes_of(ir.TensorLoad, expr)
    gathers = any(nodes_of(ir.TensorLoad, *x.indices) for x in loads)
    return not divides and not gathers and not nodes_of(ir.Call, expr)


def _is_integral(node: Any) -> bool:
    return dtype_of(node).startswith(("int", "uint"))


def _is_total(divisor: Any) -> bool:
    """Whether a divisor is a constant other than 0, or made by :func:`_total`.

    Parts may since have been cast to a wider type: a value of 0 or -1 is the same in both.
    """
    if isinstance(divisor, tirx.Cast) and _widens(divisor):
        divisor = divisor.value
    if not isinstance(divisor, tirx.BitwiseXor):
        return isinstance(divisor, tirx.IntImm) and int(divisor) != 0
    special: Any = uncast(divisor.b)
    mask: Any = uncast(special.a) if isinstance(special, tirx.BitwiseAnd) else None
    test: Any = uncast(uncast(mask.b)) if isinstance(mask, tirx.Sub) else None
    return isinstance(test, tirx.EQ) and free_vars(test.a) == free_vars(divisor.a)


def _widens(cast: Any) -> bool:
    """Whether a cast from one integer type to another keeps every number."""
    of, to = dtype_of(cast.value), dtype_of(cast)
    return {of[:3], to[:3]} == {"int"} and type_bounds(of)[1] <= type_bounds(to)[1]


def _is_special(divisor: Any) -> tuple[Any, Any]:
    """1 for 0 and -1, else 0; and -1 for negative values, else 0."""
    dtype = dtype_of(divisor)
    sign = divisor >> as_dtype(tvm.DataType(dtype).bits - 1, dtype)
    return tirx.Cast(dtype, tirx.EQ(divisor ^ sign, zero(dtype))), sign


def _total(node: Any) -> Any:
    """A division by a value that may be 0 or -1: by 1, and the quotient times 0 or -1."""
    dtype = dtype_of(node.b)
    one, (special, sign) = as_dtype(1, dtype), _is_special(node.b)
    divisor = node.b ^ ((zero(dtype) - special) & (node.b ^ one))
    quotient = type(node)(node.a, divisor)
    if isinstance(node, tirx.Mod | tirx.FloorMod):
        return quotient
    return quotient * (one - special - (special & sign))


def lazy_rules(unguarded: Callable[[Any], bool], bounds: Bounds) -> list[Rule]:
    """Rules for operands that are always evaluated: they become branches where necessary.

    unguarded, bounds : see :func:`speculative`
    """

    def needs_guard(condition: Any, *exprs: Any) -> bool:
        """Whether an operand may only be evaluated if a condition holds.

        TVM simplifies a divisor by the condition of a Select, but evaluates both of its operands.
        """
        told = free_vars(condition)
        choices = filter(is_choice, nodes_of(ir.Call, *exprs))
        branches = [x for call in choices for x in call.args[1:]]
        kinds = (ir.TensorLoad, *DIVISIONS)
        apart = {x.__chandle__() for x in nodes_of(kinds, *branches)}
        for node in nodes_of(kinds, *exprs):
            if isinstance(node, ir.TensorLoad):
                unsafe = unguarded(node)
            else:
                unsafe = _is_integral(node) and bool(told & free_vars(node.b))
            if unsafe and node.__chandle__() not in apart:
                return True
        return False

    def ahead(expr: Any) -> Any:
        return speculative(expr, lambda _: False, bounds)

    def both(node: Any) -> Any:
        if not needs_guard(node.a, node.b):
            return type(node)(node.a, ahead(node.b))
        if isinstance(node, tirx.And):
            return tirx.if_then_else(node.a, node.b, tirx.const(False, "bool"))
        return tirx.if_then_else(node.a, tirx.const(True, "bool"), node.b)

    def select(node: Any) -> Any:
        values = node.true_value, node.false_value
        if needs_guard(node.condition, *values):
            return tirx.if_then_else(node.condition, *values)
        return tirx.Select(node.condition, *map(ahead, values))

    return [(tirx.And, both), (tirx.Or, both), (tirx.Select, select)]
