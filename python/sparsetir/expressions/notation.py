"""The parser of expressions, `C[i, k] = A[i, j] * X[j, k]` or "ij,jk->ik", to trees.

The syntax is Python's, so its parser reads it; this module interprets the names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from sparsetir.expressions.trees import (
    Access,
    Affine,
    Call,
    Index,
    Number,
    Reduce,
    Statement,
    Tree,
    accesses,
    indices_of,
    refuse,
    replaced,
)  # fmt: skip
from sparsetir.reductions import SEMIRINGS, check_semiring

# Functions of one number: their names in the language, and whether they keep zero.
FUNCTIONS = {
    "exp": ("T.exp", False), "exp2": ("T.exp2", False), "log": ("T.log", False),
    "log2": ("T.log2", False), "log10": ("T.log10", False), "log1p": ("T.log1p", True),
    "sqrt": ("T.sqrt", True), "rsqrt": ("T.rsqrt", False), "tanh": ("T.tanh", True),
    "sigmoid": ("T.sigmoid", False), "sin": ("T.sin", True), "cos": ("T.cos", False),
    "tan": ("T.tan", True), "sinh": ("T.sinh", True), "cosh": ("T.cosh", False),
    "erf": ("T.erf", True), "floor": ("T.floor", True), "ceil": ("T.ceil", True),
}  # fmt: skip
# Numbers of arguments of all functions.
ARITIES = {
    **dict.fromkeys(FUNCTIONS, 1),
    "abs": 1,
    "relu": 1,
    "where": 3,
    "maximum": 2,
    "minimum": 2,
}
REDUCTIONS = ("sum", "prod", "max", "min")
OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.USub: "neg",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def parse(text: str, caller: str = "einsum", ranks: Sequence[int] = ()) -> Statement:
    """Read an expression.

    Parameters
    ----------
    text : str
        `result = expression`, `result += expression`, or NumPy's subscripts, "ij,jk->ik", whose
        operands are then called `A0`, `A1`, ...
    caller : str
        The caller's name, for errors.
    ranks : sequence of int
        Ranks of the operands of subscripts, which an ellipsis needs.

    Returns
    -------
    Statement

    Raises
    ------
    NotationError
        Naming the position in the text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{caller}: argument 'text': expected a str, got {type(text).__name__}")
    if "=" not in text and "[" not in text:
        return _of_subscripts(text, caller, ranks)
    return _Reader(text, caller).statement()


