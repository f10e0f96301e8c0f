"""Tiles that visit coordinates twice, and the removal of their predicates.

`split(loop, factors, tail="shift")` guards the repeated visits of a tile by the predicate that the
coordinate is not before the tile's start, `p * 64`::

    if T.tail(T.at_most(p * 64, feat - 64) + v * 16 + l, feat, p * 64):
        C[i, T.at_most(p * 64, feat - 64) + v * 16 + l] = C_ws[v, l]

With tail="repeat" the predicate is that the coordinate is within the axis, whose last one repeats::

    if T.tail(p * 64 + v * 16 + l, feat, p * 64 + v * 16 + l):
        C[i, T.at_most(p * 64 + v * 16 + l, feat - 1)] = C_ws[v, l]

Stores other than to workspaces keep that predicate: where it does not hold they are out of bounds,
and discarded. Otherwise both kinds are treated the same.

Such a predicate would make a loop over lanes scalar. If an iteration over tiles overwrites its
results, reads only those of them that the same visit has set, and reads nothing at indices that
depend on the tile rather than the coordinate, then computing an element twice gives the same value
twice, and the predicate is dropped. In a reduction over the tiles the repeated terms are
replaced by the operator's identity::

    S[e] = S[e] + T.Select(T.min(p * 64, feat - 64) + l >= p * 64, X[.., ..] * Y[.., ..], 0.0)

Elsewhere it stays. A program's own predicates and minima are not affected: see
:mod:`sparsetir.sparse_ir.tile_marks`.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.legal import sets_before_reading
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    accesses_of,
    iteration_with,
    loads_of,
    nodes_of,
    stores_of,
    substitute,
)
from sparsetir.sparse_ir.races import reads_after_writes
from sparsetir.sparse_ir.reduction import add_guards, masked, reduction_of, split_guards
from sparsetir.sparse_ir.tile_marks import (
    contains,
    is_bound,
    is_tail,
    predicate_of,
    repeats,
    start_of,
    with_conditions,
    without_bounds,
    without_marks,
)
from sparsetir.sparse_ir.tir import as_dtype, as_one, dtype_of, free_vars, map_parts, statements_of
from sparsetir.sparse_ir.traversal import access_rules, map_expr
from sparsetir.sparse_ir.workers import divided


def resolve_tails(func: SparseFunc) -> tuple[SparseFunc, set[Any]]:
    """The function with redundant predicates of shifted tiles dropped, and no marks left.

    Also return the coordinates of tiles that must now run sequentially: one of them sets and then
    updates elements that another one may set again.
    """
    nests = statements_of(func.body)
    if not any(_shifted(n) for n in nests):
        return func.replace(body=without_marks(func.body)), set()
    local = [b for b in func.buffers if b.handle is None]
    private = {b.var: b for b in local if sum(bool(accesses_of(n, b.var)) for n in nests) <= 1}
    lengths = {b.var: [a.length for a in b.axes or ()] for b in func.buffers}
    in_turn: set[Any] = set()
    settled = [_resolve(n, private, lengths, in_turn) if _shifted(n) else n for n in nests]
    return func.replace(body=without_marks(as_one(settled))), in_turn


def _resolve(
    nest: Any, private: dict[Any, SparseBuffer], lengths: dict[Any, list[Any]], in_turn: set[Any]
) -> Any:
    every = nodes_of(SparseIteration, nest)
    bound_by = {v: (it, kind, axis.name) for it in every for axis, v, kind in it.axis_of()}

    def tiles(condition: Any) -> Any:
        """The loops over tiles that a start depends on, equal in all iterations; or None."""
        start = start_of(condition)
        if start is None:
            return None
        return frozenset(bound_by[v][2] for v in free_vars(start) if v in bound_by)

    stores = [(s, under) for s, under in with_conditions(nest) if isinstance(s, tirx.BufferStore)]
    # The starts of tiles on which each store outside of workspaces is conditional.
    written_under = [
        [start_of(c) for c in conditions if start_of(c) is not None]
        for store, conditions in stores
        if store.buffer not in private
    ]

    def has_own_slots(axis: str, stmt: Any, family: frozenset[str]) -> bool:
        """Whether each tile has workspace slots that only it reads, directly or indirectly."""
        if stmt.buffer not in private or not _indexes(stmt.indices, axis, bound_by):
            return False
        return all(
            any(tiles(c) == family for c in conditions)
            or all(_indexes(load.indices, axis, bound_by) for load in loads_of(store, stmt.buffer))
            and has_own_slots(axis, store, family)
            for store, conditions in stores
            if loads_of(store, stmt.buffer) and not store.buffer.same_as(stmt.buffer)
        )

    def idempotent(it: SparseIteration, family: frozenset[str]) -> bool:
        """Whether a visit sets the workspaces that it reads, if a tile's predicates are dropped."""

        def dropped(node: Any) -> Any:
            mine = tiles(node.condition) == family and node.else_case is None
            return node.then_case if mine else node

        body = map_expr(it.body, [(tirx.IfThenElse, dropped)])
        return all(
            reads_after_writes(body, private[var]) and not accesses_of(it.init, var)
            for var in {s.buffer for s in stores_of(it.body, it.init)} & private.keys()
        )

    binds = {bind.var: bind.value for bind in nodes_of(tirx.Bind, nest)}

    def is_same_in_tiles(condition: Any, exprs: list[Any]) -> bool:
        """Whether expressions have the same value in each tile that visits a coordinate.

        Workspaces that only this nest uses have separate slots per tile; in others another nest may
        have skipped the repeated visits.
        """
        coordinate = condition.args[0]
        coordinate_vars = free_vars(coordinate) & set(bound_by)
        anywhere = tirx.Var("coordinate", dtype_of(coordinate))

        def general(expr: Any) -> Any:
            return anywhere if tvm_ffi.structural_equal(expr, coordinate) else expr

        def load(node: Any) -> Any:
            return tirx.const(0, dtype_of(node)) if node.source in private else node

        for expr in exprs:
            while binds.keys() & free_vars(expr):
                expr = substitute(expr, binds)
            if not is_tail(expr):
                expr = map_expr(expr, [(ir.TensorLoad, load)])
                if coordinate_vars & free_vars(map_expr(expr, [(type(coordinate), general)])):
                    return False
        return True

    def may_repeat(condition: Any, conditions: list[Any], stmt: Any) -> bool:
        """Whether a store may run for coordinates of a tile that an earlier tile also has."""
        return all(
            has_own_slots(bound_by[v][2], stmt, tiles(condition))
            or idempotent(bound_by[v][0], tiles(condition))
            and (stmt.buffer in private or is_same_in_tiles(condition, [stmt.value, *conditions]))
            for v in free_vars(start_of(condition))
            if v in bound_by
        )

    def changing(condition: Any) -> tuple[bool, set[Any]]:
        """Whether a tile reads elements that it updates; if it sets them first, its coordinates."""
        family, turns = tiles(condition), set()
        for v in free_vars(start_of(condition)) & set(bound_by):
            it = bound_by[v][0]
            changed = {s.buffer for s in stores_of(it.body, it.init)} - private.keys()
            for var in (b for b in changed if loads_of(it, b)):
                sets_first = sets_before_reading(it, var, lambda c: tiles(c) == family)
                if _is_divided(it, v) or not sets_first:
                    return True, set()
                turns.add(v)
        return False, turns

    # All predicates of a tile are dropped, or none: no store may use what another one skipped.
    kept: set[frozenset[str]] = set()
    turns: dict[frozenset[str], set[Any]] = {}

    def record_kept(node: Any) -> Any:
        conditions, stmt = split_guards(node)
        for condition in (c for c in conditions if start_of(c) is not None):
            if repeats(condition) and stmt.buffer not in private:
                continue
            reads, of = changing(condition)
            turns.setdefault(tiles(condition), set()).update(of)
            if reads or not may_repeat(condition, conditions, stmt):
                kept.add(tiles(condition))
        return node

    _map_chains(nest, record_kept)
    in_turn.update(v for family, found in turns.items() if family not in kept for v in found)

    def branch(node: Any) -> Any:
        conditions, stmt = split_guards(node)
        workspace = stmt.buffer in private
        rest, tails = list[Any](), list[Any]()
        for condition in conditions:
            start = start_of(condition)
            if start is not None and (workspace or not repeats(condition)):
                tails += [condition] if tiles(condition) in kept else []
            elif start is not None and _discarded(condition, stmt, lengths):
                stmt = _beyond(stmt, start)
            else:
                rest.append(condition)
        if not tails:
            return add_guards(rest, stmt)
        starts = [start_of(c) for c in tails]
        if workspace and all(may_repeat(c, conditions, stmt) for c in tails):
            if all(contains(each, starts) for each in written_under):
                return add_guards(rest, stmt)  # the updated element is not written a second time
        reduction = reduction_of(stmt)
        over = [bound_by[v][1] for start in starts for v in free_vars(start) if v in bound_by]
        own = workspace and not any(map(is_bound, nodes_of(ir.Call, *stmt.indices)))
        if reduction is None or not (own or all(kind == "R" for kind in over)):
            # Adding the identity is a write, too: another visit may own the element.
            return add_guards([*rest, *tails], stmt)
        store = masked(reduction, tirx.all(*map(predicate_of, tails)))
        return add_guards(rest, store)

    return _map_chains(nest, branch)


