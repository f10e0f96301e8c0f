"""The statements of a stage-I body with their surroundings, for the rules of the verifier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import Axis, Names, SparseFunc, SparseIteration, flat_axes, nodes_of
from sparsetir.sparse_ir.traversal import collect

# statement -> the fields with its own expressions, without those of nested statements
STATEMENTS: dict[type, tuple[str, ...]] = {
    SparseIteration: (),
    tirx.SeqStmt: (),
    tirx.BufferStore: ("value", "indices"),
    tirx.For: ("min", "extent", "step"),
    tirx.While: ("condition",),
    tirx.IfThenElse: ("condition",),
    tirx.stmt.Bind: ("value",),
    tirx.stmt.AllocBuffer: (),
    tirx.AssertStmt: ("condition",),
    tirx.Evaluate: ("value",),
}
NESTED = ("init", "body", "then_case", "else_case")


class Broken(NamedTuple):
    """A breach of a rule: its place (an axis or a span), the problem, and its iteration."""

    where: Any
    message: str
    of: str = ""


Found = Iterator[Broken]
Texts = Iterator[str]  # problems of a statement or declaration that the caller names


@dataclass
class Site:
    """A statement and its surroundings.

    names : the function's declarations
    iterations : the sparse iterations around it, the outermost first
    init_of : the iteration whose init contains it, or None
    defined : handles of variables and buffers that statements around it define
    reduced : for a variable that depends on a reduction coordinate, that coordinate's name and
        its iteration's
    known : verified iterations, which are skipped
    """

    func: SparseFunc
    stmt: Any
    names: Names
    iterations: tuple[SparseIteration, ...] = ()
    init_of: SparseIteration | None = None
    defined: set[int] = field(default_factory=set)
    reduced: dict[Any, tuple[str, str]] = field(default_factory=dict)
    known: frozenset[Any] = frozenset()

    def defines(self, var: Any) -> bool:
        """Whether a variable, handle or buffer is defined here."""
        return var.__chandle__() in self.defined or self.names.declares(var)

    def at(self, stmt: Any) -> Site:
        """Another statement of the same block."""
        return replace(self, stmt=stmt)

    def inside(self, stmt: Any) -> Site:
        """A statement in a nested block, whose definitions end with it."""
        site = self.at(stmt)
        site.defined, site.reduced = set(self.defined), dict(self.reduced)
        return site

    @cached_property
    def axes(self) -> list[Axis]:
        """The plain axes of the iteration that the statement is."""
        return flat_axes(self.stmt.axes)

    @cached_property
    def expressions(self) -> list[Any]:
        """The statement's own expressions."""
        values: list[Any] = []
        for name in STATEMENTS.get(type(self.stmt), ()):
            value = getattr(self.stmt, name)
            if isinstance(value, ir.Expr):
                values.append(value)
            elif value is not None:
                values.extend(value)
        return values

    @cached_property
    def loads(self) -> list[Any]:
        """The loads in its expressions, also in indices."""
        return collect((ir.TensorLoad,), self.expressions, past=(ir.Var,))

    @cached_property
    def accesses(self) -> list[tuple[Any, list[Any]]]:
        """(buffer, indices) of every load and store of the statement."""
        pairs = [(load.source, load.indices[:]) for load in self.loads]
        if isinstance(self.stmt, tirx.BufferStore):
            pairs.insert(0, (self.stmt.buffer, self.stmt.indices[:]))
        return pairs


def used_variables(*expressions: Any) -> list[Any]:
    """The distinct variables in some expressions, without buffers."""
    # The type of a buffer refers to variables that the expression does not use.
    variables = {var.__chandle__(): var for var in nodes_of(ir.Var, *expressions, nested=False)}
    return [var for var in variables.values() if not tirx.is_buffer_var(var)]


def sites(site: Site) -> Iterator[Site]:
    """Every statement, outer ones first; a rule sees the definitions before its statement."""
    stmt = site.stmt
    if stmt in site.known:
        return
    yield site
    if isinstance(stmt, tirx.SeqStmt):
        for child in stmt.seq:
            if child not in site.known:
                yield from sites(site.at(child))
    elif isinstance(stmt, tirx.stmt.Bind):
        site.defined.add(stmt.var.__chandle__())
        for reduced in (site.reduced[v] for v in used_variables(stmt.value) if v in site.reduced):
            site.reduced[stmt.var] = reduced
    elif isinstance(stmt, tirx.stmt.AllocBuffer):
        site.defined.add(stmt.buffer.__chandle__())
    elif type(stmt) in STATEMENTS:
        for name in NESTED:
            child = getattr(stmt, name, None)
            if child is not None:
                yield from sites(_nested(site, name, child))


def _nested(site: Site, name: str, child: Any) -> Site:
    """The block `child` below `site`, with the variables that the statement there defines."""
    stmt, inner = site.stmt, site.inside(child)
    if isinstance(stmt, tirx.For):
        inner.defined.add(stmt.loop_var.__chandle__())
    if isinstance(stmt, SparseIteration):
        inner.iterations = (*site.iterations, stmt)
        inner.init_of = stmt if name == "init" else site.init_of
        inner.defined.update(v.__chandle__() for v in stmt.vars)
        inner.reduced.update(
            {
                v: (v.name, stmt.name)
                for v, k in zip(stmt.vars, stmt.kinds, strict=False)
                if k == "R"
            }
        )
    return inner
