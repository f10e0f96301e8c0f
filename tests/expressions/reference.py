"""Expressions by NumPy on dense arrays: Python evaluates the text over open grids of indices."""

from __future__ import annotations

import ast
import math
from typing import Any

import numpy as np

ERF = np.vectorize(math.erf, otypes=[float])
FUNCTIONS = {
    "relu": lambda x: np.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "erf": ERF,
    "where": np.where, "rsqrt": lambda x: 1 / np.sqrt(x),
    **{n: getattr(np, n) for n in (
        "exp", "exp2", "log", "log2", "log10", "log1p", "sqrt", "tanh", "sin", "cos", "tan", "sinh",
        "cosh", "floor", "ceil", "abs", "maximum", "minimum",
    )},
}  # fmt: skip
REDUCE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def reference(text: str, operands: dict[str, np.ndarray]) -> np.ndarray:
    """The value of an expression of dense arrays, in float64: each term is summed separately."""
    statement: Any = ast.parse(text).body[0]
    adds = isinstance(statement, ast.AugAssign)
    target = statement.target if adds else statement.targets[0]
    out = _names(target.slice) if isinstance(target, ast.Subscript) else []
    sizes = _sizes(statement.value, operands)
    total = operands[target.value.id].astype(float) if adds else np.zeros([sizes[n] for n in out])
    for sign, term in _terms(statement.value, 1):
        total = total + sign * _reduced(term, operands, sizes, out, "sum")
    return total


def _terms(node: Any, sign: int) -> list[tuple[int, Any]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        later = sign if isinstance(node.op, ast.Add) else -sign
        return _terms(node.left, sign) + _terms(node.right, later)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _terms(node.operand, -sign)
    return [(sign, node)]


def _reduced(node: Any, operands: Any, sizes: Any, out: list[str], op: str) -> np.ndarray:
    """A tree over the indices `out`, reduced over its others."""
    free = _free(node)
    names = [*out, *(n for n in free if n not in out)]
    values = np.asarray(_value(node, operands, sizes, names), float)
    values = np.broadcast_to(values, [sizes[n] for n in names])
    over = tuple(range(len(out), len(names)))
    return REDUCE[op](values, axis=over) if over else values


def _value(node: Any, operands: Any, sizes: Any, names: list[str]) -> Any:
    def grid(name: str) -> np.ndarray:
        return np.arange(sizes[name]).reshape([-1 if n == name else 1 for n in names])

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return grid(node.id) if node.id in sizes else operands[node.id].astype(float)
    if isinstance(node, ast.Subscript):
        array, parts = (
            operands[node.value.id],
            node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice],
        )
        index = [eval(ast.unparse(p), {n: grid(n) for n in _names(p)}) for p in parts]
        inside = np.True_
        for x, n in zip(index, array.shape, strict=True):
            inside = inside & (x >= 0) & (x < n)
        if 0 in array.shape:
            return np.zeros(np.broadcast_shapes(*(np.shape(x) for x in index)))
        clipped = tuple(np.clip(x, 0, n - 1) for x, n in zip(index, array.shape, strict=True))
        return np.where(inside, array[clipped].astype(float), 0)
    if isinstance(node, ast.Call):
        if node.func.id in REDUCE:
            over = {a.id for a in node.args[:-1]}
            left = [n for n in names if n not in over]
            kept = [n for n in left if n in _free(node)]
            inner = _reduced(node.args[-1], operands, sizes, kept, node.func.id)
            return (
                inner.reshape([sizes[n] if n in kept else 1 for n in names])
                if sorted(kept, key=names.index) == kept
                else inner
            )
        return FUNCTIONS[node.func.id](*(_value(a, operands, sizes, names) for a in node.args))
    parts = {
        ast.BinOp: lambda n: [n.left, n.right],
        ast.UnaryOp: lambda n: [n.operand],
        ast.Compare: lambda n: [n.left, *n.comparators],
    }
    values = [_value(x, operands, sizes, names) for x in parts[type(node)](node)]
    op = node.ops[0] if isinstance(node, ast.Compare) else node.op
    symbols = {
        ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.true_divide,
        ast.Pow: np.power,
        ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal,
        ast.Eq: np.equal, ast.NotEq: np.not_equal, ast.USub: np.negative,
    }  # fmt: skip
    return symbols[type(op)](*values)


def _names(node: Any) -> list[str]:
    nodes = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return list(dict.fromkeys(n.id for n in sorted(nodes, key=lambda n: n.col_offset)))


def _parts(node: ast.Subscript) -> list[Any]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _free(node: Any) -> list[str]:
    """The indices that a tree leaves to what is around it."""
    if isinstance(node, ast.Subscript):
        return _names(node.slice)
    if isinstance(node, ast.Call) and node.func.id in REDUCE:
        over = {a.id for a in node.args[:-1]}
        return [n for n in _free(node.args[-1]) if n not in over]
    out: list[str] = []
    for x in ast.iter_child_nodes(node):
        out += [n for n in _free(x) if n not in out]
    return out


def _sizes(tree: Any, operands: Any) -> dict[str, int]:
    """Sizes of indices that stand alone somewhere; of others the largest that stays in bounds."""
    sizes: dict[str, int] = {}
    subscripts = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript)]
    pairs = [x for s in subscripts for x in zip(_parts(s), operands[s.value.id].shape, strict=True)]
    for part, n in pairs:
        if isinstance(part, ast.Name):
            sizes[part.id] = n
    for part, n in pairs:
        (name, *_) = [x for x in _names(part) if x not in sizes] or [None]
        if name:
            others = {x: sizes[x] - 1 for x in _names(part) if x != name}
            count = 0
            while eval(ast.unparse(part), {**others, name: count}) < n:
                count += 1
            sizes[name] = count
    return sizes