def _is_divided(it: SparseIteration, coordinate: Any) -> bool:
    """Whether the loop of a coordinate is divided among workers."""
    names = {name for group in divided(it) for name in group}
    return any(
        node.name in names and any(coordinate.same_as(v) for v in it.vars[at:end])
        for node, at, end in it.entries()
    )


def _map_chains(stmt: Any, change: Any) -> Any:
    """Apply `change` to the outermost condition of each chain of conditions."""
    if isinstance(stmt, SparseIteration):
        init = None if stmt.init is None else _map_chains(stmt.init, change)
        return iteration_with(stmt, init=init, body=_map_chains(stmt.body, change))
    if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        if isinstance(split_guards(stmt)[1], tirx.BufferStore):
            return change(stmt)
    whiles = isinstance(stmt, tirx.While)  # no primitive makes any
    return stmt if whiles else map_parts(stmt, lambda part: _map_chains(part, change))


def _indexes(indices: Any, axis: str, bound_by: dict[Any, Any]) -> bool:
    """Whether one of some indices is a coordinate of an axis."""
    found = [bound_by[i] for i in indices if isinstance(i, ir.Var) and i in bound_by]
    return any(name == axis for _, _, name in found)


def _discarded(condition: Any, store: Any, lengths: dict[Any, list[Any]]) -> bool:
    """Whether a store would be out of bounds where a coordinate is beyond the last."""
    coordinate, end, _ = condition.args
    over = zip(store.indices, lengths.get(store.buffer, []), strict=False)
    return any(
        is_bound(index)
        and tvm_ffi.structural_equal(index.args[0], coordinate)
        and tvm_ffi.structural_equal(as_dtype(length, dtype_of(end)), end)
        for index, length in over
    )


def _beyond(store: Any, coordinate: Any) -> Any:
    """A store that is out of bounds, and so discarded, where a coordinate is beyond the last."""

    def place(buffer: Any, indices: Any) -> Any:
        mine = buffer.same_as(store.buffer)
        return (buffer, [without_bounds(i, coordinate) for i in indices]) if mine else None

    return map_expr(store, access_rules(place))


def _shifted(stmt: Any) -> bool:
    return any(start_of(node.condition) is not None for node in nodes_of(tirx.IfThenElse, stmt))
