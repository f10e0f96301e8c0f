"""Expressions as trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias


class NotationError(ValueError):
    """Raised for an expression that violates the notation; the message shows the position."""


@dataclass(frozen=True)
class Affine:
    """An affine sum: indices times integers, plus an integer."""

    terms: tuple[tuple[str, int], ...]
    offset: int = 0

    @property
    def plain(self) -> str | None:
        """The index, if the sum is a single index, else None."""
        single = len(self.terms) == 1 and self.terms[0][1] == 1 and not self.offset
        return self.terms[0][0] if single else None

    def __str__(self) -> str:
        parts = [name if by == 1 else f"{name} * {by}" for name, by in self.terms]
        parts += [str(self.offset)] if self.offset or not parts else []
        return " + ".join(parts)


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True)
class Index:
    """An index as a value."""

    name: str


@dataclass(frozen=True)
class Access:
    """An element of an operand; a scalar operand has no indices."""

    name: str
    indices: tuple[Affine, ...] = ()
    at: int = field(default=0, compare=False)

    @property
    def plain(self) -> tuple[str | None, ...]:
        """The index of each dimension, None for other sums."""
        return tuple(i.plain for i in self.indices)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.indices))}]" if self.indices else self.name


@dataclass(frozen=True)
class Call:
    """An operator or a function of expressions.

    as_product : whether it is a semiring's product, which is absent where an argument is, whatever
        `op` does
    """

    op: str
    args: tuple[Tree, ...]
    as_product: bool = False


@dataclass(frozen=True)
class Reduce:
    """A reduction over indices: "sum", "prod", "max", "min", or "or", the maximum with 0."""

    op: str
    indices: tuple[str, ...]
    body: Tree


Tree: TypeAlias = Number | Index | Access | Call | Reduce


@dataclass(frozen=True)
class Statement:
    """`result = value`, or `result += value`."""

    result: Access
    value: Tree
    accumulates: bool
    text: str


def walk(tree: Tree) -> Iterator[Tree]:
    """A tree and all of its subtrees, from left to right."""
    yield tree
    below = (
        tree.args if isinstance(tree, Call) else (tree.body,) if isinstance(tree, Reduce) else ()
    )
    for part in below:
        yield from walk(part)


def accesses(tree: Tree) -> list[Access]:
    """The distinct accesses in a tree."""
    return list(dict.fromkeys(x for x in walk(tree) if isinstance(x, Access)))


def indices_of(tree: Tree) -> list[str]:
    """The free indices of a tree, in order of appearance."""
    if isinstance(tree, Index):
        return [tree.name]
    if isinstance(tree, Access):
        return list(dict.fromkeys(name for i in tree.indices for name, _ in i.terms))
    if isinstance(tree, Call):
        return list(dict.fromkeys(name for x in tree.args for name in indices_of(x)))
    if isinstance(tree, Reduce):
        return [name for name in indices_of(tree.body) if name not in tree.indices]
    return []


def replaced(tree: Tree, change: Callable[[Tree], Tree | None]) -> Tree:
    """Replace parts of a tree by the results of `change`; None keeps a part."""
    other = change(tree)
    if other is not None:
        return other
    if isinstance(tree, Call):
        args = tuple(replaced(x, change) for x in tree.args)
        return Call(tree.op, args, tree.as_product)
    if isinstance(tree, Reduce):
        return Reduce(tree.op, tree.indices, replaced(tree.body, change))
    return tree


def refuse(caller: str, text: str, at: int, what: str, length: int = 1) -> NoReturn:
    """Raise NotationError for a position in a text, shown with a caret."""
    raise NotationError(f"{caller}: {what}\n    {text}\n    {' ' * at}{'^' * max(1, length)}")
