"""Arithmetic of bfloat16 in float32, rounded where the program rounds.

TVM computes in float32, too, but drops casts to bfloat16, so that 257 stays 257, and mishandles
values bound to variables: it reads their bits as numbers. Before::

    v: T.bfloat16 = T.Cast("bfloat16", A[i])
    C[i] = T.Cast("float32", v * B[i])

After, where `rounded` returns the upper 16 bits of a float32, and `wide` a float32 with these::

    v: T.float32 = rounded(A[i])
    C[i] = rounded(v * wide(B[i]))

Casts, variables and arrays round; operands of arithmetic may be more precise, as in C. Arrays that
the function allocates are float32, as in TVM, and a sum in one (`acc[k] = acc[k] + ..`) is rounded
when it is read. TVM rounds values stored to parameters. (TVM 0.27: `BF16ComputeLegalize`; the
pass may go when `tests/schedules/test_ieee_floats.py` passes without it.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.nodes import buffer_var, loads_of, nodes_of, same_indices, stores_of
from sparsetir.sparse_ir.tir import cast, dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr

BFLOAT = "bfloat16"
SMALL = ("bool", "int8", "uint8")  # integer types whose numbers bfloat16 represents exactly
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)
COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def rounded_bfloat16(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function that only loads and stores bfloat16, without arithmetic on it."""
    kinds = (tirx.Cast, tirx.FloatImm, ir.TensorLoad)
    if not any(_is_bfloat(x) for x in nodes_of(kinds, func.body)):
        return func
    return with_body(func, _Rounding(func).body())


class _Rounding:
    """Rewrites expressions of bfloat16 to ones of float32, operands first.

    variables : the replacements of variables and arrays
    sums : arrays that hold sums in float32
    stands : for an expression that replaces one of bfloat16, whether it is rounded
    before : for such an expression, or a rounded one, the unrounded operand
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        buffers = [v for b in nodes_of(s_tir.SBlock, func.body) for v in b.alloc_buffers]
        buffers += [s.buffer for s in nodes_of(tirx.AllocBuffer, func.body)]
        narrow = _addressed(func)
        self.variables: dict[Any, Any] = {
            v: buffer_var(v.ty.shape, "float32", v.name, v.ty.storage_scope)
            for v in buffers
            if _is_bfloat(v) and v not in narrow
        }
        updated = {s.buffer for s in stores_of(func.body) if _is_update(s)}
        self.sums = {new for old, new in self.variables.items() if old in updated}
        self.rounded_by_handle: dict[int, bool] = {}
        self.before: dict[int, Any] = {}
        self.kept: list[Any] = []  # keeps expressions alive, so that handles stay unique

    def body(self) -> Any:
        """The function's body, rewritten."""
        binary = [(kind, self._binary) for kind in (*ARITHMETIC, *COMPARISONS)]
        return map_expr(self.func.body, [
            (ir.Var, self._variable),
            (tirx.FloatImm, self._constant),
            (ir.TensorLoad, self._load),
            (tirx.Cast, self._cast),
            (tirx.Select, self._select),
            (tirx.Broadcast, self._broadcast),
            (ir.Call, self._call),
            (tirx.Let, self._let),
            (tirx.Bind, lambda x: tirx.Bind(x.var, self._rounded(x.value), x.span)),
            (tirx.BufferStore, self._store),
            *binary,
        ])  # fmt: skip

    def _keep(self, new: Any, rounded: bool = True, before: Any = None) -> Any:
        self.kept.append(new)
        self.rounded_by_handle[new.__chandle__()] = rounded
        if before is not None:
            self.before[new.__chandle__()] = before
        return new

    def _is_rounded(self, *parts: Any) -> bool:
        return all(self.rounded_by_handle.get(x.__chandle__(), True) for x in parts)

    def _rounded(self, x: Any) -> Any:
        """An expression, rounded if it replaces one of bfloat16 and is not rounded yet."""
        return x if self._is_rounded(x) else self._keep(_rounded(x), before=x)

    def _origin(self, x: Any) -> Any:
        return self.before.get(x.__chandle__(), x)

    def _variable(self, x: Any) -> Any:
        if x not in self.variables and not tirx.is_buffer_var(x) and _is_bfloat(x):
            is_param = x in self.func.params
            wide = tirx.Cast("float32", x) if is_param else tirx.Var(x.name, _as(x, "float32"))
            self.variables[x] = self._keep(wide)
        return self.variables.get(x, x)

    def _constant(self, x: Any) -> Any:
        if not _is_bfloat(x):
            return x
        return self._keep(tirx.FloatImm("float32", float(np.dtype(BFLOAT).type(x.value))))

    def _load(self, x: Any) -> Any:
        if not _is_bfloat(x):
            return x
        load = tirx.BufferLoad(x.source, x.indices)
        if _is_bfloat(load):
            return self._keep(_wide(load), before=load)
        return self._keep(load, x.source not in self.sums)

    def _cast(self, x: Any) -> Any:
        if not _is_bfloat(x):  # unchanged nodes are kept, as they may have the type of an array
            rounded = x.value.__chandle__() in self.rounded_by_handle
            return cast(self._rounded(x.value), dtype_of(x)) if rounded else x
        value = cast(x.value, _as(x, "float32"))
        if dtype_of(x.value) in SMALL or self.rounded_by_handle.get(value.__chandle__(), False):
            return self._keep(value)
        return self._keep(_rounded(value), before=value)

    def _binary(self, x: Any) -> Any:
        if isinstance(x, COMPARISONS):
            return type(x)(self._rounded(x.a), self._rounded(x.b))
        return self._keep(type(x)(x.a, x.b), rounded=False) if _is_bfloat(x) else x

    def _select(self, x: Any) -> Any:
        if not _is_bfloat(x):
            return x
        new = tirx.Select(x.condition, x.true_value, x.false_value)
        return self._keep(new, self._is_rounded(x.true_value, x.false_value))

    def _broadcast(self, x: Any) -> Any:
        if not _is_bfloat(x):
            return x
        return self._keep(tirx.Broadcast(x.value, x.lanes), self._is_rounded(x.value))

    def _let(self, x: Any) -> Any:
        new = tirx.Let(x.var, self._rounded(x.value), x.body, x.span)
        return self._keep(new, self._is_rounded(x.body)) if _is_bfloat(x) else new

    def _call(self, x: Any) -> Any:
        name = str(getattr(x.op, "name", "")).rpartition(".")[2]
        if name == "address_of":
            return ir.Call(x.op, [self._origin(a) for a in x.args], x.attrs, x.ty_args, ret_ty=x.ty)
        if name == "reinterpret" and x.args[0].__chandle__() in self.rounded_by_handle:
            return (
                x
                if _is_bfloat(x)
                else tirx.reinterpret(dtype_of(x), _bits(self._rounded(x.args[0])))
            )
        if not _is_bfloat(x) or not x.args:
            return x
        if name == "reinterpret":
            return self._keep(_wide(x.args[0]))
        ty = tirx.Var("x", _as(x, "float32")).ty
        new = ir.Call(x.op, x.args, x.attrs, x.ty_args, x.span, ret_ty=ty)
        return self._keep(new, name == "if_then_else" and self._is_rounded(*x.args[1:]))

    def _store(self, x: Any) -> Any:
        value = x.value
        if value.__chandle__() in self.rounded_by_handle:
            narrow = _is_bfloat(x.buffer)
            was = self._origin(value)
            if narrow or x.buffer in self.sums and not _is_bfloat(was):
                value = was  # rounded when it is stored, or not at all
            if narrow and not _is_bfloat(value):
                value = tirx.Cast(_as(value, BFLOAT), value)
            elif not narrow and x.buffer not in self.sums:
                value = self._rounded(value)
        if _is_update(x):
            value = map_expr(value, [(ir.Call, self._sum)])
        before: list[Any] = []
        if isinstance(value, tirx.Cast) and nodes_of(tirx.Let, value):
            # TVM 0.27 duplicates rounded values, and rejects variables of an exponential twice in
            # vectors; may go when the test of exponentials in test_ieee_floats.py passes without.
            wide = tirx.Var("wide", dtype_of(value.value))
            before, value = [tirx.Bind(wide, value.value)], tirx.Cast(dtype_of(value), wide)
        store = tirx.BufferStore(x.buffer, value, x.indices, span=x.span)
        return tirx.SeqStmt([*before, store]) if before else store

    def _sum(self, x: Any) -> Any:
        """A sum, not rounded."""
        was = self._origin(x)
        return was if isinstance(was, ir.TensorLoad) and was.source in self.sums else x


