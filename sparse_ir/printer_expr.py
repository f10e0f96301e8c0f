"""Names and expressions of the stage-I printer.

TVM's operators fold and simplify (`x + 0` is `x`), so the printer evaluates each operator and
intrinsic: it prints the readable form only if that rebuilds the node, else a form that constructs
the node directly.
"""

from __future__ import annotations

import contextlib
import json
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.errors import IllFormedError

RESERVED = {"T", "TIR", *keyword.kwlist}
ATOM = 12

# node -> (symbol, precedence, function that the symbol evaluates to)
ARITHMETIC: dict[type, tuple[str, int, Callable[[Any, Any], Any]]] = {
    tirx.Add: ("+", 9, operator.add),
    tirx.Sub: ("-", 9, operator.sub),
    tirx.Mul: ("*", 10, operator.mul),
    tirx.Div: ("/", 10, operator.truediv),
    tirx.FloorDiv: ("//", 10, operator.floordiv),
    tirx.FloorMod: ("%", 10, operator.mod),
    tirx.expr.BitwiseAnd: ("&", 7, operator.and_),
    tirx.expr.BitwiseOr: ("|", 5, operator.or_),
    tirx.expr.BitwiseXor: ("^", 6, operator.xor),
    tirx.expr.LShift: ("<<", 8, operator.lshift),
    tirx.expr.RShift: (">>", 8, operator.rshift),
}
COMPARE: dict[type, str] = {
    tirx.EQ: "==",
    tirx.NE: "!=",
    tirx.LT: "<",
    tirx.LE: "<=",
    tirx.GT: ">",
    tirx.GE: ">=",
}
LOGIC: dict[type, tuple[str, int]] = {tirx.And: ("and", 2), tirx.Or: ("or", 1)}
CALLED: dict[type, str] = {
    tirx.Div: "truncdiv",
    tirx.Mod: "truncmod",
    tirx.Min: "min",
    tirx.Max: "max",
}


def unknown(node: Any, where: str) -> IllFormedError:
    """The error for a node that has no text."""
    kind = type(node)
    return IllFormedError(f"{where}: cannot print a node of type {kind.__module__}.{kind.__name__}")


