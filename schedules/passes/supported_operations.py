"""Rewrite operations that TVM's code generators lack to equivalent ones.

Before and after, for booleans, for float16, whose functions LLVM has in part, and for the rest::

    A[i] + B[i]       A[i] or B[i]
    T.max(A[i], B[i]) T.Cast("bool", T.max(T.Cast("int8", A[i]), T.Cast("int8", B[i])))
    T.erf(H[i])       T.Cast("float16", T.erf(T.Cast("float32", H[i])))
    T.fmod(X[i], 2.0) T.Mod(X[i], 2.0)
    T.exp10(X[i])     T.pow(10.0, X[i])
    T.clz(N[i])       T.Select(N[i] == 0, 32, T.clz(N[i]))

On CPUs a computed signed integer is converted to an unsigned one by its bits, since TVM 0.27 fails
if its bounds are negative ("cannot make uint from negative value")::

    T.Cast("uint32", i - 5)    T.Select(i - 5 == 0, 0, T.reinterpret("uint32", i - 5))

with a special case, as TVM also fails on the bits of a known 0 ("requires pointer result type").

Negative constant divisors become positive, since `RenormalizeSplitPattern` of TVM 0.27 replaces
`x // -2 % -1`, which is 0, by `x % 2 // -2`::

    i // -2                    0 - i // 2 - T.Select(i % 2 == 0, 0, 1)
    i % -2                     T.Select(i % 2 == 0, 0, i % 2 - 2)
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.sparse_ir.tir import cast, dtype_of, with_body, zero
from sparsetir.sparse_ir.traversal import map_expr

COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
BOOLEAN = {tirx.Add: tirx.Or, tirx.Mul: tirx.And, tirx.Max: tirx.Or, tirx.Min: tirx.And}
# Operations of float16 for which TVM has no rule.
WIDER = frozenset(
    "acos acosh asin asinh atan atan2 copysign cosh erf exp10 hypot ldexp log1p sinh".split()
)


def supported_operations(func: tirx.PrimFunc, gpu: bool) -> tirx.PrimFunc:
    """A stage-III function with operations that code generators support."""

    def compare(x: Any) -> Any:
        if dtype_of(x.a) != "bool":
            return x
        return type(x)(tirx.Cast("int8", x.a), tirx.Cast("int8", x.b))

    rules = [(kind, compare) for kind in COMPARISONS]
    rules += [
        (kind, lambda x, as_=as_: as_(x.a, x.b) if dtype_of(x) == "bool" else x)
        for kind, as_ in BOOLEAN.items()
    ]
    rules += [(tirx.FloorDiv, _divided), (tirx.FloorMod, _divided)]
    rules += [(ir.Call, _call), *([] if gpu else [(tirx.Cast, _cast)])]
    return with_body(func, map_expr(func.body, rules))


def _divided(x: Any) -> Any:
    least = -(1 << tvm.DataType(dtype_of(x)).bits - 1)
    if not isinstance(x.b, tirx.IntImm) or not least < int(x.b) < 0:
        return x
    by, none = tirx.IntImm(x.b.ty, -int(x.b)), zero(dtype_of(x))
    rest = tirx.floormod(x.a, by)
    if isinstance(x, tirx.FloorMod):
        return tirx.Select(tirx.EQ(rest, none), none, rest - by)
    more = tirx.Select(tirx.EQ(rest, none), none, tirx.IntImm(x.b.ty, 1))
    return none - tirx.floordiv(x.a, by) - more


def _cast(x: Any) -> Any:
    dtype, of = dtype_of(x), dtype_of(x.value)
    if not (dtype.startswith("uint") and of.startswith("int") and "x" not in dtype):
        return x
    if isinstance(x.value, ir.TensorLoad | tirx.IntImm | ir.Var):
        return x
    return _bits_of(dtype, cast(x.value, dtype[1:]))


def _bits_of(dtype: str, value: Any) -> Any:
    none = tirx.EQ(value, zero(dtype_of(value)))
    return tirx.Select(none, zero(dtype), tirx.reinterpret(dtype, value))


def _call(x: Any) -> Any:
    name, dtype = str(getattr(x.op, "name", "")).rpartition(".")[2], str(getattr(x.ty, "dtype", ""))
    if dtype in ("float16", "bfloat16") and (name in WIDER or name == "fmod"):
        args = [cast(a, "float32") if dtype_of(a) == dtype else a for a in x.args]
        ty = tirx.Var("x", "float32").ty
        return tirx.Cast(dtype, _call(ir.Call(x.op, args, x.attrs, x.ty_args, ret_ty=ty)))
    if name == "reinterpret" and dtype_of(x.args[0]).startswith(("int", "uint")):
        return _bits_of(dtype, x.args[0])
    if name == "fmod":
        return tirx.Mod(*x.args)
    if name == "exp10":
        return tirx.pow(tirx.const(10.0, dtype), x.args[0])
    if name == "clz":
        (value,) = x.args
        bits = tvm.DataType(dtype_of(value)).bits
        unsigned = tirx.Cast(f"uint{max(bits, 32)}", tirx.Cast(f"uint{bits}", value))
        count = ir.Call(x.op, [unsigned], x.attrs, x.ty_args, ret_ty=unsigned.ty)
        zeros = tirx.Cast(dtype, count) - tirx.const(max(32 - bits, 0), dtype)
        none = tirx.EQ(value, tirx.const(0, dtype_of(value)))
        return tirx.if_then_else(none, tirx.const(bits, dtype), zeros)
    return x
