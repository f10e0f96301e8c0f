"""Stage-I functions, and modules that mix stages, as text that parses back.

Parsing the text of :func:`script` gives a structurally equal function. Expressions and names are
in :mod:`sparsetir.sparse_ir.printer_expr`.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.tirx.script import builder as tir_builder

from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    entry_text,
)
from sparsetir.sparse_ir.open_axes import is_open
from sparsetir.sparse_ir.printer_expr import ExprPrinter, Names, dtype_of, is_int32, quote, unknown

HEADER = "# from tvm.script import sparse_tir as T\n"
WIDTH = 100
LOOPS = {0: "serial", 1: "parallel", 2: "vectorized", 3: "unroll"}


def script(func: SparseFunc) -> str:
    """The function as text; `from_source` turns it into a structurally equal function.

    Raises IllFormedError for a node that the language cannot express, naming it.
    """
    return HEADER + "\n" + _FunctionPrinter(func, None).text()


def module_script(mod: ir.IRModule) -> str:
    """A module of stage-I functions and PrimFuncs as text that `from_source` parses back.

    TVM prints the PrimFuncs: their decorator says `TIR.prim_func`, their bodies use `T`.

    Parameters
    ----------
    mod : IRModule
        The module.

    Returns
    -------
    str
    """
    ours: list[str] = []
    others: dict[Any, Any] = {}
    for var, func in mod.functions.items():
        if isinstance(func, SparseFunc):
            ours.append(_FunctionPrinter(func, var.name_hint).text())
        elif isinstance(func, tirx.PrimFunc):
            others[var] = func
        else:
            raise unknown(func, f"function '{var.name_hint}'")
    rest = ir.IRModule(others, attrs=mod.attrs)
    text = rest.script(extra_config={"tirx.prefix": "T", "script.use_pep695": False})
    head, _, body = text.partition("class Module:\n")
    if not others and not mod.attrs:
        body = ""
    body = re.sub(r"^    @T\.prim_func\b", "    @TIR.prim_func", body, flags=re.MULTILINE)
    head = re.sub(r"^#.*\n", "", head, flags=re.MULTILINE).strip()
    head = head.replace("@I.ir_module", "@T.ir_module")
    imports = "# from tvm.script import ir as I, sparse_tir as T, tirx as TIR\n"
    parts = [textwrap.indent(t, "    ").rstrip() for t in ours] + (
        [body.rstrip()] if body.strip() else []
    )
    return f"{imports}\n{head}\nclass Module:\n" + "\n\n".join(parts or ["    pass"]) + "\n"


class _FunctionPrinter:
    """Prints one function, line by line."""

    def __init__(self, func: SparseFunc, name: str | None) -> None:
        self.func = func
        self.names = Names()
        self.expr = ExprPrinter(self.names)
        self.lines: list[str] = []
        self.depth = 0
        self.symbol = func.attrs["global_symbol"] if "global_symbol" in func.attrs else None
        self.name = name or Names().fresh(str(self.symbol or "main"))
        self.axes: dict[str, str] = {}

    def text(self) -> str:
        """The text of the whole function."""
        from sparsetir.sparse_ir import script as dialect

        params = [
            f"{self.names.define(p)}: {_parameter_type(p, dialect)}" for p in self.func.params
        ]
        self._line("@T.prim_func" + ("" if self.symbol else "(private=True)"))
        self._line(_signature(self.name, params))
        self.depth += 1
        attrs = {k: v for k, v in self.func.attrs.items() if (k, v) != ("global_symbol", self.name)}
        if attrs:
            self._attributes(attrs)
        for axis in self.func.axes:
            self.axes[axis.name] = self.names.fresh(axis.name)
            self._line(f"{self.axes[axis.name]} = {self._axis_declaration(axis)}")
        for buffer in self.func.buffers:
            declaration = self._buffer_declaration(buffer)
            self._line(f"{self.names.define(buffer.var)} = {declaration}")
        self._statement(self.func.body)
        return "\n".join(self.lines) + "\n"

    def _line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def _attributes(self, attrs: dict[str, Any]) -> None:
        """`T.func_attr`, with an attribute's entries on separate lines if one line is too long."""
        what = "function attribute"
        text = f"T.func_attr({self.expr.literal(attrs, what)})"
        if 4 * self.depth + len(text) <= WIDTH:
            self._line(text)
            return
        self._line("T.func_attr({")
        for name, value in attrs.items():
            head, entries = f"    {quote(str(name))}: ", None
            if isinstance(value, Mapping):
                ends, items = "{}", value.items()
                entries = [f"{quote(str(k))}: {self.expr.literal(v, what)}" for k, v in items]
            elif isinstance(value, Sequence) and not isinstance(value, str):
                ends, entries = "[]", [self.expr.literal(v, what) for v in value]
            if not entries:
                self._line(f"{head}{self.expr.literal(value, what)},")
                continue
            self._line(head + ends[0])
            for entry in entries:
                self._line(f"        {entry},")
            self._line(f"    {ends[1]},")
        self._line("})")

    @contextlib.contextmanager
    def _block(self, head: str) -> Iterator[None]:
        self._line(head)
        self.depth += 1
        with self.names.scope():
            yield
        self.depth -= 1

    def _axis(self, entry: Any) -> str:
        def text(axis: Axis) -> str:
            if axis.name not in self.axes:
                raise IllFormedError(f"axis '{axis.name}' is not an axis of '{self.func.name}'")
            return self.axes[axis.name]

        return entry_text(entry, text)

    def _axis_declaration(self, axis: Axis) -> str:
        def size(value: Any) -> str:
            plain = isinstance(value, tirx.IntImm) and dtype_of(value) == axis.idtype
            return repr(value.value) if plain else self.expr.expr(value)

        if axis.is_merged:
            return f"T.{axis.kind}({', '.join(self._axis(a) for a in axis.of)})"
        args = [self._axis(axis.parent)] if axis.parent is not None else []
        count = axis.nnz if axis.is_variable else axis.nnz_cols
        pair = f"({size(axis.length)}, {size(count)})" if count is not None else size(axis.length)
        pair = f"({size(axis.length)}, None)" if is_open(axis) else pair
        arrays = [self.names.get(h) for h in (axis.indptr, axis.indices) if h is not None]
        args.append(pair)
        if arrays:
            args.append(f"({', '.join(arrays)})" if len(arrays) == 2 else arrays[0])
        args.append(f'idtype="{axis.idtype}"')
        if not axis.unique:
            args.append("unique=False")
        return f"T.{axis.kind}({', '.join(args)})"

    def _buffer_declaration(self, buffer: SparseBuffer) -> str:
        ty = buffer.var.ty
        plain = buffer_var(list(ty.shape), buffer.dtype, buffer.name, ty.storage_scope).ty
        if not tvm_ffi.structural_equal(plain, ty):
            raise IllFormedError(f"buffer '{buffer.name}' has a layout that no declaration gives")
        kind = "match_sparse_buffer" if buffer.handle is not None else "alloc_sparse_buffer"
        args = [self.names.get(buffer.handle)] if buffer.handle is not None else []
        if buffer.axes is None:
            kind = "match_buffer"
            args.append(self.expr.sizes(ty.shape))
        else:
            axes = [self._axis(a) for a in buffer.axes]
            args.append("(" + ", ".join(axes) + ("," if len(axes) == 1 else "") + ")")
        args.append(f'"{buffer.dtype}"')
        if ty.storage_scope != "global":
            args.append(f'scope="{ty.storage_scope}"')
        return f"T.{kind}({', '.join(args)})"

    def _statement(self, node: Any) -> None:
        printers: dict[type, Callable[[Any], None]] = {
            SparseIteration: self._iteration,
            tirx.SeqStmt: self._sequence,
            tirx.BufferStore: self._store,
            tirx.For: self._loop,
            tirx.While: self._while,
            tirx.IfThenElse: self._if,
            tirx.stmt.Bind: self._bind,
            tirx.stmt.AllocBuffer: self._alloc,
            tirx.AssertStmt: self._assert,
            tirx.Evaluate: lambda n: self._line(f"T.evaluate({self.expr.index(n.value)})"),
        }
        if type(node) not in printers:
            raise unknown(node, "statement")
        printers[type(node)](node)

    def _sequence(self, node: Any) -> None:
        for child in node.seq:
            self._statement(child)

    def _store(self, node: Any) -> None:
        target = f"{self.names.get(node.buffer)}[{self.expr.indices(node.indices)}]"
        self._line(f"{target} = {self.expr.expr(node.value)}")

    def _iteration(self, node: SparseIteration) -> None:
        with self.names.scope():
            axes = ", ".join(self._axis(a) for a in node.axes)
            names = ", ".join(self.names.define(v) for v in node.vars)
            kinds, name = quote(node.kinds), quote(node.name)
            with self._block(f"with T.sp_iter([{axes}], {kinds}, {name}) as [{names}]:"):
                if node.annotations:
                    text = self.expr.literal(node.annotations, f"annotation of '{node.name}'")
                    self._line(f"T.sp_iter_attr({text})")
                if node.init is not None:
                    with self._block("with T.init():"):
                        self._statement(node.init)
                self._statement(node.body)

    def _loop(self, node: tirx.For) -> None:
        if int(node.kind) not in LOOPS:
            raise IllFormedError(f"cannot print the loop '{node.loop_var.name}' bound to a thread")
        kind = LOOPS[int(node.kind)]
        options = []
        if node.annotations:
            options.append(f"annotations={self.expr.literal(node.annotations, 'annotation')}")
        if node.step is not None:
            options.append(f"step={self.expr.index(node.step)}")
        bounds = self._bounds(node, getattr(tir_builder, kind))
        call = "range" if kind == "serial" and not options and "T." not in bounds else f"T.{kind}"
        with self.names.scope():
            name = self.names.define(node.loop_var)
            with self._block(f"for {name} in {call}({', '.join([bounds, *options])}):"):
                self._statement(node.body)

    def _bounds(self, node: tirx.For, build: Callable[..., Any]) -> str:
        """`stop` or `start, stop`, whichever the loop functions turn into the same range."""

        def same(*bounds: Any) -> bool:
            built = build(*bounds).doms[0]
            return all(
                tvm_ffi.structural_equal(x, y)
                for x, y in ((built.min, node.min), (built.extent, node.extent))
            )

        zero = isinstance(node.min, tirx.IntImm) and node.min.value == 0
        stop = node.extent if zero else node.min + node.extent
        if zero and same(node.extent.value if is_int32(node.extent) else node.extent):
            return self.expr.index(stop)
        return f"{self.expr.index(node.min)}, {self.expr.index(stop)}"

    def _while(self, node: tirx.While) -> None:
        with self._block(f"while {self.expr.expr(node.condition)}:"):
            self._statement(node.body)

    def _if(self, node: tirx.IfThenElse) -> None:
        with self._block(f"if {self.expr.expr(node.condition)}:"):
            self._statement(node.then_case)
        if node.else_case is not None:
            with self._block("else:"):
                self._statement(node.else_case)

    def _bind(self, node: Any) -> None:
        if not isinstance(node.var.ty, ir.PrimType):
            raise IllFormedError(f"cannot print the binding of '{node.var.name}': {node.var.ty}")
        value = self.expr.expr(node.value)
        self._line(f"{self.names.define(node.var)}: T.let[T.{dtype_of(node.var)}] = {value}")

    def _alloc(self, node: Any) -> None:
        ty = node.buffer.ty
        plain = tirx.decl_buffer(list(ty.shape), str(ty.dtype), scope=ty.storage_scope).ty
        if not tvm_ffi.structural_equal(plain, ty):
            raise IllFormedError(f"buffer '{node.buffer.name}' has a layout that no script gives")
        args = [self.expr.sizes(ty.shape), f'"{ty.dtype}"', f'scope="{ty.storage_scope}"']
        if node.annotations:
            args.append(f"annotations={self.expr.literal(node.annotations, 'annotation')}")
        self._line(f"{self.names.define(node.buffer)} = T.alloc_buffer({', '.join(args)})")

    def _assert(self, node: Any) -> None:
        parts = ", ".join(quote(p.value) for p in node.message_parts)
        message = f"({quote(node.error_kind.value)}, [{parts}])"
        self._line(f"assert {self.expr.expr(node.condition)}, {message}")


def _signature(name: str, params: list[str]) -> str:
    line = f"def {name}({', '.join(params)}):"
    if len(line) <= WIDTH:
        return line
    text = ", ".join(p.replace(" ", "\0") for p in params)  # keeps a parameter on one line
    inner = textwrap.fill(text, WIDTH - 4, break_long_words=False).replace("\0", " ")
    return f"def {name}(\n{textwrap.indent(inner, '    ')}\n):"


def _parameter_type(param: Any, dialect: Any) -> str:
    if isinstance(param.ty, ir.PrimType):
        return f"T.{dtype_of(param)}"
    if tvm_ffi.structural_equal(param.ty, dialect.handle().ty):
        return "T.handle"
    typed = (str(param.ty.element_type.dtype), param.ty.storage_scope)
    if tvm_ffi.structural_equal(param.ty, dialect.handle(*typed).ty):
        return f"T.handle({quote(typed[0])}, {quote(typed[1])})"
    raise IllFormedError(f"parameter '{param.name}' has a type that no script gives: {param.ty}")
