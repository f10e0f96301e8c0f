"""Elimination of stores before an iteration that updates them: their value becomes its init.

`with_init_before`, before::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm") as [io, jo, ii, ji, k]:
        C[io * 4 + ii, k] = C[io * 4 + ii, k] + A[io, jo, ii, ji] * B[jo * 4 + ji, k]

After, where IO has (m + 3) // 4 coordinates, so that all rows are visited::

    with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm") as [io, jo, ii, ji, k]:
        with T.init():
            C[io * 4 + ii, k] = 0.0
        C[io * 4 + ii, k] = C[io * 4 + ii, k] + A[io, jo, ii, ji] * B[jo * 4 + ji, k]
"""

from __future__ import annotations

import contextlib
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.affine import affine, covered
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    declared,
    loads_of,
    nodes_of,
    stores_of,
    substitute,
    without_iteration,
)
from sparsetir.sparse_ir.promises import promises_of
from sparsetir.sparse_ir.reduction import add_guards, split_guards
from sparsetir.sparse_ir.schedule.loops import Loop, changed, find_iteration
from sparsetir.sparse_ir.tile_marks import is_tail, without_tail_shifts
from sparsetir.sparse_ir.tir import free_vars
from sparsetir.sparse_ir.traversal import map_expr


def set_before(
    func: SparseFunc, iteration: str, update: Any, axes: dict[Any, Axis]
) -> tuple[SparseIteration, Any] | None:
    """The iteration that sets a whole buffer directly before another one updates it, and the value.

    iteration : name of the updating iteration
    update : its store, with the conditions around it
    axes : by coordinate, the axes whose coordinates the update visits, all of them

    The value is in the coordinates of the update. None if nothing sets the whole buffer directly
    before, or the update may not reach all of it: it visits dense axes, and each index is a sum of
    some of their coordinates.
    """
    conditions, store = split_guards(update)
    buffer = declared(func).buffer_of(store.buffer)
    before = _before(func.body, iteration, store.buffer)
    first = None if buffer is None or before is None else _in_plain_loops(func, before, buffer)
    dense = all(axis.kind == "dense_fixed" for axis in axes.values())
    if before is None or first is None or not dense or not all(map(is_tail, conditions)):
        return None
    lengths = [axis.length for axis in first.axes]
    if _reads_written(func, first.body) or not _covers_box(func, update, axes, lengths):
        return None
    at = dict(zip(first.vars, store.indices, strict=True))
    return before, substitute(first.body.value, at)


def with_init_before(
    func: SparseFunc, it: SparseIteration
) -> tuple[SparseFunc, SparseIteration] | None:
    """The function and an iteration that takes the value set directly before it as its init.

    it : an iteration without an init, with a body of one store

    None where :func:`set_before` finds none.
    """
    conditions, store = split_guards(it.body)
    if it.init is not None or not isinstance(store, tirx.BufferStore):
        return None
    spatial = {v: axis for axis, v, kind in it.axis_of() if kind == "S"}
    loops = {v for _, v, kind in it.axis_of() if kind != "S"}
    steady = [c for c in conditions if is_tail(c) and not free_vars(c) & loops]
    preceding = set_before(func, it.name, add_guards(steady, store), spatial)
    if preceding is None:
        return None
    before, value = preceding
    init = add_guards(steady, tirx.BufferStore(store.buffer, value, store.indices))
    out = func.replace(body=without_iteration(func.body, before.name))
    merged = changed(it, init=init)
    body = map_expr(out.body, [(SparseIteration, lambda n: merged if n.name == it.name else n)])
    out = out.replace(body=body)
    return out, find_iteration(out, it.name)


def with_plain_init(func: SparseFunc, iteration: str, buffer: SparseBuffer) -> SparseFunc:
    """The function in which the iteration that sets a buffer loops over the buffer's own axes.

    buffer : the buffer that `iteration` updates

    Before, and after::

        with T.sp_iter([K0_all, I_all, K1_all], "SSS", "spmm_init") as [k0, i, k1]:
            C[i, k0 * 4 + k1] = 0.0

        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C[i, k] = 0.0

    Unchanged if no single value is set everywhere.
    """
    init = _before(func.body, iteration, buffer.var)
    plain = None if init is None or init.annotations else _in_plain_loops(func, init, buffer)
    if plain is None or not isinstance(plain.body.value, tirx.IntImm | tirx.FloatImm):
        return func
    out = map_expr(func.body, [(SparseIteration, lambda n: plain if n.name == plain.name else n)])
    return func.replace(body=out)


def _in_plain_loops(func: SparseFunc, init: SparseIteration, buffer: SparseBuffer) -> Any:
    """The iteration that sets a buffer over dense axes, with loops over these; None for others."""
    conditions, first = split_guards(init.body)
    spatial = {v: axis for axis, v, _ in init.axis_of()}
    axes = buffer.axes
    if axes is None or any(a.kind != "dense_fixed" for a in (*axes, *spatial.values())):
        return None
    sets = isinstance(first, tirx.BufferStore) and first.buffer.same_as(buffer.var)
    if not sets or init.init is not None:
        return None
    loops = [Loop(a, [tirx.Var(a.name.lower(), a.idtype)], "S") for a in axes]
    pairs = zip(first.indices, loops, strict=True)
    value = substitute(first.value, {i: x.var for i, x in pairs if isinstance(i, ir.Var)})
    fits = all(map(is_tail, conditions)) and not free_vars(value) & set(spatial)
    if not fits or not _covers_box(func, init.body, spatial, [a.length for a in axes]):
        return None
    body = tirx.BufferStore(buffer.var, value, [x.var for x in loops])
    return changed(init, loops, body=body)


def _covers_box(func: SparseFunc, init: Any, spatial: dict[Any, Axis], lengths: list[Any]) -> bool:
    """Whether a store, executed for all coordinates, covers a box of these lengths."""
    conditions, store = split_guards(without_tail_shifts(init))
    limits = [(affine(c.args[0]).weights(spatial), c.args[1]) for c in conditions]
    if any(weights is None for weights, _ in limits):
        return False
    extents = {v: axis.length for v, axis in spatial.items()}
    with contextlib.ExitStack() as known:
        analyzer = Analyzer()
        params = declared(func).params
        for promise in promises_of(func):
            if promise["kind"] == "multiple":
                rest = tirx.floormod(params[promise["param"]], promise["value"])
                known.enter_context(analyzer.constraint_scope(rest == 0))
        used = covered(store.indices, lengths, extents, analyzer, limits)
    return used is not None and len(used) == len(spatial)


def _before(body: Any, iteration: str, buffer: Any) -> SparseIteration | None:
    """The last statement before an iteration, in its sequence, that accesses a buffer."""
    for seq in (node.seq for node in nodes_of(tirx.SeqStmt, body)):
        place = [n for n, s in enumerate(seq) if _is_named(s, iteration)]
        for stmt in reversed(list(seq)[: place[0]] if place else []):
            stored = any(s.buffer.same_as(buffer) for s in stores_of(stmt))
            if stored or loads_of(stmt, buffer):
                return stmt if isinstance(stmt, SparseIteration) else None
    return None


def _reads_written(func: SparseFunc, store: Any) -> bool:
    written = [s.buffer for s in stores_of(func.body)]
    return any(loads_of(store.value, b) for b in written)


def _is_named(stmt: Any, name: str) -> bool:
    return isinstance(stmt, SparseIteration) and stmt.name == name
