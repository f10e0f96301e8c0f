"""Floating-point numbers that stay what IEEE 754 says through TVM's simplifier.

It takes them for real numbers: to it `x - x` and `x * 0.0` are 0 and `(x + y) - y` is x; `x == x`
is true, so that no NaN is found, and so is `x < y or x >= y`; `not x < y` becomes `y <= x`. In what
it gives LLVM, `x != y` is false for NaN. Before::

    C[i] = T.if_then_else(A[i] != A[i], 0.0, A[i] - A[0])

After, where no rule of it applies, and what LLVM and nvcc make the same instructions of::

    C[i] = T.if_then_else(not T.bool(T.int8(A[i] <= A[i] and A[i] <= A[i])), 0.0,
                          A[i] + A[0] * -1.0)

A difference stays as it is where its operands read nothing in common, and so does a comparison
that stands alone in its function, under no `not`. What the parser folds, such as `A[i] * 0.0`, is
not there any more.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr

COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def ieee_floats(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of stage III whose differences and comparisons of floats are not simplified."""
    differences = [x for x in nodes_of(tirx.Sub, func.body) if _is_float(x)]
    zeros = [x for x in nodes_of((tirx.Mul, tirx.Div), func.body) if _is_zero(x.a) or _is_zero(x.b)]
    compared = [x for x in nodes_of(COMPARISONS, func.body) if _is_float(x.a)]
    alone = len(compared) == 1 and not nodes_of(tirx.Not, func.body)
    if not differences and not zeros and not compared:
        return func
    read: dict[int, set[int]] = {}  # what is read for a variable that is bound to a value
    for bound in nodes_of((tirx.Bind, tirx.Let), func.body):
        read[bound.var.__chandle__()] = _read(bound.value, read)

    def of_zero(x: Any) -> Any:
        if not _is_zero(x.a) and not _is_zero(x.b):
            return x
        # The root of 0.0 and of -0.0 is what it is of, and no rule knows it.
        return type(x)(*(tirx.sqrt(y) if _is_zero(y) else y for y in (x.a, x.b)))

    def apart(x: Any) -> bool:
        return _read(x.a, read).isdisjoint(_read(x.b, read))

    def difference(x: Any) -> Any:
        if not _is_float(x) or apart(x):
            return x
        return x.a + tirx.Mul(x.b, tirx.const(-1.0, dtype_of(x)))

    def comparison(x: Any) -> Any:
        equal = isinstance(x, tirx.EQ | tirx.NE) and not apart(x)
        if not _is_float(x.a) or (alone and not equal and not isinstance(x, tirx.NE)):
            return x
        test = tirx.EQ(x.a, x.b) if isinstance(x, tirx.NE) else x
        if equal:
            test = tirx.And(tirx.LE(x.a, x.b), tirx.LE(x.b, x.a))
        truth = dtype_of(test)  # of as many lanes as the operands
        opaque = tirx.Cast(truth, tirx.Cast(truth.replace("bool", "int8"), test))
        return tirx.Not(opaque) if isinstance(x, tirx.NE) else opaque

    rules = [(tirx.Sub, difference), (tirx.Mul, of_zero), (tirx.Div, of_zero)]
    rules += [(kind, comparison) for kind in COMPARISONS]
    return with_body(func, map_expr(func.body, rules))


def _is_float(expr: Any) -> bool:
    return "float" in dtype_of(expr)


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, tirx.FloatImm) and expr.value == 0


def _read(expr: Any, bound: dict[int, set[int]]) -> set[int]:
    """Handles of the buffers and variables of floats that an expression is made of."""
    handles = {load.source.__chandle__() for load in nodes_of(ir.TensorLoad, expr)}
    for var in nodes_of(ir.Var, expr):
        if not tirx.is_buffer_var(var) and _is_float(var):
            handles |= bound.get(var.__chandle__(), {var.__chandle__()})
    return handles
