"""Decomposition of a statement into assignments: nested reductions get results of their own.

`C[i, k] = A[i, j] * exp(S[i, j] - max(j, S[i, j]))` becomes `T0[i] = max(j, S[i, j])`, and the sum
`C[i, k] += A[i, j] * exp(S[i, j] - T0[i])`. A result that is needed only at the elements of a
factor has the pattern of that factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sparsetir.expressions.notation import FUNCTIONS
from sparsetir.expressions.storage import Storage
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
    replaced,
    walk,
)  # fmt: skip

T = TypeVar("T")
Domain = tuple[frozenset[Access], ...]
EVERYWHERE: Domain = (frozenset(),)
KEEP_ZERO = {name for name, (_, keeps) in FUNCTIONS.items() if keeps} | {"abs", "relu", "neg"}


@dataclass(frozen=True)
class Term:
    """A term that a result accumulates: a tree without reductions, over its own indices.

    over : the reduced indices
    """

    value: Tree
    over: tuple[str, ...]


@dataclass(frozen=True)
class Assignment:
    """A result, the reduction of its terms, and the access whose pattern it has, if any.

    computed : whether that pattern is the one that the terms give
    """

    result: Access
    op: str
    terms: tuple[Term, ...]
    like: Access | None = None
    accumulates: bool = False
    computed: bool = False


def assignments(
    statement: Statement, operands: Mapping[str, Storage], like: str | None = None
) -> list[Assignment]:
    """The assignments of a statement, in order; the last one computes its result.

    operands : the storage of each by name
    like : the operand whose pattern the result has
    """
    taken = {x.name for x in accesses(statement.value)} | {statement.result.name}
    fresh = (name for n in range(len(taken) + 1000) if (name := f"T{n}") not in taken)
    out: list[Assignment] = []
    patterns: dict[str, Access] = {}  # those of intermediate results
    known: dict[tuple[Reduce, Access | None], Access] = {}  # results of reductions

    def sparse(access: Access) -> bool:
        return access.name in patterns or (access.name in operands and operands[access.name].sparse)

    def split(result: Access, op: str, value: Tree, pattern: Access | None, more: bool) -> None:
        target = frozenset(n for n in result.plain if n)
        covered: tuple[str, ...] = ()  # by a reduction of all terms
        whole = isinstance(value, Reduce) and {*indices_of(value)} <= target
        if isinstance(value, Reduce) and whole and target.isdisjoint(value.indices) and not more:
            op, covered, value = value.op, value.indices, value.body
        terms: list[Term] = []
        for sign, tree in terms_of(value) if op == "sum" else [(1, value)]:
            if (
                isinstance(tree, Reduce)
                and tree.op == op == "sum"
                and not {*target, *covered} & {*tree.indices}
            ):
                tree = tree.body
            over = tuple(n for n in dict.fromkeys([*indices_of(tree), *covered]) if n not in target)
            tree = flat(tree, pattern)
            for factor, part in distributed(tree) if op == "sum" else [(1, tree)]:
                terms.append(Term(part if sign * factor > 0 else Call("neg", (part,)), over))
        out.append(Assignment(result, op, tuple(terms), pattern, more))

    def flat(tree: Tree, pattern: Access | None) -> Tree:
        """Replace the reductions inside a term by intermediate results."""
        factors = [x for x in _factors(tree) if isinstance(x, Access) and sparse(x)]
        factors += [pattern] if pattern else []

        def change(part: Tree) -> Tree | None:
            if not isinstance(part, Reduce):
                return None
            free = indices_of(part)
            mask = next(
                (x for x in factors if set(x.plain) == set(free) and len(free) == len(x.indices)),
                None,
            )
            if (part, mask) in known:
                return known[part, mask]
            names = [n for n in (mask.plain if mask else free) if n]
            result = known[part, mask] = Access(
                next(fresh), tuple(Affine(((n, 1),)) for n in names)
            )
            split(result, part.op, part, mask, False)
            if mask:
                patterns[result.name] = patterns.get(mask.name, mask)
            return result

        return replaced(tree, change)

    def distributed(tree: Tree) -> list[tuple[int, Tree]]:
        """Expand a product of sums whose parts have different patterns."""
        if len(domain(tree, sparse)) == 1 or not isinstance(tree, Call):
            return [(1, tree)]
        if tree.op == "neg":
            return [(-s, x) for s, x in distributed(tree.args[0])]
        if tree.op in ("+", "-"):
            later = 1 if tree.op == "+" else -1
            return [
                *distributed(tree.args[0]),
                *((later * s, x) for s, x in distributed(tree.args[1])),
            ]
        if tree.op == "*" and not tree.as_product:
            pairs = [(a, b) for a in distributed(tree.args[0]) for b in distributed(tree.args[1])]
            return [(s * t, Call("*", (x, y))) for (s, x), (t, y) in pairs]
        if tree.op == "/":
            return [(s, Call("/", (x, tree.args[1]))) for s, x in distributed(tree.args[0])]
        return [(1, tree)]

    mask = None
    if like is not None:
        mask = Access(like, statement.result.indices)
    split(statement.result, "sum", statement.value, mask, statement.accumulates)
    return out


def terms_of(tree: Tree, sign: int = 1) -> list[tuple[int, Tree]]:
    """The terms of a sum, with signs."""
    if isinstance(tree, Call) and tree.op in ("+", "-") and not tree.as_product:
        later = sign if tree.op == "+" else -sign
        return terms_of(tree.args[0], sign) + terms_of(tree.args[1], later)
    if isinstance(tree, Call) and tree.op == "neg":
        return terms_of(tree.args[0], -sign)
    return [(sign, tree)]


def _factors(tree: Tree) -> list[Tree]:
    """The factors of a term."""
    if isinstance(tree, Call) and (tree.op == "*" or tree.as_product):
        return _factors(tree.args[0]) + _factors(tree.args[1])
    if isinstance(tree, Call) and tree.op in ("neg", "/", *KEEP_ZERO):
        return _factors(tree.args[0])
    return [tree]


def domain(tree: Tree, sparse: Callable[[Access], bool]) -> Domain:
    """The places where a tree may be nonzero: all accesses of any of these sets store an element.

    The empty set stands for everywhere.
    """
    if isinstance(tree, Access):
        return (frozenset([tree]),) if sparse(tree) else EVERYWHERE
    if not isinstance(tree, Call):
        return EVERYWHERE
    op, parts = tree.op, [domain(x, sparse) for x in tree.args]
    if op in ("*", "and") or tree.as_product:
        return least(a | b for a in parts[0] for b in parts[1])
    if op == "/" or op in KEEP_ZERO or (op == "**" and _is_positive(tree.args[1])):
        return parts[0]
    if op in ("+", "-", "maximum", "minimum"):
        return least([*parts[0], *parts[1]])
    if op in ("<", ">", "!=") and tree.args[1] == Number(0):
        return parts[0]
    if op == "where" and tree.args[2] == Number(0):
        return least(a | b for a in parts[0] for b in parts[1])
    if op == "where":
        return least([*parts[1], *parts[2]])
    return EVERYWHERE


def _is_positive(tree: Tree) -> bool:
    return isinstance(tree, Number) and tree.value > 0


def least(sets: Iterable[frozenset[T]]) -> tuple[frozenset[T], ...]:
    """The sets that contain no other one."""
    distinct = list(dict.fromkeys(sets))
    return tuple(s for s in distinct if not any(other < s for other in distinct))


def has_values(tree: Tree) -> bool:
    """Whether a tree reads an index as a value."""
    return any(isinstance(x, Index) for x in walk(tree))
