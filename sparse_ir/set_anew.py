"""Whether visits may run a second time: they set anew what they read of what they write.

Visits of a tile that begins earlier come by some elements again (:mod:`sparsetir.sparse_ir.tails`).
In ::

    with T.sp_iter([I, H0], "SS", "rows") as [i, h0]:
        with T.sp_iter([J, H1], "SS", "powers") as [j, h1]:
            Y[i, j, ..] = exp(X[i, j, ..])
        with T.sp_iter([J, H1], "SS", "twice") as [j, h1]:
            Y[i, j, ..] = Y[i, j, ..] * 2

each visit of `rows` stores all that it reads of Y before, so that a further one leaves the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseIteration,
    accesses_of,
    loads_of,
    nodes_of,
    same_indices,
    stores_of,
    substitute,
    variables_of,
)
from sparsetir.sparse_ir.reduction import taken_apart

__all__ = ["same_again", "sets_before_reading"]


def same_again(it: SparseIteration, workspaces: set[Any]) -> bool:
    """Whether a further visit of an iteration leaves the same in all workspaces that it writes."""
    written = {s.buffer for s in stores_of(it.body, it.init)} & workspaces
    return all(
        _begins_anew(it.body, var) and not (it.init is not None and accesses_of(it.init, var))
        for var in written
    )


def sets_before_reading(it: SparseIteration, var: Any, ignored: Callable[[Any], bool]) -> bool:
    """Whether each visit of an iteration stores what it accesses of a buffer, before it reads it.

    ignored : whether a condition does not count

    All accesses must be at the same place, told by coordinates of axes: of the iteration and those
    around it, or of axes that nested iterations visit, the first of which stores without a load.
    """
    if it.init is not None and accesses_of(it.init, var):
        return False
    parts = list(it.body.seq) if isinstance(it.body, tirx.SeqStmt) else [it.body]
    stmt = next(s for s in parts if accesses_of(s, var))
    first: dict[str, Any] = {}  # the coordinate over each axis that the first store visits
    while isinstance(stmt, SparseIteration):
        plain = all(isinstance(node, Axis) for node in stmt.axes)
        if not plain or stmt.init is not None or set(stmt.kinds) != {"S"}:
            return False
        first |= {axis.name: v for axis, v, _ in stmt.axis_of()}
        stmt = stmt.body
    conditions, store = taken_apart(stmt)
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


def _begins_anew(nest: Any, var: Any) -> bool:
    """Whether a workspace is set, inside the loops around all of its uses, before it is added to.

    That is, in a sequence of statements that holds all of its accesses, the first one that touches
    it stores to it and loads nothing of it, or does so in its init.
    """
    while True:
        if isinstance(nest, tirx.SeqStmt):
            parts = [s for s in nest.seq if accesses_of(s, var)]
            first = parts[0]
            if len(parts) > 1:
                return not loads_of(first, var) or _init_sets(first, var)
            nest = first
        elif isinstance(nest, SparseIteration):
            if nest.init is not None and accesses_of(nest.init, var):
                return _init_sets(nest, var)
            nest = nest.body
        elif isinstance(nest, tirx.IfThenElse) and nest.else_case is None:
            nest = nest.then_case
        else:
            return not loads_of(nest, var)


def _init_sets(stmt: Any, var: Any) -> bool:
    """Whether an iteration sets all that it accesses of a buffer in its init."""
    if not isinstance(stmt, SparseIteration):
        return False
    init = stmt.init
    if not isinstance(init, tirx.BufferStore) or not init.buffer.same_as(var):
        return False
    indices = set(variables_of(*init.indices))
    spatial = {v for _, v, kind in stmt.axis_of() if kind == "S"}
    return (
        not loads_of(init.value, var)
        and indices & set(stmt.vars) <= spatial
        and all(same_indices(other.indices, init.indices) for other in accesses_of(stmt.body, var))
    )
