"""Removal of an init iteration whose result is overwritten, or becomes the next one's init.

`without_init`, before::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([I, K], "SS", "spmm") as [i, k]:
        C[i, k] = C_ws[..]

After, the second iteration alone.

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
from collections.abc import Collection
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.affine import affine, is_surjective
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    declared,
    loads_of,
    nodes_of,
    same_indices,
    stores_of,
    substitute,
    variables_of,
    without_iteration,
)
from sparsetir.sparse_ir.promises import promises_of
from sparsetir.sparse_ir.reduction import add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.schedule.loops import Loop, changed, find_iteration
from sparsetir.sparse_ir.tile_marks import is_tail, without_tail_shifts
from sparsetir.sparse_ir.tir import dtype_of, free_vars
from sparsetir.sparse_ir.traversal import map_expr


def without_init(
    func: SparseFunc, iteration: str, update: Any, axes: dict[Any, Axis]
) -> tuple[SparseFunc, Any] | None:
    """The function without the iteration that sets a result before another one overwrites it.

    iteration : name of the overwriting iteration, which has no init
    update : its store, with the conditions around it
    axes : by coordinate, the axis all of whose coordinates it is known to take

    Also return the value that was set, in the coordinates of the update. None if no iteration
    directly before sets the result, or it sets other elements than the update reaches.
    """
    conditions, store = split_guards(update)
    init = _before(func.body, iteration, store.buffer)
    if init is None or init.init is not None:
        return None
    others, first = split_guards(init.body)
    if not isinstance(first, tirx.BufferStore) or _reads_written(func, first):
        return None
    mine = _variables([*store.indices, *conditions], axes)
    found = {v: axis for axis, v, _ in init.axis_of()}
    own = _variables([*first.indices, *others], found)
    if len(mine) != len(own) or set(own) != set(found):
        return None
    for a, b in zip(mine, own, strict=True):
        dense = axes[a].kind == found[b].kind == "dense_fixed"
        if not dense or not tvm_ffi.structural_equal(axes[a].length, found[b].length):
            return None
    renamed = dict(zip(own, mine, strict=True))
    have = [substitute(e, renamed) for e in [*first.indices, *others]]
    want = [*store.indices, *conditions]
    if not same_indices(have, want):
        return None
    return func.replace(body=without_iteration(func.body, init.name)), substitute(
        first.value, renamed
    )


def with_init_before(
    func: SparseFunc, it: SparseIteration
) -> tuple[SparseFunc, SparseIteration] | None:
    """The function and an iteration that takes the value set directly before it as its init.

    it : an iteration without an init, with a body of one store

    None if nothing sets the whole buffer directly before, or the iteration may not reach all of it:
    its spatial loops must be over dense axes, and each index a sum of some of them.
    """
    conditions, store = split_guards(it.body)
    if it.init is not None or not isinstance(store, tirx.BufferStore):
        return None
    before = _before(func.body, it.name, store.buffer)
    if before is None or before.init is not None or not isinstance(before.body, tirx.BufferStore):
        return None
    first = before.body
    found = {v: axis for axis, v, _ in before.axis_of()}
    plain = all(isinstance(i, ir.Var) and i in found for i in first.indices)
    dense = all(axis.kind == "dense_fixed" for axis in found.values())
    if not plain or not dense or set(first.indices) != set(found):
        return None
    if len(found) < len(first.indices) or _reads_written(func, first):
        return None
    spatial = {v: axis for axis, v, kind in it.axis_of() if kind == "S"}
    if any(axis.kind != "dense_fixed" for axis in spatial.values()):
        return None
    value = substitute(first.value, dict(zip(first.indices, store.indices, strict=True)))
    loops = {v for _, v, kind in it.axis_of() if kind != "S"}
    steady = [c for c in conditions if is_tail(c) and not free_vars(c) & loops]
    init = add_guards(steady, tirx.BufferStore(store.buffer, value, store.indices))
    lengths = [found[v].length for v in first.indices]
    if not _is_whole(func, store.buffer, lengths) or not _covers_box(func, init, spatial, lengths):
        return None
    out = func.replace(body=without_iteration(func.body, before.name))
    merged = changed(it, init=init)
    body = map_expr(out.body, [(SparseIteration, lambda n: merged if n.name == it.name else n)])
    out = out.replace(body=body)
    return out, find_iteration(out, it.name)


def set_before(func: SparseFunc, it: SparseIteration, flat: SparseIteration) -> str | None:
    """The name of the iteration directly before that sets all that another one updates.

    it : one of the function's iterations
    flat : `it` with the update as its body, and loops around it that reach all elements

    None if there is none, if visits race, or if it sets another value than the identity of the
    update's operator.
    """
    if "R" in flat.kinds:
        return None
    update = reduction_of(flat.body)
    if update is None:
        return None
    axes = {v: axis for axis, v, _ in flat.axis_of()}
    same = without_init(func, it.name, flat.body, axes)
    value = None if same is None else same[1]
    if value is None:
        body = map_expr(func.body, [(SparseIteration, lambda n: flat if n.name == it.name else n)])
        found = with_init_before(func.replace(body=body), flat)
        value = None if found is None else split_guards(found[1].init)[1].value
    before = _before(func.body, it.name, update.store.buffer)
    if value is None or before is None:
        return None
    unit = update.identity(dtype_of(value))
    return before.name if same_indices([value], [unit]) else None


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
    axes = buffer.axes or ()
    if init is None or init.init is not None or init.annotations:
        return func
    _, first = split_guards(init.body)
    spatial = {v: axis for axis, v, _ in init.axis_of()}
    dense = all(a.kind == "dense_fixed" for a in [*axes, *spatial.values()])
    constant = isinstance(first, tirx.BufferStore) and isinstance(
        first.value, tirx.IntImm | tirx.FloatImm
    )
    lengths = [a.length for a in axes]
    if not dense or not constant or not _covers_box(func, init.body, spatial, lengths):
        return func
    loops = [Loop(a, [tirx.Var(a.name.lower(), a.idtype)], "S") for a in axes]
    body = tirx.BufferStore(buffer.var, first.value, [x.var for x in loops])
    plain = changed(init, loops, body=body)
    out = map_expr(func.body, [(SparseIteration, lambda n: plain if n.name == init.name else n)])
    return func.replace(body=out)


def _is_whole(func: SparseFunc, var: Any, lengths: list[Any]) -> bool:
    """Whether a buffer is over dense axes of these lengths: stores beyond them are discarded."""
    buffer = declared(func).buffer_of(var)
    axes = buffer and buffer.axes
    return axes is not None and all(
        a.kind == "dense_fixed" and tvm_ffi.structural_equal(a.length, n)
        for a, n in zip(axes, lengths, strict=True)
    )


def _covers_box(func: SparseFunc, init: Any, spatial: dict[Any, Axis], lengths: list[Any]) -> bool:
    """Whether a store, executed for all coordinates, covers a box of these lengths."""
    conditions, store = split_guards(without_tail_shifts(init))
    limits = [_limit(c.args[0], spatial) for c in conditions]
    with contextlib.ExitStack() as known:
        analyzer = Analyzer()
        params = declared(func).params
        for promise in promises_of(func):
            if promise["kind"] == "multiple":
                rest = tirx.floormod(params[promise["param"]], promise["value"])
                known.enter_context(analyzer.constraint_scope(rest == 0))
        used: list[Any] = []
        for index, length in zip(store.indices, lengths, strict=True):
            here = affine(index).weights(spatial)
            extents = {v: spatial[v].length for v in here or {}}
            mine = [x for x in limits if x is not None and set(x[0]) <= set(extents)]
            if here is None or not is_surjective(here, extents, length, analyzer, mine):
                return False
            used += extents
            limits = [x for x in limits if x not in mine]
    return not limits and len(used) == len(spatial) and set(used) == set(spatial)


def _limit(condition: Any, coords: Collection[Any]) -> tuple[dict[Any, int], Any] | None:
    """(sum, number) of a condition that a sum is less than a number."""
    if not isinstance(condition, tirx.LT):
        return None
    found = affine(condition.a).weights(coords)
    return None if found is None else (found, condition.b)


def _variables(exprs: list[Any], axes: dict[Any, Axis]) -> list[Any]:
    """The coordinates in some expressions, in the order in which they occur."""
    return [var for var in variables_of(*exprs) if var in axes]


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