def _is_bfloat(x: Any) -> bool:
    return str(getattr(x.ty, "dtype", "")).startswith(BFLOAT)


def _as(x: Any, dtype: str) -> str:
    """A type with as many lanes as an expression has."""
    lanes = tvm.DataType(dtype_of(x)).lanes
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _is_update(store: Any) -> bool:
    """Whether a store reads its own element, as a sum does."""
    loads = loads_of(store.value, store.buffer)
    return any(same_indices(load.indices, store.indices) for load in loads)


def _addressed(func: tirx.PrimFunc) -> set[Any]:
    """The arrays whose data pointer calls take, so that TVM cannot see the type."""
    args = [a for call in nodes_of(ir.Call, func.body) for a in call.args]
    return {a for a in args if isinstance(a, ir.Var) and tirx.is_buffer_var(a)}


def _number(x: Any, n: int) -> Any:
    """An integer as a constant of 32 bits, for each lane of an expression."""
    lanes = tvm.DataType(dtype_of(x)).lanes
    one = tirx.IntImm("uint32", n)
    return one if lanes == 1 else tirx.Broadcast(one, lanes)


def _wide(x: Any) -> Any:
    """The 16 bits of a bfloat16 number as a float32."""
    bits = tirx.Cast(_as(x, "uint32"), tirx.reinterpret(_as(x, "uint16"), x))
    return tirx.reinterpret(_as(x, "float32"), bits << _number(x, 16))


def _bits(x: Any) -> Any:
    """The upper 16 bits of a float32."""
    return tirx.Cast(_as(x, "uint16"), tirx.reinterpret(_as(x, "uint32"), x) >> _number(x, 16))


def _rounded(value: Any) -> Any:
    """A float32 rounded to the nearest bfloat16, ties to even; NaN is preserved."""
    # Without a Let: TVM 0.27 rebinds its variable wherever it simplifies the value, which is an
    # error if the value has another form there. LLVM computes the bits once.
    bits = tirx.reinterpret(_as(value, "uint32"), value)
    n = lambda number: _number(value, number)  # noqa: E731
    up = bits + n(0x7FFF) + (bits >> n(16)) % n(2)
    nan = (bits & n(0x7FFFFFFF)) > n(0x7F800000)
    near = tirx.Select(nan, bits | n(0x400000), up) & n(0xFFFF0000)
    return tirx.reinterpret(dtype_of(value), near)
