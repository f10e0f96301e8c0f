"""Legality of transformations: named questions, each with its proof or the reason against it.

Every primitive that changes the order of visits, or distributes them over workers, asks here.

`parallelizable`  : which loops may run in parallel, and where visits of the others conflict
`evidence`        : the accesses that prove that of a loop, or that conflict
`writes_disjoint` : whether visits of a loop write disjoint elements
`reorderable`     : whether visits may run in any order

The visits of an iteration have no order (the language page). So no visit reads what another one
writes, except for an element that all of them update by one associative and commutative operator;
and visits of a reduction that overwrite an element write equal values. If visits of spatial
coordinates overwrite one element, as `C[order[i]] = X[i]` may, the author vouches for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.annotations import ATOMIC, GPU_UNITS, ORDERED
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    accesses_of,
    loads_of,
    nodes_of,
    same_indices,
    stores_of,
    substitute,
    variables_of,
)
from sparsetir.sparse_ir.parallel import (
    Access,
    constant_length,
    has_own_place,
    is_at,
    written_accesses,
)
from sparsetir.sparse_ir.races import FREE, Fact, private_buffers, races_of
from sparsetir.sparse_ir.reduction import loads_own, reduction_of, split_guards
from sparsetir.sparse_ir.tile_marks import contains, with_conditions, without_tail_shifts
from sparsetir.sparse_ir.tir import statements_of
from sparsetir.sparse_ir.traversal import access_rules, map_expr


@functools.lru_cache(maxsize=8)
def for_dependences(it: SparseIteration, func: SparseFunc) -> Any:
    """An iteration without tail shifts and permutations, for dependence analysis."""
    return without_permutations(without_tail_shifts(it), known(func).permutations)


def without_permutations(tree: Any, orders: dict[Any, int]) -> Any:
    """A statement or iteration with permutations replaced by the identity.

    If all accesses of a buffer are indexed by the same permutation, `Out[order[e]]`, two of them
    conflict if and only if those at `Out[e]` do. So do those at `Out[rows[s] + v]` and at
    `Out[s * 16 + v]`, for v in [0, 16), if all rows are multiples of 16.

    orders : the permutations, and of what their values are multiples
    """
    if not orders:
        return tree
    through: dict[Any, list[set[Any]]] = {}

    for node in nodes_of((tirx.BufferStore, ir.TensorLoad), tree):
        buffer = node.source if isinstance(node, ir.TensorLoad) else node.buffer
        dims = through.setdefault(buffer, [set() for _ in node.indices])
        for dim, index in zip(dims, node.indices, strict=True):
            dim.add(_order_of(index, orders))

    def straight(buffer: Any, indices: Any) -> tuple[Any, list[Any]]:
        return buffer, [
            _straight(index, orders) if len(dim) == 1 and None not in dim else index
            for dim, index in zip(through.get(buffer, [set()] * len(indices)), indices, strict=True)
        ]

    return map_expr(tree, access_rules(straight))


def _order_of(index: Any, orders: dict[Any, int]) -> Any:
    """The permutation from which an index, or all of it but one variable, is loaded; or None."""
    load, within = _load_and_rest(index)
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != 1:
        return None
    multiple = orders.get(load.source, 0)
    return load.source if multiple > (within is not None) else None


def _straight(index: Any, orders: dict[Any, int]) -> Any:
    """An index without the permutation from which it is loaded."""
    load, within = _load_and_rest(index)
    multiple = orders[load.source]
    at = load.indices[0] * multiple if multiple > 1 else load.indices[0]
    return at if within is None else at + within


def _load_and_rest(index: Any) -> tuple[Any, Any]:
    rest = isinstance(index, tirx.Add) and isinstance(index.b, ir.Var)
    return (index.a, index.b) if rest else (index, None)


def parallelizable(func: SparseFunc, it: SparseIteration) -> list[Fact]:
    """The race fact of each loop of an iteration: :data:`FREE` if it may run in parallel."""
    return races_of(for_dependences(it, func), private_buffers(func, it), func=func)


def evidence(func: SparseFunc, it: SparseIteration, place: int) -> list[tuple[Any, list[Any]]]:
    """The accesses behind the race fact of a loop: (buffer, lists of indices).

    For a free loop all accesses of each written buffer, which differ in the loop's coordinates. For
    another loop the first two accesses in which two visits may conflict, the same one twice if it
    conflicts with itself; none if the conflict is not between accesses.
    """
    plain, private = for_dependences(it, func), private_buffers(func, it)
    _, at, end = plain.entries()[place]
    free = parallelizable(func, it)[place] == FREE
    out: list[tuple[Any, list[Any]]] = []
    for buffer, every in written_accesses(plain).items():
        accesses = [
            a
            for n, a in enumerate(every)
            if not any(
                same_indices(a.indices, b.indices) and contains(a.conditions, b.conditions)
                for b in every[:n]
            )
        ]
        pairs = ([a, b] for n, a in enumerate(accesses) for b in accesses[n:])
        met = (p for p in pairs if not all(has_own_place(plain, v, p) for v in plain.vars[at:end]))
        if buffer not in private and (shown := accesses if free else next(met, None)):
            out.append((buffer, [access.indices for access in shown]))
    return out


def writes_disjoint(func: SparseFunc, it: SparseIteration, place: int) -> bool:
    """Whether visits of a loop write disjoint elements, and read none of the others' elements."""
    return parallelizable(func, it)[place] == FREE