class _Reader:
    """A translator of Python's syntax tree to ours."""

    def __init__(self, text: str, caller: str) -> None:
        self.text, self.caller = text.strip(), caller
        if "\n" in self.text:
            self.text = " ".join(self.text.split())
        self.indices: set[str] = set()

    def statement(self) -> Statement:
        try:
            module = ast.parse(self.text)
        except SyntaxError as error:
            result = "expected a result such as C[i, k], or a name for a scalar one"
            text = result if error.msg.startswith("cannot assign") else error.msg
            refuse(self.caller, self.text, max(0, (error.offset or 1) - 1), text)
        node = module.body[0] if len(module.body) == 1 else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, accumulates = node.targets[0], False
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            target, accumulates = node.target, True
        else:
            refuse(
                self.caller,
                self.text,
                0,
                "expected `result = expression` or `result += expression`",
            )
        self._collect(node)
        if not isinstance(target, ast.Name | ast.Subscript):
            self._refuse(target, "expected a result such as C[i, k], or a name for a scalar one")
        result = self._access(target)
        names = result.plain
        if None in names or len(set(names)) < len(names):
            self._refuse(target, "expected a result at indices that differ, each by itself")
        value = self._tree(node.value)
        for access in accesses(value):
            if access.name == result.name:
                refuse(
                    self.caller, self.text, access.at,
                    f"the result '{result.name}' is read; expected another name, or +=",
                    len(access.name),
                )  # fmt: skip
        missing = [n for n in names if n not in indices_of(value)]
        known = {i for x in accesses(value) for i in x.plain}
        for name in missing:
            if name not in known and not accumulates:
                self._refuse(target, f"index '{name}' of the result: expected it on the right, too")
        return Statement(result, value, accumulates, self.text)

    def _refuse(self, node: Any, what: str) -> NoReturn:
        at = len(self.text.encode()[: node.col_offset].decode())
        end = len(self.text.encode()[: node.end_col_offset].decode())
        refuse(self.caller, self.text, at, what, end - at)

    def _collect(self, tree: ast.AST) -> None:
        """Collect the names of indices: those in brackets, and those that reductions name."""
        for node in ast.walk(tree):
            inside: list[ast.AST] = []
            if isinstance(node, ast.Subscript):
                inside = [node.slice]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in REDUCTIONS:
                inside = [x for x in node.args[:-1] if isinstance(x, ast.Name)]
            for part in inside:
                self.indices |= {x.id for x in ast.walk(part) if isinstance(x, ast.Name)}

    def _access(self, node: ast.Name | ast.Subscript) -> Access:
        if isinstance(node, ast.Name):
            return Access(node.id, (), node.col_offset)
        if not isinstance(node.value, ast.Name):
            self._refuse(node.value, "expected the name of an operand before [")
        inside = node.slice
        parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        name = node.value.id
        if name in self.indices:
            self._refuse(node.value, f"'{name}' is an index and an operand; expected two names")
        return Access(name, tuple(self._affine(x) for x in parts), node.value.col_offset)

    def _affine(self, node: ast.AST) -> Affine:
        linear = self._linear(node)
        if linear is None:
            self._refuse(node, "expected an index, or a sum such as 2 * i + j - 1")
        terms, offset = linear
        return Affine(tuple(sorted((n, by) for n, by in terms.items() if by)), offset)

    def _linear(self, node: Any) -> tuple[dict[str, int], int] | None:
        if isinstance(node, ast.Name):
            return {node.id: 1}, 0
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return {}, node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return _scaled(self._linear(node.operand), -1)
        if not isinstance(node, ast.BinOp):
            return None
        a, b = self._linear(node.left), self._linear(node.right)
        if a is None or b is None:
            return None
        if isinstance(node.op, ast.Mult):
            a, b = (b, a) if not a[0] else (a, b)
            return None if b[0] else _scaled(a, b[1])
        if isinstance(node.op, ast.Sub):
            b = _scaled(b, -1)
        elif not isinstance(node.op, ast.Add):
            return None
        assert b is not None
        names = [*a[0], *(n for n in b[0] if n not in a[0])]
        return {n: a[0].get(n, 0) + b[0].get(n, 0) for n in names}, a[1] + b[1]

    def _tree(self, node: Any) -> Tree:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            value: Any = node.value
            return Number(value)
        if isinstance(node, ast.Name):
            return Index(node.id) if node.id in self.indices else self._access(node)
        if isinstance(node, ast.Subscript):
            return self._access(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self._tree(node.operand)
        parts: list[Any] = []
        op: Any = None
        if isinstance(node, ast.UnaryOp):
            op, parts = node.op, [node.operand]
        elif isinstance(node, ast.BinOp):
            op, parts = node.op, [node.left, node.right]
            if isinstance(op, ast.Div) and getattr(node.right, "value", None) == 0:
                self._refuse(node.right, "expected a divisor other than 0")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            op, parts = node.ops[0], [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            return self._call(node)
        if type(op) not in OPERATORS:
            self._refuse(node, "expected operands, numbers, + - * / **, comparisons and functions")
        return Call(OPERATORS[type(op)], tuple(self._tree(x) for x in parts))

    def _call(self, node: ast.Call) -> Tree:
        name = getattr(node.func, "id", None)
        if name in REDUCTIONS and not node.keywords:
            *over, body = node.args or [None]
            if not over or body is None or not all(isinstance(x, ast.Name) for x in over):
                pair = f"; of two values, {name}imum(a, b)" if name in ("max", "min") else ""
                self._refuse(
                    node, f"expected {name}(j, expression), with the indices to reduce over{pair}"
                )
            indices = tuple(x.id for x in over if isinstance(x, ast.Name))
            tree = self._tree(body)
            for index, at in zip(indices, over, strict=True):
                if index not in indices_of(tree):
                    self._refuse(at, f"index '{index}': expected it inside of {name}, too")
            return Reduce(name, indices, tree)
        count = ARITIES.get(name or "")
        if count is None:
            known = ", ".join([*ARITIES, *REDUCTIONS])
            self._refuse(node.func, f"unknown function; expected one of {known}")
        if len(node.args) != count or node.keywords:
            self._refuse(node, f"{name}: expected {count} argument{'s' * (count > 1)}")
        return Call(str(name), tuple(self._tree(x) for x in node.args))


def ranks_of(statement: Statement) -> dict[str, int]:
    """The operands of a statement in order of appearance, with their numbers of indices."""
    read = [*accesses(statement.value), *[statement.result] * statement.accumulates]
    return {x.name: len(x.indices) for x in read}


def _scaled(
    linear: tuple[dict[str, int], int] | None, by: int
) -> tuple[dict[str, int], int] | None:
    return linear and ({name: by * x for name, x in linear[0].items()}, by * linear[1])


def _of_subscripts(text: str, caller: str, ranks: Sequence[int]) -> Statement:
    """Parse NumPy's form to a product of operands A0, A1, ..."""
    where = [n for n, c in enumerate(text) if not (c.isascii() and c.isalpha() or c in ",.-> ")]
    if where:
        refuse(caller, text, where[0], "expected subscripts such as 'ij,jk->ik', or 'C[i] = ...'")
    inputs, arrow, output = text.replace(" ", "").partition("->")
    parts = inputs.split(",")
    for part in [*parts, output]:
        if not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", part):
            wrong = f"'{part}': expected letters and one '...'"
            refuse(caller, text, text.find(part), wrong, len(part))
    if ranks and len(ranks) != len(parts):
        refuse(caller, text, 0, f"expected {len(parts)} operands, got {len(ranks)}", len(inputs))
    open_ = [len(p.replace("...", "")) for p in parts]
    if any("..." in p for p in parts) and not ranks:
        wrong = "an ellipsis: expected operands, which say its length"
        refuse(caller, text, text.find("..."), wrong, 3)
    lengths = [rank - n for rank, n in zip(ranks or open_, open_, strict=True)]
    for part, more in zip(parts, lengths, strict=True):
        if more < 0 or (more and "..." not in part):
            rank = len(part.replace("...", "")) + more
            wrong = f"'{part}': the operand has {rank} dimensions"
            refuse(caller, text, text.find(part), wrong, len(part))
    most = max((n for n, p in zip(lengths, parts, strict=True) if "..." in p), default=0)
    letters = "".join(parts).replace("...", "")
    if not arrow:
        output = ("..." if most else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )

    def names(part: str, more: int) -> tuple[Affine, ...]:
        left, dots, right = part.partition("...")
        between = [f"e{n}" for n in range(most - more, most)] if dots else []
        return tuple(Affine(((name, 1),)) for name in [*left, *between, *right])

    for at, c in enumerate(output):
        if c not in letters + "." or output.count(c) > 1 and c != ".":
            wrong = f"'{c}': expected an index of an operand, once"
            refuse(caller, text, text.find("->") + 2 + at, wrong)
    tree: Tree | None = None
    places = [m.start() for m in re.finditer(r"(?<![^,])[^,]*", text)]
    for n, (part, more) in enumerate(zip(parts, lengths, strict=True)):
        access = Access(f"A{n}", names(part, more), places[n])
        tree = access if tree is None else Call("*", (tree, access))
    assert tree is not None
    return Statement(Access("OUT", names(output, most)), tree, False, text)


def in_semiring(statement: Statement, reduce: str, semiring: str, caller: str) -> Statement:
    """A statement with its sums replaced by another reduction, and `*` by a semiring's product."""
    check_semiring(caller, semiring)
    if reduce not in REDUCTIONS:
        raise ValueError(
            f"{caller}: argument 'reduce': expected one of {[*REDUCTIONS]}, got {reduce!r}"
        )
    op, product = SEMIRINGS[semiring]
    op = reduce if semiring == "plus_times" else "or" if semiring == "or_and" else op
    if op == "sum":
        return statement

    def change(tree: Tree) -> Tree | None:
        if not isinstance(tree, Call) or tree.op != "*":
            return None
        args = tuple(replaced(x, change) for x in tree.args)
        return Call(product, args, as_product=True)

    value = statement.value if product == "*" else replaced(statement.value, change)
    over = [n for n in indices_of(value) if n not in statement.result.plain]
    value = Reduce(op, tuple(over), value) if over else value
    return Statement(statement.result, value, statement.accumulates, statement.text)
