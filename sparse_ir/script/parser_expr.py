"""Expressions in scripts, evaluated node by node.

TVM's evaluator compiles each call, attribute and subscript to Python code and runs it, which takes
as long as the rest of parsing. Its surroundings (spans, messages) are kept.
"""

from __future__ import annotations

import builtins
from typing import Any

from tvm import ir
from tvm.script.parser._core import Parser, doc
from tvm.script.parser.core.evaluator import ExprEvaluator
from tvm.script.parser.core.parser import ScriptMacro

# Python functions that only take numbers, and the names of their counterparts here.
_INSTEAD: dict[Any, str] = {
    max: "T.max", min: "T.min", int: 'T.cast(x, "int32")', float: 'T.cast(x, "float32")',
    bool: 'T.cast(x, "bool")', round: "T.round", pow: "T.pow", any: "T.Or", all: "T.And",
}  # fmt: skip


class QuickParser(Parser):
    """TVM's parser with this evaluator."""

    def eval_expr(self, node: Any, extra_vars: dict[str, Any] | None = None) -> Any:
        """The value of an expression; overrides TVM's method."""
        names = {**self.var_table.get(), **(extra_vars or {}), ScriptMacro.parser_object_name: self}
        return self.annotate_current_source_span(_Evaluator(self, names).value(node))

    def eval_assign(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The values of names; overrides TVM's method. Coordinates have a name each."""
        names = target.elts if isinstance(target, doc.Tuple | doc.List) else None
        if isinstance(source, list) and names is not None and _plain(names):
            if len(names) != len(source):
                axes = ", ".join(str(getattr(v, "name", v)) for v in source)
                said = f"expected {len(source)} names, one for each of {axes}, got {len(names)}"
                self.report_error(target, said)
        return super().eval_assign(target, source, *args, **kwargs)


class _Evaluator(ExprEvaluator):
    def value(self, node: Any) -> Any:
        return self._eval_expr(self._visit(node))

    def _eval_expr(self, v: Any) -> Any:
        """The value of a node whose parts TVM's class has evaluated and named."""
        if isinstance(v, doc.Name):
            values = self.value_table
            return values[v.id] if v.id in values else getattr(builtins, v.id)
        if isinstance(v, doc.Constant):
            return v.value
        if isinstance(v, doc.Attribute):
            return getattr(self._eval_expr(v.value), v.attr)
        if isinstance(v, doc.Subscript):
            return self._eval_expr(v.value)[self._eval_expr(v.slice)]
        if isinstance(v, doc.Call) and _plain(v.args) and all(k.arg for k in v.keywords):
            args = [self._eval_expr(a) for a in v.args]
            named = {k.arg: self._eval_expr(k.value) for k in v.keywords}
            func: Any = self._eval_expr(v.func)
            instead = next((what for of, what in _INSTEAD.items() if of is func), None)
            if instead and any(isinstance(a, ir.Expr) for a in args):
                raise TypeError(f"Python's {func.__name__} takes no expressions; use {instead}")
            return func(*args, **named)
        if isinstance(v, doc.Tuple | doc.List) and _plain(v.elts):
            items = [self._eval_expr(item) for item in v.elts]
            return tuple(items) if isinstance(v, doc.Tuple) else items
        return super()._eval_expr(v)


def _plain(nodes: list[Any]) -> bool:
    return not any(isinstance(node, doc.Starred) for node in nodes)