def own_stores(it: SparseIteration) -> list[Any]:
    """The stores of an iteration that are not in nested ones."""
    none = tirx.Evaluate(0)
    return stores_of(map_expr(it.body, [(SparseIteration, lambda _: none)]))


def races(it: SparseIteration, fact: Fact, unit: str) -> bool:
    """Whether visits of a loop on workers of a unit race, according to its fact.

    They do not if they are free, or on a GPU conflict only at buffers that are updated atomically.
    """
    if fact == FREE or unit not in GPU_UNITS:
        return fact != FREE
    each = [it, *nodes_of(SparseIteration, it.body)]
    stores = [(s.buffer.name, ATOMIC in n.annotations) for n in each for s in own_stores(n)]
    met = {b for b, _ in stores} - {b for b, atomic in stores if not atomic}
    return not fact.buffers or not met.issuperset(fact.buffers)


IN_ORDER = 'T.sp_iter_attr({"ordered": 1}) where visits must follow each other as they are stored'


class Dependence(NamedTuple):
    """Accesses of a buffer that make the order of visits matter.

    what : the accesses, in words
    instead : the program that is expected instead
    """

    buffer: str
    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"


def reorderable(func: SparseFunc, it: SparseIteration) -> Dependence | None:
    """The dependence that forbids another order of visits; None if there is none."""
    if ORDERED in it.annotations:
        return Dependence("", "its visits follow each other", "reorder loops before")
    plain = for_dependences(it, func)
    written = written_accesses(plain)
    if not written:
        return None
    private = private_buffers(func, it)
    for buffer, accesses in written.items():
        if buffer not in private:
            dependence = _dependence(func, plain, buffer, accesses)
            if dependence is not None:
                return dependence
    return None


