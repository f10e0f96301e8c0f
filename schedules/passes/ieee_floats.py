"""Preserve IEEE 754 semantics of floating-point numbers through TVM's simplifier.

It treats them as real numbers: `x - x` and `x * 0.0` become 0 and `(x + y) - y` x; `x == x`
is true, so that no NaN is found, and so is `x < y or x >= y`; `not x < y` becomes `y <= x`. In the
LLVM code that it emits, `x != y` is false for NaN. Before::

    C[i] = T.if_then_else(A[i] != A[i], 0.0, A[i] - A[0])

After, in a form to which none of its rules apply, and for which LLVM and nvcc emit the same code::

    C[i] = T.if_then_else(not T.bool(T.int8(A[i] <= A[i] and A[i] <= A[i])), 0.0,
                          A[i] + A[0] * -1.0)

Differences whose operands read nothing in common are unchanged, and so is a comparison that is the
only one in its function, under no `not`. Expressions that the parser folds, such as `A[i] * 0.0`,
cannot be restored.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr

COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def ieee_floats(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function whose float differences and comparisons are not simplified."""
    differences = [x for x in nodes_of(tirx.Sub, func.body) if _is_float(x)]
    zeros = [x for x in nodes_of((tirx.Mul, tirx.Div), func.body) if _is_zero(x.a) or _is_zero(x.b)]
    compared = [x for x in nodes_of(COMPARISONS, func.body) if _is_float(x.a)]
    alone = len(compared) == 1 and not nodes_of(tirx.Not, func.body)
    if not differences and not zeros and not compared:
        return func
    read: dict[int, set[int]] = {}  # what is read by the value bound to a variable
    for bound in nodes_of((tirx.Bind, tirx.Let), func.body):
        read[bound.var.__chandle__()] = _read(bound.value, read)

    def rooted_zeros(x: Any) -> Any:
        if not _is_zero(x.a) and not _is_zero(x.b):
            return x
        # The square roots of 0.0 and -0.0 are themselves, and no rule knows that.
        return type(x)(*(tirx.sqrt(y) if _is_zero(y) else y for y in (x.a, x.b)))

    def has_disjoint_reads(x: Any) -> bool:
        return _read(x.a, read).isdisjoint(_read(x.b, read))

    def difference(x: Any) -> Any:
        if not _is_float(x) or has_disjoint_reads(x):
            return x
        return x.a + tirx.Mul(x.b, tirx.const(-1.0, dtype_of(x)))

    def comparison(x: Any) -> Any:
        equal = isinstance(x, tirx.EQ | tirx.NE) and not has_disjoint_reads(x)
        if not _is_float(x.a) or (alone and not equal and not isinstance(x, tirx.NE)):
            return x
        test = tirx.EQ(x.a, x.b) if isinstance(x, tirx.NE) else x
        if equal:
            test = tirx.And(tirx.LE(x.a, x.b), tirx.LE(x.b, x.a))
        truth = dtype_of(test)  # with as many lanes as the operands
        opaque = tirx.Cast(truth, tirx.Cast(truth.replace("bool", "int8"), test))
        return tirx.Not(opaque) if isinstance(x, tirx.NE) else opaque

    rules = [(tirx.Sub, difference), (tirx.Mul, rooted_zeros), (tirx.Div, rooted_zeros)]
    rules += [(kind, comparison) for kind in COMPARISONS]
    return with_body(func, map_expr(func.body, rules))


def _is_float(expr: Any) -> bool:
    return "float" in dtype_of(expr)


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, tirx.FloatImm) and expr.value == 0


def _read(expr: Any, bound: dict[int, set[int]]) -> set[int]:
    """Handles of the float buffers and variables from which an expression is computed."""
    handles = {load.source.__chandle__() for load in nodes_of(ir.TensorLoad, expr)}
    for var in nodes_of(ir.Var, expr):
        if not tirx.is_buffer_var(var) and _is_float(var):
            handles |= bound.get(var.__chandle__(), {var.__chandle__()})
    return handles