def quote(text: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _is_imm(node: Any) -> bool:
    return isinstance(node, tirx.IntImm | tirx.FloatImm)


def is_int32(node: Any) -> bool:
    """Whether `node` is an int32 number."""
    return isinstance(node, tirx.IntImm) and dtype_of(node) == "int32"


def dtype_of(node: Any) -> str:
    """The type of an expression as `T` names it."""
    return str(node.ty.dtype) if isinstance(node.ty, ir.PrimType) else str(node.ty)


def _python_literal(node: Any) -> str | None:
    """A number as plain Python, None for infinities and NaN."""
    if isinstance(node, tirx.FloatImm) and not math.isfinite(node.value):
        return None
    return repr(node.value)


def _rebuilds(node: Any, build: Callable[[], Any]) -> bool:
    """Whether evaluating a readable form rebuilds `node`; False if evaluation fails."""
    try:
        built = build()
    except Exception:  # TVM raises many types; each means no
        return False
    return isinstance(built, tvm_ffi.Object) and tvm_ffi.structural_equal(built, node)


def _operands_of(node: Any) -> list[Any]:
    return [node.a] if isinstance(node, tirx.Not) else [node.a, node.b]


def _folds(node: Any) -> bool:
    """Whether operators may simplify the node: TVM's parser may or may not fold numbers.

    That depends on which other dialects it has parsed before in the process.
    """
    if type(node) in COMPARE:
        return _is_imm(node.a) and _is_imm(node.b)
    logic = type(node) in LOGIC or isinstance(node, tirx.Not)
    return logic and any(map(_is_imm, _operands_of(node)))


class Names:
    """Unique names for the variables in scope."""

    def __init__(self) -> None:
        self._of: dict[Any, str] = {}
        self._scopes: list[set[str]] = [set(RESERVED)]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A scope: names defined inside may be reused after it."""
        self._scopes.append(set())
        yield
        self._scopes.pop()

    def fresh(self, hint: str) -> str:
        """An identifier like `hint` that is unused in scope."""
        base = re.sub(r"\W", "_", hint, flags=re.ASCII) or "v"
        base = f"v{base}" if base[0].isdigit() else base
        name, count = base, 0
        while any(name in s for s in self._scopes):
            count += 1
            name = f"{base}_{count}"
        self._scopes[-1].add(name)
        return name

    def define(self, var: Any) -> str:
        """Name a variable that becomes visible here."""
        self._of[var] = self.fresh(var.name)
        return self._of[var]

    def get(self, var: Any) -> str:
        """The name of a visible variable."""
        if var not in self._of:
            raise IllFormedError(f"variable '{var.name}' is used but not defined")
        return self._of[var]


class ExprPrinter:
    """Prints expressions; `expr` adds parentheses where the context needs them."""

    def __init__(self, names: Names) -> None:
        from sparsetir.sparse_ir import script as dialect

        self.names = names
        self.dialect: Any = dialect

    def expr(self, node: Any, precedence: int = 0) -> str:
        """Print for a context of this operator precedence; immediates carry types."""
        text, inner = self._expr(node)
        return f"({text})" if inner < precedence else text

    def index(self, node: Any) -> str:
        """Print for a context in which a plain integer is an int32."""
        return repr(node.value) if is_int32(node) else self.expr(node)

    def indices(self, nodes: Sequence[Any]) -> str:
        """The text between the brackets of a load or store."""
        return ", ".join(self.index(n) for n in nodes) or "()"

    def sizes(self, nodes: Sequence[Any]) -> str:
        """A tuple of sizes."""
        return (
            "(" + ", ".join(self.index(n) for n in nodes) + ("," if len(nodes) == 1 else "") + ")"
        )

    def _expr(self, node: Any) -> tuple[str, int]:
        kind = type(node)
        if isinstance(node, ir.Var):
            return self.names.get(node), ATOM
        if _is_imm(node):
            return self._immediate(node), ATOM
        if isinstance(node, ir.TensorLoad):
            return f"{self.names.get(node.source)}[{self.indices(node.indices)}]", ATOM
        if _folds(node):
            return self._plain(kind.__name__, *_operands_of(node)), ATOM
        if kind in COMPARE:
            a, b = self._operands(node, lambda a, b: kind(a, b), 5, 5)
            return f"{a} {COMPARE[kind]} {b}", 4
        if kind in LOGIC:
            symbol, level = LOGIC[kind]
            return f"{self.expr(node.a, level)} {symbol} {self.expr(node.b, level + 1)}", level
        if isinstance(node, tirx.Not):
            return f"not {self.expr(node.a, 3)}", 3
        if kind in ARITHMETIC and _rebuilds(node, lambda: ARITHMETIC[kind][2](node.a, node.b)):
            symbol, level, build = ARITHMETIC[kind]
            a, b = self._operands(node, build, level, level + 1)
            return f"{a} {symbol} {b}", level
        if kind in CALLED:
            return self._called(node, CALLED[kind]), ATOM
        if isinstance(node, tirx.Cast):
            return f'T.Cast("{dtype_of(node)}", {self.expr(node.value)})', ATOM
        if isinstance(node, tirx.Select):
            return self._plain("Select", node.condition, node.true_value, node.false_value), ATOM
        if isinstance(node, tirx.Broadcast):
            return f"T.Broadcast({self.expr(node.value)}, {self.index(node.lanes)})", ATOM
        if isinstance(node, tirx.Ramp):
            base, stride = self.expr(node.base), self.expr(node.stride)
            return f"T.Ramp({base}, {stride}, {self.index(node.lanes)})", ATOM
        if isinstance(node, tirx.expr.BitwiseNot):
            return self._plain("BitwiseNot", node.a), ATOM
        if kind in ARITHMETIC:
            return self._plain(kind.__name__, node.a, node.b), ATOM
        if isinstance(node, ir.Call):
            return self._call(node), ATOM
        raise unknown(node, "expression")

    def _plain(self, name: str, *args: Any) -> str:
        return f"T.{name}({', '.join(self.expr(a) for a in args)})"

    def _immediate(self, node: Any) -> str:
        """`T.float32(1.0)`; longer forms for extreme values that TVM does not parse so."""
        value, dtype = node.value, dtype_of(node)
        if dtype == "bool":
            value = bool(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        constructor = (type(node).__name__, (dtype, value))
        for name, args in ((dtype, (value,)), ("max_value", (dtype,)), constructor):
            if _rebuilds(node, lambda n=name, a=args: getattr(self.dialect, n)(*a)):
                return f"T.{name}({', '.join(self._argument(a) for a in args)})"
        raise IllFormedError(f"cannot print the number {value} of type {dtype}")

    def _operands(
        self, node: Any, build: Callable[[Any, Any], Any], left: int, right: int
    ) -> tuple[str, str]:
        """Both sides of an operator; one number may be plain Python if the result is the same."""
        a, b = node.a, node.b
        if _is_imm(b) and not _is_imm(a) and self._plain_number(node, lambda: build(a, b.value), b):
            return self.expr(a, left), repr(b.value)
        if _is_imm(a) and not _is_imm(b) and self._plain_number(node, lambda: build(a.value, b), a):
            return repr(a.value), self.expr(b, right)
        return self.expr(a, left), self.expr(b, right)

    def _plain_number(self, node: Any, build: Callable[[], Any], number: Any) -> bool:
        if _python_literal(number) is None or dtype_of(number) == "bool":
            return False
        return type(node) in COMPARE or _rebuilds(node, build)

    def _called(self, node: Any, name: str) -> str:
        if not _rebuilds(node, lambda: getattr(self.dialect, name)(node.a, node.b)):
            name = type(node).__name__
        return self._plain(name, node.a, node.b)

    def _call(self, node: Any) -> str:
        """`T.name(args)`, with the result type first if the function needs it."""
        if not isinstance(node.op, ir.Op):
            raise unknown(node.op, "callee")
        if node.op.name == "tirx.buffer_data":
            return f"{self.names.get(node.args[0])}.data"
        dtype = dtype_of(node)
        typed = [a.value if isinstance(a, ir.StringImm) else a for a in node.args]
        plain = [a.value if is_int32(a) else a for a in typed]
        printed = node.op.get_attr("TScriptPrinterName")
        last = node.op.name.rpartition(".")[2]
        forms = [(n, p) for n in dict.fromkeys([str(printed or last), last]) for p in ([], [dtype])]
        for name, first in [*forms, ("call_intrin", [dtype, node.op.name])]:
            for args in (plain, typed):
                values = [*first, *args]
                if _rebuilds(
                    node, lambda n=name, v=values: operator.attrgetter(n)(self.dialect)(*v)
                ):
                    return f"T.{name}({', '.join(self._argument(v) for v in values)})"
        raise IllFormedError(f"cannot print the call of {node.op.name} with type {node.ty}")

    def _argument(self, value: Any) -> str:
        if isinstance(value, str):
            return quote(value)
        return repr(value) if isinstance(value, int | float) else self.expr(value)

    def literal(self, value: Any, where: str) -> str:
        """The text of an attribute or annotation value."""
        if isinstance(value, str):
            return quote(value)
        if value is None or isinstance(value, bool | int):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, Mapping):
            items = [
                f"{self.literal(k, where)}: {self.literal(v, where)}" for k, v in value.items()
            ]
            return "{" + ", ".join(items) + "}"
        if isinstance(value, Sequence):
            return "[" + ", ".join(self.literal(v, where) for v in value) + "]"
        if ir.is_prim_expr(value):
            return self.expr(value)
        raise unknown(value, where)