def _dependence(
    func: SparseFunc, it: SparseIteration, buffer: Any, accesses: list[Access]
) -> Dependence | None:
    """The dependence among the accesses of one buffer that fixes the order, or None."""
    stores = [
        (s, c)
        for s, c in with_conditions(it.body)
        if isinstance(s, tirx.BufferStore) and s.buffer.same_as(buffer)
    ]
    loads = loads_of(it.body, buffer)
    name = buffer.name
    operators = {_operator(s) for s, _ in stores}
    own = sum(len(loads_of(s.value, buffer)) for s, _ in stores)
    if loads and len(operators) == 1 and None not in operators and own == len(loads):
        return None  # one update per visit, and no other access
    shared = [
        (v, kind)
        for axis, v, kind in it.axis_of()
        if constant_length(axis) != 1
        and not (axis.unique and has_own_place(it, v, accesses))
        and not is_at(func, buffer, axis, v, accesses)
    ]
    if not shared:
        return None
    if loads:
        at = ", ".join(f"'{v.name}'" for v, _ in shared)
        return Dependence(
            name,
            f"visits that differ in {at} read '{name}', which others write",
            "expected an update of one element by one operator, `X[..] = X[..] + term` (or *, max, "
            f"min), other buffers to read and to write, or {IN_ORDER}",
        )
    reduced = {v for v, kind in shared if kind == "R"}
    if not reduced:
        return None
    moving = reduced | _dependents(it)
    for store, _ in stores:
        if moving & set(variables_of(store.value)):
            at = ", ".join(sorted(f"'{v.name}'" for v in reduced))
            return Dependence(
                name,
                f"visits of {at}, a reduction, overwrite what others write to '{name}'",
                "expected an update that is associative and commutative, `X[..] = X[..] + term` "
                f"(or *, max, min), a value that is the same in all of them, or {IN_ORDER}",
            )
    return None


def _dependents(it: SparseIteration) -> set[Any]:
    """Variables and buffers of the body whose values may depend on coordinates."""
    dependents: set[Any] = set()
    for part in nodes_of((tirx.For, tirx.Bind, SparseIteration), it.body):
        if isinstance(part, SparseIteration):
            dependents |= set(part.vars)
        else:
            dependents.add(part.loop_var if isinstance(part, tirx.For) else part.var)
    return dependents | {s.buffer for s in nodes_of(tirx.BufferStore, it.body)}


# Updates besides those of :func:`reduction_of` that may run in any order, with whether the element
# may be the second operand.
COMMUTING = {
    tirx.Sub: ("sum", False),
    tirx.Div: ("product", False),
    tirx.And: ("and", True),
    tirx.Or: ("or", True),
    tirx.BitwiseAnd: ("bitwise and", True),
    tirx.BitwiseOr: ("bitwise or", True),
    tirx.BitwiseXor: ("bitwise xor", True),
}


def _operator(store: Any) -> str | None:
    """The operator by which a store updates its own element, or None."""
    reduction = reduction_of(store)
    if reduction is not None:
        return reduction.operator
    value = store.value
    operator, either = COMMUTING.get(type(value), (None, False))
    if operator is None:
        return None

    for own, term in ((value.a, value.b), (value.b, value.a))[: 1 + either]:
        if loads_own(store, own) and not loads_of(term, store.buffer):
            return operator
    return None


def sets_before_reading(it: SparseIteration, var: Any, ignored: Callable[[Any], bool]) -> bool:
    """Whether each visit of an iteration stores the elements of a buffer before it reads them.

    ignored : returns whether a condition may be disregarded

    All accesses must be at the same indices, in coordinates of axes: of the iteration and those
    around it, or of axes that nested iterations visit; the first of these stores without a load.
    """
    if it.init is not None and accesses_of(it.init, var):
        return False
    stmt = next(s for s in statements_of(it.body) if accesses_of(s, var))
    first: dict[str, Any] = {}  # the coordinate over each axis that the first store visits
    while isinstance(stmt, SparseIteration):
        plain = all(isinstance(node, Axis) for node in stmt.axes)
        if not plain or stmt.init is not None or set(stmt.kinds) != {"S"}:
            return False
        first |= {axis.name: v for axis, v, _ in stmt.axis_of()}
        stmt = stmt.body
    conditions, store = split_guards(stmt)
    fits = isinstance(store, tirx.BufferStore) and store.buffer.same_as(var)
    if not fits or loads_of(store.value, var) or not all(ignored(c) for c in conditions):
        return False
    same = {
        v: first[axis.name]
        for nested in nodes_of(SparseIteration, it.body)
        for axis, v, _ in nested.axis_of()
        if axis.name in first and axis.name in {n.name for n in nested.axes if isinstance(n, Axis)}
    }
    return all(
        same_indices([substitute(i, same) for i in other.indices], store.indices)
        for other in accesses_of(it.body, var)
    )
