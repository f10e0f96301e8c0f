"""Checks of the sizes and types of an expression's operands, and the types of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sparsetir.expressions.assignments import terms_of
from sparsetir.expressions.notation import COMPARISONS
from sparsetir.expressions.trees import (
    Access,
    Call,
    Number,
    Reduce,
    Statement,
    Tree,
    accesses,
    indices_of,
    refuse,
    walk,
)  # fmt: skip
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.texts import many

HALVES = ("float16", "bfloat16")
# Operators that map integers to integers.
OF_INTEGERS = ("+", "-", "*", "neg", "abs", "relu", "where", "maximum", "minimum", "and")


def computed_in(statement: Statement, dtype: str) -> str:
    """The type that an expression is computed in, given the type that holds its operands.

    16-bit floats are computed in float32, bool in int64, and quotients and functions of integers
    in float64.
    """
    if dtype in HALVES:
        return "float32"
    if dtype.startswith("float"):
        return dtype
    for x in walk(statement.value):
        if isinstance(x, Call) and x.op not in (*OF_INTEGERS, *COMPARISONS):
            return "float64"
        if isinstance(x, Number) and not isinstance(x.value, int):
            return "float64"
    return "int64" if dtype == "bool" else dtype


def common_dtype(dtypes: Sequence[str], constants: Sequence[str] = ()) -> str:
    """The type that holds all of these, by NumPy's rules.

    constants : the types of Python's numbers, which only decide whether it is a float
    """
    distinct = set(dtypes) or set(constants)
    if "bfloat16" in distinct:  # unknown to NumPy
        rest = distinct - {"bfloat16", "bool", "int8", "uint8"}
        name = (
            "bfloat16" if not rest else "float32" if rest <= {"float16", "float32"} else "float64"
        )
    else:
        name = np.result_type(*distinct).name
    return "float64" if "float64" in constants and "float" not in name else name


def check_ranks(caller: str, statement: Statement, ranks: Mapping[str, int]) -> None:
    """Raise for operands with a number of dimensions other than that of their indices."""
    for access in _all_accesses(statement, ranks):
        rank = ranks[access.name]
        if rank != len(access.indices):
            has, got = many(rank, "dimension"), many(len(access.indices), "index", "indices")
            _refuse(caller, statement, access, f"operand '{access.name}' has {has}, got {got}")


def check_sums(caller: str, statement: Statement) -> None:
    """Raise for a sum inside a term part of which lacks an index that the term is summed over.

    `(b[i] - A[i,j] * x[j]) / d[i]` would add b[i] for each j, unlike its terms apart.
    """
    target = {*statement.result.plain}
    for _, term in terms_of(statement.value):
        for name in indices_of(term):
            part = None if name in target else _lacking(term, name)
            if part is not None:
                at = (accesses(part) or accesses(term))[0]
                what = (
                    f"this part of a sum lacks index '{name}', which its term is summed over; "
                    f"expected sum({name}, ..) around what is summed"
                )
                _refuse(caller, statement, at, what)


def _lacking(tree: Tree, name: str) -> Tree | None:
    """A part that lacks an index, of the only factor of a term that has it."""
    if isinstance(tree, Reduce) and tree.op == "sum":
        return _lacking(tree.body, name)
    if not isinstance(tree, Call) or tree.op not in ("neg", "+", "-", "*", "/"):
        return None
    have = [x for x in tree.args if name in indices_of(x)]
    if tree.op in ("+", "-"):
        parts = (x if x not in have else _lacking(x, name) for x in tree.args)
        return next((x for x in parts if x is not None), None)
    if len(have) > 1 or (tree.op == "/" and have[0] is tree.args[1]):
        return None
    return _lacking(have[0], name)


def check_like(caller: str, statement: Statement, rank: int) -> None:
    """Raise for a pattern with a number of dimensions other than the result's."""
    wanted = len(statement.result.indices)
    if rank != wanted:
        raise wrong(caller, "like", f"a pattern of {wanted} dimensions", f"one of {rank}")


def check_format(caller: str, statement: Statement, format: object, like: object) -> None:
    """Raise for a format of a result that has a pattern, or that is accumulated."""
    if format is not None and (statement.accumulates or like):
        raise wrong(caller, "format", "None with `like` and +=", repr(format))


def sizes_of(
    caller: str, statement: Statement, shapes: Mapping[str, tuple[int, ...]]
) -> dict[object, int]:
    """The size of each index, and of each dimension of operands.

    The size of an index that occurs only in sums, such as i in X[2 * i + k], is the largest that
    keeps these within the operand.
    """
    sizes: dict[object, int] = {}
    where: dict[str, tuple[Access, int]] = {}
    read = _all_accesses(statement, shapes)
    for access in read:
        for d, (index, size) in enumerate(zip(access.indices, shapes[access.name], strict=True)):
            sizes[access.name, d] = size
            name = index.plain
            if name is not None and sizes.setdefault(name, size) != size:
                first, dim = where[name]
                what = (
                    f"index '{name}' has size {sizes[name]} in dimension {dim} of '{first.name}' "
                    f"and {size} in dimension {d} of '{access.name}'"
                )
                _refuse(caller, statement, access, what)
            if name is not None:
                where.setdefault(name, (access, d))
    for access in read:
        for d, index in enumerate(access.indices):
            unknown = [(n, by) for n, by in index.terms if n not in sizes]
            if len(unknown) == 1 and unknown[0][1] > 0:
                ((name, by),) = unknown
                known = [step * (sizes[n] - 1) for n, step in index.terms if n != name and step > 0]
                last = sizes[access.name, d] - 1 - index.offset - sum(known)
                sizes[name] = max(0, last // by + 1)
    for access in read:
        for name in (n for index in access.indices for n, _ in index.terms):
            if name not in sizes:
                what = (
                    f"index '{name}' has no size: expected an operand with it alone in a dimension"
                )
                _refuse(caller, statement, access, what)
    return sizes


def _all_accesses(statement: Statement, known: Mapping[str, object]) -> list[Access]:
    """All accesses of a statement, including its result if that is an operand."""
    more = [statement.result] if statement.result.name in known else []
    return [*accesses(statement.value), *more]


def _refuse(caller: str, statement: Statement, access: Access, what: str) -> None:
    refuse(caller, statement.text, access.at, what, len(access.name))
