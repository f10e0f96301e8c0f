"""Expressions in scripts, computed node by node.

TVM's evaluator makes Python code of each call, attribute and subscript and runs it, which takes as
long as all the rest of parsing. What it does around that (spans, messages) stays.
"""

from __future__ import annotations

import builtins
from typing import Any

from tvm.script.parser._core import Parser, doc
from tvm.script.parser.core.evaluator import ExprEvaluator
from tvm.script.parser.core.parser import ScriptMacro


class QuickParser(Parser):
    """TVM's parser with this evaluator."""

    def eval_expr(self, node: Any, extra_vars: dict[str, Any] | None = None) -> Any:
        """The value of an expression, as in TVM's class."""
        names = {**self.var_table.get(), **(extra_vars or {}), ScriptMacro.parser_object_name: self}
        return self.annotate_current_source_span(_Evaluator(self, names).value(node))


class _Evaluator(ExprEvaluator):
    def value(self, node: Any) -> Any:
        return self._eval_expr(self._visit(node))

    def _eval_expr(self, v: Any) -> Any:
        """A node whose parts TVM's class has evaluated, and given names."""
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
            return self._eval_expr(v.func)(*args, **named)
        if isinstance(v, doc.Tuple | doc.List) and _plain(v.elts):
            items = [self._eval_expr(item) for item in v.elts]
            return tuple(items) if isinstance(v, doc.Tuple) else items
        return super()._eval_expr(v)


def _plain(nodes: list[Any]) -> bool:
    return not any(isinstance(node, doc.Starred) for node in nodes)
