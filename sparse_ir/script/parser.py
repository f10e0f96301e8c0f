"""`@T.prim_func` of the sparse_tir dialect, on TVM's own script parser.

TVM's handlers process expressions and TIR statements; this file adds functions, the naming of axes
and buffers, and the check after parsing.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from types import SimpleNamespace
from typing import Any, TypeVar

import tvm
from tvm import ir, tirx
from tvm.error import DiagnosticError
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as ir_builder
from tvm.script.parser._core import dispatch, doc, utils
from tvm.script.parser.core.diagnostics import Source
from tvm.tirx.script.parser import parser as tir_parser

from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.nodes import SparseBuffer, make_func
from sparsetir.sparse_ir.script import axes, builder
from sparsetir.sparse_ir.script.context import capture, context, function_context
from sparsetir.sparse_ir.script.parser_expr import QuickParser
from sparsetir.sparse_ir.verify import find_problem

TOKEN = "sparse_tir"


class ParseError(IllFormedError, DiagnosticError):
    """An error in the text of a program; the message shows file and line.

    A separate class, since TVM's exception hook omits the message of a `DiagnosticError`.
    """


_TIR_ASSIGN = dispatch.ParseVTable["tirx", "Assign"]
_TIR_ASSERT = dispatch.ParseVTable["tirx", "Assert"]


def prim_func(func: Any = None, private: bool = False, check_well_formed: bool = True) -> Any:
    """Decorator: parse a Python function as a stage-I function.

    private : omit the global symbol
    check_well_formed : run :func:`sparsetir.verify` after parsing
    Returns a :class:`SparseFunc`. Raises IllFormedError with file and line.
    """
    outer_stack = outer_frames()

    def wrapper(func: Any) -> Any:
        if not inspect.isfunction(func):
            raise TypeError(f"prim_func: expected a function, got {func!r}")
        if utils.is_defined_in_class(outer_stack, func):
            return func
        captured = utils.inspect_function_capture(func)
        utils.resolve_closure_vars(func, captured, outer_stack)
        source = _source_of("prim_func", func)
        return _parse(source, {func.__name__: func.__annotations__}, captured)

    if func is not None:
        return wrapper(func)
    setattr(wrapper, "dispatch_token", TOKEN)  # noqa: B010
    return wrapper


setattr(prim_func, "dispatch_token", TOKEN)  # noqa: B010


def outer_frames() -> list[Any]:
    """The caller's frames, innermost first, as TVM's helpers expect them.

    `inspect.stack` returns the same, but searches every loaded module.
    """
    out: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None:
        line = None
        if len(out) < 3:  # the third is a class around the function
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
        context = [line] if line else None
        out.append(SimpleNamespace(frame=frame, lineno=frame.f_lineno, code_context=context))
        frame = frame.f_back
    return out


def from_source(text: str, extra_vars: dict[str, Any] | None = None) -> Any:
    """Parse the text of a stage-I function, or of a module that may mix stages.

    Parameters
    ----------
    text : str
        The output of :meth:`SparseFunc.script`, or a function or `@I.ir_module` class in the same
        language; `T` is the sparse_tir dialect, `TIR` TVM's own, `I` the module dialect.
    extra_vars : dict, optional
        Further names that the text may use.

    Returns
    -------
    SparseFunc, PrimFunc or IRModule
    """
    from tvm.script import ir as module_dialect
    from tvm.script import tirx as tir_dialect

    from sparsetir.sparse_ir import script as dialect

    names = {
        "T": dialect,
        "TIR": tir_dialect,
        "I": module_dialect,
        "tvm": tvm,
        "TypeVar": TypeVar,  # TVM's printer declares the symbolic sizes of PrimFuncs with it
    }
    return _parse(Source(text), {}, {**names, **(extra_vars or {})}, printed=True)


def ir_module(cls: Any = None) -> Any:
    """Decorator: parse a class of functions as an IRModule that may mix stages.

    Functions decorated by this dialect's `@T.prim_func` become stage-I functions, those by TVM's
    own `prim_func` PrimFuncs. (TVM's `I.ir_module` does not accept functions of other dialects.)
    """
    outer_stack = outer_frames()

    def wrapper(cls: Any) -> Any:
        if not inspect.isclass(cls):
            raise TypeError(f"ir_module: expected a class, got {cls!r}")
        captured = utils.inspect_class_capture(cls)
        utils.resolve_closure_vars(cls, captured, outer_stack)
        return _parse(_source_of("ir_module", cls), {}, captured)

    return wrapper if cls is None else wrapper(cls)


def _source_of(caller: str, obj: Any) -> Source:
    """The source text of a function or class; if there is none, the OSError says what to do."""
    try:
        source = Source(obj)
        if inspect.getmodule(obj) is None:  # TVM 0.27 would take the object's text for the file's
            source.full_source = "".join(inspect.findsource(obj)[0])
        return source
    except OSError as error:
        raise OSError(
            f"{caller}: the source of '{obj.__name__}' is not known, which a program is parsed "
            "from: write it in a file or a notebook, not at Python's own prompt or in `exec`, or "
            "give its text to `sparsetir.from_source`"
        ) from error


def _parse(
    source: Source, annotations: dict[str, Any], names: dict[str, Any], printed: bool = False
) -> Any:
    parser: Any = QuickParser(source, annotations)
    parser.printed = printed
    parser.sparse_functions = {}
    with IRBuilder() as irb:
        try:
            parser.parse(extra_vars=names)
        except DiagnosticError as err:
            raise ParseError(_with_line(str(err))) from None
    if None in parser.sparse_functions:
        return parser.sparse_functions[None]
    result = irb.get()
    if not isinstance(result, tvm.IRModule):
        return result
    functions = {
        gv: parser.sparse_functions.get(gv.name_hint, f) for gv, f in result.functions.items()
    }
    return tvm.IRModule(functions, attrs=result.attrs)


def _with_line(message: str) -> str:
    """A TVM parser message whose first line has file and line number."""
    where = re.match(r"error: (?!\S+:\d+: )(.*)\n\s*--> (\S+:\d+):\d+", message)
    if where is None:
        return message
    return f"error: {where[2]}: {where[1]}{message[where.end(1) :]}"


def _visit_function_def(self: Any, node: doc.FunctionDef) -> None:
    private = tir_parser.find_decorator_annotation(node, "private", default=False)
    check = tir_parser.find_decorator_annotation(node, "check_well_formed", default=True)
    with self.var_table.with_frame(), function_context() as ctx, self.with_dispatch_token(TOKEN):
        known = (self.function_annotations or {}).get(node.name, {})
        params = [_parameter(self, arg, known.get(arg.arg)) for arg in node.args.args]
        with capture() as body:
            self.visit_body(node.body)
        func = make_func(
            None if private else node.name,
            params,
            [ref.node() for ref in ctx.refs],
            ctx.buffers,
            body[0],
            ctx.attrs,
            self.diag.source.to_span(node),
        )
    if check:
        by_hand = not getattr(self, "printed", False)
        spans = {ref.node().name: ref.span for ref in ctx.refs}
        problem = find_problem(func, spans, by_hand=by_hand)
        if problem is not None:
            self.report_error(_place(self, node, problem.span), str(problem))
    _finish(self, node.name, func)


def _place(self: Any, node: doc.FunctionDef, span: Any) -> Any:
    """The first line of `span` as a node, for error messages to point at."""
    if span is None or span.source_name.name != self.diag.source.source_name:
        return node
    line = span.line - self.diag.source.start_line + 1
    first, last = (c - self.diag.source.start_column - 1 for c in (span.column, span.end_column))
    return doc.Constant(None, None, line, first, line, last if span.end_line == span.line else 999)


def _finish(self: Any, name: str, func: Any) -> None:
    """Store a parsed function as the result, or as one of its module's functions."""
    in_module = len(IRBuilder.current().frames) > 0
    functions = getattr(self, "sparse_functions", None)
    if functions is None:
        raise IllFormedError(
            "a module that holds sparse_tir functions is decorated with @T.ir_module of sparse_tir"
        )
    functions[name if in_module else None] = func
    if in_module:  # TVM's module builder accepts no other function class: put a placeholder
        ir_builder.def_function(name, tirx.PrimFunc([], tirx.Evaluate(0)))


def _parameter(self: Any, arg: Any, known: Any) -> Any:
    """The variable of a parameter.

    known : its annotation, unless it is text; names used only there are not the function's
    """
    if arg.annotation is None:
        self.report_error(arg, f"parameter '{arg.arg}' needs a type, such as T.handle or T.int32")
    evaluated = known is not None and not isinstance(known, str)
    value = known if evaluated else self.eval_expr(arg.annotation)
    if callable(value) and not isinstance(value, ir.Expr):
        value = value()
    if not isinstance(value, ir.Var) or tirx.is_buffer_var(value):
        self.report_error(
            arg.annotation,
            f"parameter '{arg.arg}': expected T.handle or a scalar type such as T.int32",
        )
    IRBuilder.name(arg.arg, value)
    self.var_table.add(arg.arg, value)
    return value


def _declare_function(self: Any, node: doc.FunctionDef) -> Any:
    signature = tirx.PrimFunc([], None)
    del self
    return ir_builder.decl_function(node.name, signature)


_DECLARATIONS = (
    axes.dense_fixed,
    axes.dense_variable,
    axes.sparse_fixed,
    axes.sparse_variable,
    axes.fuse,
    axes.attach,
    axes.part,
    axes.union,
    axes.intersect,
    axes.difference,
    builder.match_sparse_buffer,
    builder.alloc_sparse_buffer,
    builder.match_buffer,
)


def _visit_assign(self: Any, node: doc.Assign) -> None:
    target = node.targets[0]
    if len(node.targets) == 1 and isinstance(target, doc.Name):
        if isinstance(node.value, doc.Call) and self.eval_expr(node.value.func) in _DECLARATIONS:
            value = self.eval_expr(node.value)
            _name_declaration(target.id, value)
            self.var_table.add(target.id, value, allow_shadowing=True)
            return
    if isinstance(target, doc.Subscript) and isinstance(node.value, doc.Call):
        _store_result(self, node)
        return
    if isinstance(target, doc.Subscript):
        node.value = _as_update(target, node.value)
    _TIR_ASSIGN(self, node)


def _as_update(target: doc.Subscript, value: Any) -> Any:
    """`X[i] + a - b`, stored to X[i], as the update X[i] + (a - b); also for products."""
    for first, *more in ((doc.Add, doc.Sub), (doc.Mult,)):
        terms: list[Any] = []
        rest = value
        while isinstance(rest, doc.BinOp) and isinstance(rest.op, (first, *more)):
            terms.append(rest)
            rest = rest.left
        if len(terms) < 2 or not isinstance(terms[-1].op, first) or _text(rest) != _text(target):
            continue
        *later, update = terms
        total = update.right
        for term in reversed(later):
            total = doc.BinOp(total, term.op, term.right, *_span(term))
        return doc.BinOp(rest, update.op, total, *_span(value))
    return value


def _text(node: Any) -> str:
    return ast.unparse(doc.from_doc(node))


def _span(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _store_result(self: Any, node: doc.Assign) -> None:
    """`A[i] = call(...)`; TVM crashes if the call returns None, as T.evaluate does."""
    call = node.value
    value = self.eval_expr(call)
    if value is None:
        self.report_error(call, "expected a value to store, got None")
    with self.var_table.with_frame():
        self.var_table.add("__value", value)
        node.value = doc.Name("__value", doc.Load(), *_span(call))
        _TIR_ASSIGN(self, node)


def _name_declaration(name: str, value: Any) -> None:
    """Give a newly declared axis or buffer the name that it is assigned to."""
    if isinstance(value, axes.AxisRef):
        value.set_name(name)
    elif isinstance(value, ir.Var):
        declared: list[SparseBuffer] = context().buffers
        if any(b.name == name and not b.var.same_as(value) for b in declared):
            raise IllFormedError(f"buffer '{name}' is defined twice; names of buffers must differ")
        IRBuilder.name(name, value)


def _visit_assert(self: Any, node: doc.Assert) -> None:
    """`assert condition, "message"` raises AssertionError; TVM's version names another error."""
    if node.msg is None:
        node.msg = doc.Constant(f"expected {_text(node.test)}", None, *_span(node))
    if not isinstance(node.msg, doc.Tuple):
        kind = doc.Constant("AssertionError", None, *_span(node))
        node.msg = doc.Tuple(
            [kind, doc.List([node.msg], doc.Load(), *_span(node))], doc.Load(), *_span(node)
        )
    _TIR_ASSERT(self, node)


class _IndexCount(doc.NodeVisitor):
    """Compare the number of indices of each access with the buffer's axes.

    TVM's message about too many does not name the buffer, and it reads too few as a region.
    """

    def __init__(self, parser: Any) -> None:
        self.parser = parser
        self.values = parser.var_table.get()

    def visit_Subscript(self, node: doc.Subscript) -> None:
        buffer: Any = self.values.get(node.value.id) if isinstance(node.value, doc.Name) else None
        items = node.slice.elts if isinstance(node.slice, doc.Tuple) else [node.slice]
        partial = any(isinstance(i, doc.Slice | doc.Starred) for i in items)
        if isinstance(buffer, ir.Var) and isinstance(buffer.ty, ir.PointerType):
            self.parser.report_error(
                node,
                f"'{node.value.id}' is a handle, which has no elements; expected a buffer, such as "
                f"T.match_buffer({node.value.id}, shape, dtype) of an array that no axis has",
            )
        if isinstance(buffer, ir.Var) and tirx.is_buffer_var(buffer) and not partial:
            count = len(buffer.ty.shape)
            if len(items) != count:
                self.parser.report_error(
                    node, f"buffer '{node.value.id}' has {count} axes, got {len(items)} indices"
                )
        self.generic_visit(node)


def _counting_indices(method: Any) -> Any:
    """A statement visitor that first checks the statement's own expressions."""

    def visit(self: Any, node: Any) -> Any:
        check = _IndexCount(self)
        for field in ("targets", "target", "value", "test", "iter", "items"):
            part = getattr(node, field, None)
            for item in part if isinstance(part, list | tuple) else [part]:
                if isinstance(item, doc.AST):
                    check.visit(item)
        return method(self, node)

    return visit


_STATEMENTS = ("AnnAssign", "Assert", "AugAssign", "Expr", "For", "If", "While", "With")
for (_token, _type_name), _method in list(dispatch.ParseVTable.items()):
    if _token == "tirx":
        _wrap = _counting_indices if _type_name in _STATEMENTS else (lambda method: method)
        dispatch.register(TOKEN, _type_name)(_wrap(_method))
dispatch.register(TOKEN, "FunctionDef")(_visit_function_def)
dispatch.register(TOKEN, "tvm_declare_function")(_declare_function)
dispatch.register(TOKEN, "Assign")(_counting_indices(_visit_assign))
dispatch.register(TOKEN, "Assert")(_counting_indices(_visit_assert))
