"""exp, tanh and sigmoid of float32 as operations that vectorise (CPU).

LLVM calls the C library for each lane of `exp`. Before::

    Y[l] = T.exp(X[l])

After, with n = floor(x / log(2) + 1/2), r = x - n * log(2) and a polynomial p of degree 7::

    Y[l] = p(r) * 2**n

The relative error is at most 2e-7 (Cephes), that of tanh and sigmoid at most 4e-7. Results below
the least normal number are flushed to 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, tirx
from tvm.script import tirx as T

from sparsetir.sparse_ir.tir import with_body
from sparsetir.sparse_ir.traversal import map_expr

# The cost of an exponential in additions.
EXPONENTIAL = 8
# Logarithms of the least normal float32 and of the greatest one.
LOWEST, HIGHEST = -87.33654, 88.72283
# Coefficients of (exp(r) - 1 - r) / r**2, for r of at most log(2) / 2.
POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
# Their sum is log(2); products of the first with small integers are exact.
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.12194440e-4
MANTISSA_BITS, EXPONENT_BIAS = 23, 127
# Coefficients of (tanh(x) - x) / x**3 in x**2, for x of at most TANH_SMALL (Cephes).
TANH_SMALL = 0.625
TANH_POLYNOMIAL = (
    -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1,
)  # fmt: skip


def inline_exponentials(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with polynomials in place of these functions of float32; other types remain."""

    def visit(call: Any) -> Any:
        name = str(call.op.name) if isinstance(call.op, ir.Op) else ""
        if name not in INLINED or str(call.ty.dtype) != "float32":
            return call
        return INLINED[name](call.args[0])

    return with_body(func, map_expr(func.body, [(ir.Call, visit)]))


def _sigmoid(x: Any) -> Any:
    return _const(1.0) / (_const(1.0) + _polynomial(_const(0.0) - x))


def _tanh(x: Any) -> Any:
    names = ("x", "square", "size", "far")
    value_of, square, size, far = (tirx.Var(name, "float32") for name in names)
    near = _const(TANH_POLYNOMIAL[0])
    for factor in TANH_POLYNOMIAL[1:]:
        near = near * square + _const(factor)
    near = near * square * value_of + value_of
    signed = tirx.Select(value_of < _const(0.0), _const(0.0) - far, far)
    total = tirx.Select(size <= _const(TANH_SMALL), near, signed)
    for name, value in (
        (far, _const(1.0) - _const(2.0) / (_polynomial(size + size) + _const(1.0))),
        (square, value_of * value_of),
        (size, tirx.Select(value_of < _const(0.0), _const(0.0) - value_of, value_of)),
        (value_of, x),
    ):
        total = tirx.Let(name, value, total)
    return total


def _polynomial(x: Any) -> Any:
    value_of, r, power = (tirx.Var(name, "float32") for name in ("x", "r", "power"))
    exponent, half = (tirx.Var(name, "int32") for name in ("exponent", "half"))
    bounded = tirx.max(tirx.min(value_of, _const(HIGHEST)), _const(LOWEST))
    total = _const(POLYNOMIAL[0])
    for factor in POLYNOMIAL[1:]:
        total = total * r + _const(factor)
    total = total * r * r + r + _const(1.0)
    # In two steps, since 2**128 is not a float32.
    for part in (half, exponent - half):
        total = total * T.reinterpret("float32", (part + EXPONENT_BIAS) << MANTISSA_BITS)
    total = tirx.Select(value_of < _const(LOWEST), _const(0.0), total)
    total = tirx.Select(value_of > _const(HIGHEST), _const(math.inf), total)
    # NaN is preserved, without isnan, which TVM does not vectorise.
    total = tirx.Select(value_of <= _const(math.inf), total, value_of)
    for name, value in (
        (half, exponent >> 1),
        (r, value_of - power * _const(LOG2_HIGH) - power * _const(LOG2_LOW)),
        (exponent, tirx.Cast("int32", power)),
        (power, tirx.floor(bounded * _const(1 / math.log(2)) + _const(0.5))),
        (value_of, x),
    ):
        total = tirx.Let(name, value, total)
    return total


def _const(value: float) -> Any:
    return tirx.const(float(np.float32(value)), "float32")


# Keyed by the names of TVM's operators.
INLINED = {"tirx.exp": _polynomial, "tirx.sigmoid": _sigmoid, "tirx.tanh": _tanh}
