"""Coordinates as unbounded integers, independent of their types.

The coordinate of `C[IDX[i] * 3 - 1]` is 3221225471 where IDX holds 2^30: it is not stored, and
nothing is written. In int32 it would wrap, and code generators assume that it does not, so a guard
and the access could see different numbers. Such expressions are computed in 64 bits::

    IDX[i] * 3 - 1      becomes      int64(IDX[i]) * 3 - 1

Where even 64 bits may overflow, operands and products are clamped to `LIMIT`, where no axis has a
coordinate. Expressions whose bounds fit their type stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tvm
from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.tir import as_dtype, dtype_of

LIMIT = 2**62 - 1
SIZES = 2**56 - 1  # the assumed bound of axes: no address space holds as many elements
WIDE = "int64"


class Integer(NamedTuple):
    """An exact expression, and its inclusive bounds."""

    expr: Any
    low: int
    high: int

    def within(self, low: int, high: int) -> bool:
        """Whether its bounds lie in [low, high]."""
        return low <= self.low and self.high <= high


# Returns the bounds of a variable or a load.
Bounds = Callable[[Any], tuple[int, int]]


def saturated(value: int) -> int:
    """A number clamped as an operand of coordinate arithmetic."""
    return max(min(value, LIMIT), -LIMIT)


def is_signed(expr: Any) -> bool:
    """Whether an expression is a signed integer; other integer types may not overflow."""
    return dtype_of(expr).startswith("int")


def fits_signed(expr: Any) -> bool:
    """Whether an expression is an integer all of whose values fit int64."""
    return dtype_of(expr) in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def type_bounds(dtype: str) -> tuple[int, int]:
    """The least and the greatest number of an integer type."""
    bits = tvm.DataType(dtype).bits
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype[0] == "i" else (0, 2**bits - 1)


def exact(
    expr: Any, bounds: Bounds, fits: bool = False, known: Mapping[Any, Integer] | None = None
) -> Integer:
    """An index expression, computed without overflow.

    bounds : returns the bounds of a variable or load
    fits : whether the number is known to fit the type of the expression
    known : variables whose exact form is known
    """
    return _Exact(bounds, known or {}).of(expr, fits)


def inlined(let: tirx.Let) -> Any:
    """The body of a Let with its value substituted for the variable."""
    return substitute(let.body, {let.var: let.value})


def is_choice(expr: Any) -> bool:
    """Whether an expression is a call of `if_then_else`."""
    return isinstance(expr, ir.Call) and getattr(expr.op, "name", "").endswith(".if_then_else")


def most_of(length: Any, bounds: Bounds) -> int:
    """The upper bound of a length; loops assume that neither it nor any part of it overflows."""
    return _Length(bounds, {}).of(length, True).high


class _Exact:
    def __init__(self, bounds: Bounds, known: Mapping[Any, Integer]) -> None:
        self.bounds = bounds
        self.known = known

    def of(self, node: Any, fits: bool = False) -> Integer:
        if isinstance(node, tirx.IntImm):
            return Integer(node, int(node), int(node))
        if isinstance(node, ir.Var) and node in self.known:
            return self.known[node]
        if not is_signed(node):
            return self._leaf(node)
        if isinstance(node, tirx.Cast):
            return self._cast(node)
        if isinstance(node, tirx.Let):
            return self.of(inlined(node), fits)
        if isinstance(node, tirx.Select):
            return self._choice(node, node.condition, node.true_value, node.false_value)
        if is_choice(node):
            return self._choice(node, *node.args)
        if isinstance(node, tirx.LShift) and arithmetic_of(node) is not None:
            product = node.a * as_dtype(2 ** int(node.b), dtype_of(node))
            found = self.of(product, fits)
            return found._replace(expr=node) if found.expr.same_as(product) else found
        rule = _BOUNDS.get(type(node))
        if rule is None:
            return self._leaf(node)
        fit_a, fit_b = self.parts_fit(node) if fits else (False, False)
        a, b = self.of(node.a, fit_a), self.of(node.b, fit_b)
        return self._binary(node, a, b, rule, fits)

    def parts_fit(self, node: Any) -> tuple[bool, bool]:
        """Whether the two operands fit too, for a number that fits.

        Nonnegative operands of sums and products do not exceed the result.
        """
        a, b = self.of(node.a), self.of(node.b)
        if not isinstance(node, tirx.Add | tirx.Mul) or min(a.low, b.low) < 0:
            return False, False
        least = isinstance(node, tirx.Mul)
        return b.low >= least, a.low >= least

    def _leaf(self, node: Any) -> Integer:
        low, high = type_bounds(dtype_of(node))
        if isinstance(node, ir.Var | ir.TensorLoad):
            least, most = self.bounds(node)
            low, high = max(low, least), min(high, most)
        return Integer(node, low, high)

    def _cast(self, node: Any) -> Integer:
        """The exact form of a cast: those between integers keep the number."""
        if dtype_of(node.value) == "bool":
            return Integer(node, 0, 1)
        if not fits_signed(node.value):
            return self._leaf(node)
        value = self.of(node.value)
        if value.within(*type_bounds(dtype_of(node))):
            same = value.expr.same_as(node.value)
            expr = node if same else as_dtype(value.expr, dtype_of(node))
            return value._replace(expr=expr)
        return value._replace(expr=as_dtype(value.expr, WIDE))

    def _choice(self, node: Any, condition: Any, yes: Any, no: Any) -> Integer:
        a, b = self.of(yes), self.of(no)
        low, high = min(a.low, b.low), max(a.high, b.high)
        if a.expr.same_as(yes) and b.expr.same_as(no):
            return Integer(node, low, high)
        a, b = (as_dtype(x.expr, WIDE) for x in (a, b))
        make = tirx.Select if isinstance(node, tirx.Select) else tirx.if_then_else
        return Integer(make(condition, a, b), low, high)

    def _binary(self, node: Any, a: Integer, b: Integer, rule: Any, fits: bool) -> Integer:
        (low, high), (least, most) = rule(a, b), type_bounds(dtype_of(node))
        narrow = dtype_of(a.expr) == dtype_of(b.expr) == dtype_of(node)
        grows = isinstance(node, tirx.Add | tirx.Sub | tirx.Mul)
        if narrow and fits:
            low, high = max(low, least), min(high, most)
        elif not narrow or low < least or high > most or (grows and dtype_of(node) == WIDE):
            if grows:
                a, b = _clamped(a), _clamped(b)
            if isinstance(node, tirx.Mul):
                return _product(node, a, b)
            low, high = rule(a, b)
            a, b = (x._replace(expr=as_dtype(x.expr, WIDE)) for x in (a, b))
        return Integer(_same_or(node, a.expr, b.expr), low, high)


class _Length(_Exact):
    """Arithmetic all of whose parts are known to fit."""

    def parts_fit(self, node: Any) -> tuple[bool, bool]:
        return True, True


def _same_or(node: Any, a: Any, b: Any) -> Any:
    """The node with new operands; the same object if they are unchanged."""
    return node if a.same_as(node.a) and b.same_as(node.b) else type(node)(a, b)


def _clamped(x: Integer) -> Integer:
    """A number clamped as in :func:`saturated`."""
    expr = as_dtype(x.expr, WIDE)
    if x.within(-LIMIT, LIMIT):
        return Integer(expr, x.low, x.high)
    inside = tirx.Max(tirx.Min(expr, as_dtype(LIMIT, WIDE)), as_dtype(-LIMIT, WIDE))
    # TVM's simplifier looks through min and max, and would fold additions past the clamp.
    opaque = tirx.BitwiseOr(inside, as_dtype(0, WIDE))
    return Integer(opaque, saturated(x.low), saturated(x.high))


def _product(node: Any, a: Integer, b: Integer) -> Integer:
    """A product of clamped numbers, clamped to [-`LIMIT`, `LIMIT`]."""
    low, high = _product_bounds(a, b)
    expr = _same_or(node, a.expr, b.expr)
    if -LIMIT <= low and high <= LIMIT:
        return Integer(expr, low, high)
    if a.low == a.high:
        a, b = b, a
    zero, one, limit = (as_dtype(n, WIDE) for n in (0, 1, LIMIT))
    if b.low == b.high:
        end: Any = as_dtype(LIMIT if b.low > 0 else -LIMIT, WIDE)
        most: Any = as_dtype(LIMIT // abs(b.low), WIDE)
    else:
        end = tirx.Select(b.expr >= zero, limit, zero - limit)
        size = tirx.Max(b.expr, zero - b.expr)
        # TVM's analysis rejects a divisor without a known upper bound.
        most = tirx.floordiv(limit, tirx.Min(tirx.Max(size, one), limit))
    expr = tirx.Select(a.expr > most, end, expr)
    if a.low < 0:
        expr = tirx.Select(a.expr < zero - most, zero - end, expr)
    return Integer(expr, saturated(low), saturated(high))


def _corners(rule: Callable[[int, int], int]) -> Callable[[Integer, Integer], tuple[int, int]]:
    def bounds(a: Integer, b: Integer) -> tuple[int, int]:
        values = [rule(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        return min(values), max(values)

    return bounds


_product_bounds = _corners(operator.mul)


def _quotient_bounds(a: Integer, b: Integer) -> tuple[int, int]:
    return _corners(operator.floordiv)(a, b) if b.low > 0 else _any_sign(a)


def _truncated_bounds(a: Integer, b: Integer) -> tuple[int, int]:
    return (min(a.low, 0), max(a.high, 0)) if b.low > 0 else _any_sign(a)


def _remainder_bounds(a: Integer, b: Integer) -> tuple[int, int]:
    if b.low > 0:
        return (a.low, a.high) if 0 <= a.low and a.high < b.low else (0, b.high - 1)
    return _any_sign(b)


def _any_sign(x: Integer) -> tuple[int, int]:
    """Bounds of the numbers of no larger size."""
    most = max(abs(x.low), abs(x.high))
    return -most, most


def _bits_bounds(a: Integer, b: Integer) -> tuple[int, int]:
    end = 2 ** max(n.bit_length() for n in (a.low, a.high, b.low, b.high))
    return (0 if min(a.low, b.low) >= 0 else -end), end - 1


def _and_bounds(a: Integer, b: Integer) -> tuple[int, int]:
    ends = [x.high for x in (a, b) if x.low >= 0]
    return (0, min(ends)) if ends else _bits_bounds(a, b)


def _shifted_bounds(a: Integer, b: Integer) -> tuple[int, int]:
    if b.low == b.high >= 0:
        return a.low >> b.low, a.high >> b.low
    return min(a.low, 0), max(a.high, 0)


_BOUNDS: dict[Any, Callable[[Integer, Integer], tuple[int, int]]] = {
    tirx.Add: _corners(operator.add),
    tirx.Sub: _corners(operator.sub),
    tirx.Mul: _product_bounds,
    tirx.FloorDiv: _quotient_bounds,
    tirx.FloorMod: _remainder_bounds,
    tirx.Div: _truncated_bounds,
    tirx.Mod: _truncated_bounds,
    tirx.Min: _corners(min),
    tirx.Max: _corners(max),
    tirx.BitwiseAnd: _and_bounds,
    tirx.BitwiseOr: _bits_bounds,
    tirx.BitwiseXor: _bits_bounds,
    tirx.RShift: _shifted_bounds,
}


def _divided(x: int, y: int) -> int:
    """Division as `/` in C, which rounds towards zero."""
    return x // y if (x < 0) == (y < 0) else -(-x // y)


def arithmetic_of(expr: Any) -> Callable[[int, int], int] | None:
    """The integer function of a coordinate operation on two numbers; None for other nodes."""
    if isinstance(expr, tirx.LShift):
        bits = tvm.DataType(dtype_of(expr)).bits
        known = isinstance(expr.b, tirx.IntImm) and 0 <= int(expr.b) < bits - 1
        return (lambda x, y: _ARITHMETIC[tirx.Mul](x, 2**y)) if known else None
    return _ARITHMETIC.get(type(expr))


_ARITHMETIC: dict[Any, Callable[[int, int], int]] = {
    tirx.Add: lambda x, y: saturated(x) + saturated(y),
    tirx.Sub: lambda x, y: saturated(x) - saturated(y),
    tirx.Mul: lambda x, y: saturated(saturated(x) * saturated(y)),
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Div: _divided,
    tirx.Mod: lambda x, y: x - y * _divided(x, y),
    tirx.Min: min,
    tirx.Max: max,
    tirx.BitwiseAnd: operator.and_,
    tirx.BitwiseOr: operator.or_,
    tirx.BitwiseXor: operator.xor,
    tirx.RShift: operator.rshift,
}
