"""Expressions and statements of plain TIR as Python closures over NumPy scalars."""

from __future__ import annotations

import builtins
import ctypes
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import ir, tirx

from sparsetir.sparse_ir.exact import arithmetic_of, fits_signed, inlined, is_choice, is_signed
from sparsetir.sparse_ir.interpret_storage import Storage, Variable, garbage

Thunk = Callable[[], Any]


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class Evaluator:
    """Compiles TIR to closures, once each; values have the type of their expression.

    name : the function's name, for messages
    variables, storage : keyed by the address of the TIR variable
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.variables: dict[int, Variable] = {}
        self.storage: dict[int, Storage] = {}

    def variable(self, var: Any) -> Variable:
        """The cell that holds the value of a TIR variable."""
        return self.variables.setdefault(hash(var), Variable())

    def place(self, var: Any, indices: Any) -> tuple[Storage, Callable[[], int | None]]:
        """The storage that an access refers to; a closure for its offset (None: absent)."""
        raise NotImplementedError

    # Expressions

    def expr(self, node: Any) -> Thunk:
        """A closure that computes an expression as a NumPy scalar."""
        for kind, handler in _EXPRESSIONS.items():
            if isinstance(node, kind):
                return handler(self, node)
        compute = _BINARY.get(type(node))
        if compute is None:
            raise NotImplementedError(
                f"{self.name}: cannot interpret expression {type(node).__name__}: {node}"
            )
        a, b = self.expr(node.a), self.expr(node.b)
        return lambda: compute(a(), b())

    def coordinate(self, node: Any) -> Callable[[], int]:
        """A closure that computes an index as an unbounded integer (`exact.py`)."""
        if isinstance(node, ir.Var):
            variable = self.variable(node)
            return lambda: int(variable.value) if variable.exact is None else variable.exact
        if is_signed(node):
            if isinstance(node, tirx.Cast) and fits_signed(node.value):
                return self.coordinate(node.value)
            if isinstance(node, tirx.Let):
                return self.coordinate(inlined(node))
            if isinstance(node, tirx.Select):
                return self._choose(
                    node.condition, node.true_value, node.false_value, self.coordinate
                )
            if is_choice(node):
                condition, yes, no = node.args
                return self._choose(condition, yes, no, self.coordinate)
            compute = arithmetic_of(node)
            if compute is not None:
                a, b = self.coordinate(node.a), self.coordinate(node.b)
                return lambda: compute(a(), b())
        value = self.expr(node)
        return lambda: int(value())

    def _constant(self, node: Any) -> Thunk:
        value = _numpy_dtype(node).type(node.value)
        return lambda: value

    def _var(self, node: Any) -> Thunk:
        variable = self.variable(node)
        return lambda: variable.value

    def _load(self, node: Any) -> Thunk:
        storage, offset = self.place(node.source, node.indices)
        zero = storage.data.dtype.type(0)

        def run() -> Any:
            at = offset()
            return zero if at is None else storage.data[at]

        return run

    def _cast(self, node: Any) -> Thunk:
        value, dtype = self.expr(node.value), _numpy_dtype(node)
        return lambda: np.asarray(value()).astype(dtype)[()]

    def _choose(self, condition: Any, yes: Any, no: Any, what: Any = None) -> Thunk:
        what = what or self.expr
        test, then, other = self.expr(condition), what(yes), what(no)
        return lambda: then() if test() else other()

    def _let(self, node: Any) -> Thunk:
        variable, value, body = self.variable(node.var), self.expr(node.value), self.expr(node.body)

        def run() -> Any:
            variable.value = value()
            return body()

        return run

    def _not(self, node: Any) -> Thunk:
        value = self.expr(node.a)
        return lambda: np.bool_(not value())

    def _invert(self, node: Any) -> Thunk:
        value = self.expr(node.a)
        return lambda: ~value()

    def _call(self, node: Any) -> Thunk:
        name = str(getattr(node.op, "name", node.op)).rsplit(".", 1)[-1]
        if name == "if_then_else":
            return self._choose(*node.args)
        if name in _JUMPS:
            return _JUMPS[name]
        if name in ("call_extern", "call_pure_extern"):
            return self._extern(node)
        if name == "reinterpret":
            value, dtype = self.expr(node.args[0]), _numpy_dtype(node)
            return lambda: np.asarray(value()).view(dtype)[()]
        if name not in _INTRINSICS:
            raise NotImplementedError(f"{self.name}: cannot interpret call {name}: {node}")
        compute, args = _INTRINSICS[name], [self.expr(a) for a in node.args]
        result = _numpy_dtype(node).type
        return lambda: result(compute(*(a() for a in args)))

    def _extern(self, node: Any) -> Thunk:
        """A call of a C function of numbers that the process provides."""
        name, *args = node.args
        function = getattr(ctypes.CDLL(None), str(name.value), None)
        types = [str(getattr(x.ty, "dtype", "handle")) for x in (node, *args)]
        if function is None or "handle" in types:
            raise NotImplementedError(
                f"{self.name}: cannot interpret the C function '{name.value}' of {types[1:]}"
            )
        function.restype, *function.argtypes = map(np.ctypeslib.as_ctypes_type, types)
        thunks, result = [self.expr(a) for a in args], _numpy_dtype(node).type
        return lambda: result(function(*(t().item() for t in thunks)))

    # Statements

    def stmt(self, node: Any) -> Thunk:
        """A closure that executes a statement."""
        for kind, handler in STATEMENTS.items():
            if isinstance(node, kind):
                return handler(self, node)
        raise NotImplementedError(f"{self.name}: cannot interpret statement {type(node).__name__}")

    def _sequence(self, node: Any) -> Thunk:
        steps = [self.stmt(s) for s in node.seq]

        def run() -> None:
            for step in steps:
                step()

        return run

    def _store(self, node: Any) -> Thunk:
        storage, offset = self.place(node.buffer, node.indices)
        value = self.expr(node.value)

        def run() -> None:
            result, at = value(), offset()
            if at is not None:
                storage.data[at] = result

        return run

    def _for(self, node: Any) -> Thunk:
        variable, dtype = self.variable(node.loop_var), _numpy_dtype(node.loop_var)
        first, extent = self.expr(node.min), self.expr(node.extent)
        step = (lambda: 1) if node.step is None else self.expr(node.step)
        body = _loop_body(self.stmt(node.body))

        def run() -> None:
            start = int(first())
            for value in range(start, start + int(extent()), int(step())):
                variable.value = dtype.type(value)
                if not body():
                    break

        return run

    def _while(self, node: Any) -> Thunk:
        condition, body = self.expr(node.condition), _loop_body(self.stmt(node.body))

        def run() -> None:
            while condition() and body():
                pass

        return run

    def _if(self, node: Any) -> Thunk:
        condition, then = self.expr(node.condition), self.stmt(node.then_case)
        other = self.stmt(node.else_case) if node.else_case is not None else lambda: None
        return lambda: then() if condition() else other()

    def _bind(self, node: Any) -> Thunk:
        variable, value = self.variable(node.var), self.expr(node.value)
        number = self.coordinate(node.value) if is_signed(node.var) else lambda: None

        def run() -> None:
            variable.value, variable.exact = value(), number()

        return run

    def _alloc(self, node: Any) -> Thunk:
        shape, dtype = [self.expr(n) for n in node.buffer.ty.shape], str(node.buffer.ty.dtype)
        storage = Storage(str(node.buffer.name), garbage(0, dtype), None, [])
        self.storage[hash(node.buffer)] = storage

        def run() -> None:
            storage.dims = [int(n()) for n in shape]
            storage.data = garbage(math.prod(storage.dims), dtype)

        return run

    def _assert(self, node: Any) -> Thunk:
        condition = self.expr(node.condition)
        message = "".join(str(part.value) for part in node.message_parts)
        error = getattr(builtins, str(node.error_kind.value), RuntimeError)

        def run() -> None:
            if not condition():
                raise error(f"{self.name}: {message}")

        return run


def _loop_body(body: Thunk) -> Callable[[], bool]:
    """Run one iteration of a loop; return False if it breaks."""

    def run() -> bool:
        try:
            body()
        except _Continue:
            pass
        except _Break:
            return False
        return True

    return run


def _numpy_dtype(node: Any) -> np.dtype:
    return np.dtype(str(node.ty.dtype))


def _truncdiv(a: Any, b: Any) -> Any:
    """Division as `/` in C: integers round towards zero."""
    if a.dtype.kind not in "iu":
        return a / b
    _check_divisor(b)
    quotient = abs(int(a)) // abs(int(b))
    return np.asarray(quotient if (a < 0) == (b < 0) else -quotient).astype(a.dtype)[()]


def _truncmod(a: Any, b: Any) -> Any:
    _check_divisor(b)
    return np.fmod(a, b)


def _floordiv(a: Any, b: Any) -> Any:
    _check_divisor(b)
    return a // b


def _floormod(a: Any, b: Any) -> Any:
    _check_divisor(b)
    return a % b


def _check_divisor(b: Any) -> None:
    if b.dtype.kind in "iu" and not b:
        raise ZeroDivisionError("integer division by zero")


_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Div: _truncdiv,
    tirx.Mod: _truncmod,
    tirx.FloorDiv: _floordiv,
    tirx.FloorMod: _floormod,
    tirx.Min: lambda a, b: a if a < b else b,
    tirx.Max: lambda a, b: a if a > b else b,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.BitwiseAnd: operator.and_,
    tirx.BitwiseOr: operator.or_,
    tirx.BitwiseXor: operator.xor,
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
}


def _leave_loop() -> Any:
    raise _Break


def _next_turn() -> Any:
    raise _Continue


# Those that NumPy calls the same, then the others.
_INTRINSICS: dict[str, Callable[..., Any]] = {
    name: getattr(np, name)
    for name in (
        "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh fmod hypot copysign "
        "nextafter abs floor ceil trunc isnan isinf isfinite"
    ).split()
} | {
    "likely": lambda x: x,
    "tail": lambda x, end, start=0: start <= x < end,
    "at_most": min,
    "popcount": lambda x: (int(x) & ((1 << 8 * x.itemsize) - 1)).bit_count(),
    "clz": lambda x: 8 * x.itemsize - (int(x) & ((1 << 8 * x.itemsize) - 1)).bit_length(),
    "exp10": lambda x: x.dtype.type(10) ** x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": lambda x: math.erf(float(x)),
    "pow": operator.pow,
    "atan2": np.arctan2,
    "ldexp": lambda x, n: np.ldexp(x, int(n)),
    "fma": lambda x, y, z: x * y + z,
    "fabs": np.abs,
    "round": np.rint,
    "nearbyint": np.rint,
}

_JUMPS: dict[str, Thunk] = {"break_loop": _leave_loop, "continue_loop": _next_turn}

_EXPRESSIONS: dict[Any, Callable[[Evaluator, Any], Thunk]] = {
    tirx.IntImm: Evaluator._constant,
    tirx.FloatImm: Evaluator._constant,
    ir.Var: Evaluator._var,
    ir.TensorLoad: Evaluator._load,
    tirx.Cast: Evaluator._cast,
    tirx.Select: lambda self, n: self._choose(n.condition, n.true_value, n.false_value),
    tirx.And: lambda self, n: self._choose(n.a, n.b, tirx.IntImm("bool", 0)),
    tirx.Or: lambda self, n: self._choose(n.a, tirx.IntImm("bool", 1), n.b),
    tirx.Not: Evaluator._not,
    tirx.BitwiseNot: Evaluator._invert,
    tirx.Let: Evaluator._let,
    ir.Call: Evaluator._call,
}

STATEMENTS: dict[Any, Callable[[Any, Any], Thunk]] = {
    tirx.SeqStmt: Evaluator._sequence,
    tirx.BufferStore: Evaluator._store,
    tirx.For: Evaluator._for,
    tirx.While: Evaluator._while,
    tirx.IfThenElse: Evaluator._if,
    tirx.Bind: Evaluator._bind,
    tirx.AllocBuffer: Evaluator._alloc,
    tirx.AssertStmt: Evaluator._assert,
    tirx.AttrStmt: lambda self, n: self.stmt(n.body),
    tirx.Evaluate: lambda self, n: self.expr(n.value),
}
