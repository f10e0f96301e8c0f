"""Innermost reductions to one element as vectors of partial results (CPU).

A reduction to one element waits in each step for the step before, and a division in its term is
done for one nonzero at a time. The loop may be over what a row stores, or over dense features for
each element of any storage, at the top or in a nest. Before::

    for j in range(J_indptr[vi + 1] - J_indptr[vi]):
        with T.sblock("f1"):
            with T.init():
                O[vi] = 0.0
            O[vi] = O[vi] + X[vi, vj] / D[vi]

After, for 8 lanes::

    O[vi] = 0.0
    if J_indptr[vi + 1] - J_indptr[vi] >= 8:
        acc[0:8] = 0.0
        for j_0 in range((J_indptr[vi + 1] - J_indptr[vi]) // 8):
            acc[0:8] = acc[0:8] + X[vi, j_0 * 8 : j_0 * 8 + 8] / D[vi]
        acc[0:8] = acc[0:8] + T.Select(.., X[vi, J_indptr[vi + 1] - J_indptr[vi] - 8 + ..], 0.0)
        acc[0:4] = acc[0:4] + acc[4:8] ...
        O[vi] = O[vi] + acc[0]
    else:
        for j_1 in range(J_indptr[vi + 1] - J_indptr[vi]): ...

The last vector begins earlier, and adds what the others left. Conditions that do not depend on the
loop, as of a slot that is padding, stand around all of it.

Where the loop's extent is a size, as of features, the loop around it has versions by that: straight
code of two tiles for up to `STRAIGHT` vectors, without that last one where tiles are whole::

    if feat == 32:
        for j in range(J_indptr[vi + 1] - J_indptr[vi]):
            acc[0:16] = X[vi, 0:16] * Y[J_indices[vi, vj], 0:16]
            acc[0:16] = acc[0:16] + X[vi, 16:32] * Y[J_indices[vi, vj], 16:32] ...
    elif feat <= 32: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.add_lanes import add_up
from sparsetir.schedules.passes.nests import is_along, renewed, wide_indices
from sparsetir.sparse_ir.nodes import (
    buffer_var,
    fresh_definitions,
    nodes_of,
    same_indices,
    substitute,
)
from sparsetir.sparse_ir.reduction import Reduction, reduction_of, under
from sparsetir.sparse_ir.speculation import is_harmless
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    loop_with,
    values_of,
    with_body,
)
from sparsetir.sparse_ir.traversal import map_expr

STRAIGHT = 8  # vectors of code without loops
GROUP = 8  # visits whose lanes are added up together, at most
FEW = 4  # visits of a loop that are written out one by one
RAGGED_LANES = 8  # of ragged rows at most: in graphs most are shorter than longer vectors


def vectorize_reductions(func: tirx.PrimFunc, bits: int, any_order: bool = False) -> tirx.PrimFunc:
    """Rewrite serial loops that reduce to one element, for vectors of `bits` bits.

    Sums, and extrema that say what becomes of NaN, of types of 32 and 64 bits.

    any_order : over a size also products, and extrema that depend on the place of a NaN
    """
    by_size = _BySize(func, bits, any_order)

    def visit(loop: Any) -> Any:
        if by_size.waits(loop):
            return loop
        loop = by_size.done(loop)
        reduction = _innermost(loop)
        return loop if reduction is None else _in_vectors(loop, reduction, bits)

    return with_body(func, by_size.done(map_expr(func.body, [(tirx.For, visit)])))


class _BySize:
    """Loops around reductions over sizes, which have versions by these.

    waiting : by the variable of the outermost loop that holds nothing else, the size, and lanes of
        vectors for the reductions inside
    """

    def __init__(self, func: tirx.PrimFunc, bits: int, any_order: bool) -> None:
        self.in_order = not any_order
        self.sizes = {v for v in func.params if not tirx.is_buffer_var(v)}
        self.bits = bits
        self.waiting: dict[Any, tuple[Any, int]] = {}

    def waits(self, loop: Any) -> bool:
        """Whether a loop holds such reductions, and nothing else but what is along with them."""
        reduction = self._reduction(loop)
        if reduction is not None:
            self.waiting[loop.loop_var] = loop.extent, _lanes(reduction, self.bits)
            return True
        inner = [x for x in nodes_of(tirx.For, loop.body) if x.loop_var in self.waiting]
        one = {(str(size), lanes) for size, lanes in (self.waiting[x.loop_var] for x in inner)}
        direct = all(self._reduction(x) is not None for x in inner)
        if len(one) != 1 or not (direct or _only_within(loop).same_as(inner[0])):
            return False
        for x in inner:
            self.waiting[loop.loop_var] = self.waiting.pop(x.loop_var)
        return True

    def done(self, stmt: Any) -> Any:
        """A statement with versions of the loops in it that wait."""

        def visit(loop: Any) -> Any:
            waiting = self.waiting.pop(loop.loop_var, None)
            if waiting is None:
                return loop
            if self._reduction(loop) is not None:
                return self._replaced(loop)
            return self._versions(loop, *waiting)

        return map_expr(stmt, [(tirx.For, visit)]) if self.waiting else stmt

    def _reduction(self, loop: Any) -> Reduction | None:
        known = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 1
        return _innermost(loop, self.in_order) if known or loop.extent in self.sizes else None

    def _replaced(self, stmt: Any, tiles: Tiles | None = None) -> Any:
        """A statement with its reductions in vectors."""
        # Not loops around these that reduce what is left when an inner one is a single term.
        own = {x.loop_var for x in nodes_of(tirx.For, stmt) if self._reduction(x) is not None}

        def visit(loop: Any) -> Any:
            reduction = self._reduction(loop) if loop.loop_var in own else None
            return loop if reduction is None else _in_vectors(loop, reduction, self.bits, tiles)

        return map_expr(stmt, [(tirx.For, visit)])

    def _in_groups(self, stmt: Any, tiles: Tiles) -> Any:
        """A statement whose loops around one reduction add up the lanes of several together."""

        def visit(loop: Any) -> Any:
            inner = loop.body.seq[-1] if isinstance(loop.body, tirx.SeqStmt) else loop.body
            reduction = self._reduction(inner) if isinstance(inner, tirx.For) else None
            if reduction is None:
                return loop
            lanes = _lanes(reduction, self.bits)
            # Code for long rests takes long to compile, and their sums as long as they do alone.
            short = tiles.whole or tiles.lanes <= lanes
            return _grouped(loop, inner, reduction, tiles, lanes) if short else loop

        straight = tiles.count is not None and tiles.lanes >= FEW
        return map_expr(stmt, [(tirx.For, visit)]) if straight else stmt

    def _versions(self, loop: Any, extent: Any, lanes: int) -> tirx.Stmt:
        """A loop around reductions over a size, with versions by that unless it is known."""

        def version(*tiles: Any) -> Any:
            again = renewed(loop, fresh_definitions(loop), blocks=True)
            return self._replaced(self._in_groups(again, Tiles(*tiles)), Tiles(*tiles))

        def number(n: int) -> Any:
            return as_dtype(n, dtype_of(extent))

        tile = lanes * STRAIGHT // 2
        if isinstance(extent, tirx.IntImm):
            return version(*_tiles_of(int(extent), lanes, tile))
        whole = tirx.EQ(tirx.floormod(extent, number(tile)), number(0))
        above = tirx.IfThenElse(whole, version(tile, None, True), version(tile))
        below: Any = version(1, 0, True)
        for few in range(1, FEW + 1):
            exact = tirx.EQ(extent, number(few))
            tiles = (FEW, 1, True) if few == FEW else (1, few, True)
            below = tirx.IfThenElse(exact, version(*tiles), below)
        size = FEW
        while size <= tile:
            exact = tirx.EQ(extent, number(2 * size))
            tiles = (2 * size, 1, True) if 2 * size <= lanes else (size, 2, True)
            done = tirx.IfThenElse(exact, version(*tiles), version(size, 2))
            below = tirx.IfThenElse(extent > number(size), done, below)
            size *= 2
        return tirx.IfThenElse(extent > number(2 * tile), above, below)


def _tiles_of(size: int, lanes: int, tile: int) -> tuple[int, int | None, bool]:
    """The tiles of a size that is known, at most of so many lanes."""
    if size < FEW:
        return 1, size, True
    if size > 2 * tile:
        return tile, None, size % tile == 0
    half = 1 << (size - 1).bit_length() - 1
    if size == 2 * half:
        return (size, 1, True) if size <= lanes else (half, 2, True)
    return half, 2, False


def _lanes(reduction: Reduction, bits: int) -> int:
    return bits // tvm.DataType(dtype_of(reduction.term)).bits


def _only_within(loop: Any) -> Any:
    """The statement that a loop has in it, through blocks of nothing else."""
    stmt = loop.body
    while isinstance(stmt, s_tir.SBlockRealize) and stmt.block.init is None:
        stmt = stmt.block.body
    return stmt


class Tiles(NamedTuple):
    """How a reduction is cut into tiles.

    lanes : of a tile, where 1 are none of a vector
    count : None where it depends on the size
    whole : whether the last tile does not overlap
    """

    lanes: int
    count: int | None = None
    whole: bool = False


def _innermost(loop: Any, in_order: bool = True) -> Reduction | None:
    """The reduction to one element that a loop right around a block is; None of other loops.

    in_order : only of operators whose result no order changes by more than sums' last bits
    """
    realize = loop.body
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(realize, s_tir.SBlockRealize):
        return None
    block = realize.block
    if not is_one(realize.predicate) or block.alloc_buffers:
        return None
    own, others = _variables(loop)
    if len(own) != 1 or own[0].iter_type != tirx.IterVar.CommReduce:
        return None
    var = own[0].var
    if any(loop.loop_var in free_vars(value) for _, value in others):
        return None
    reduction = reduction_of(block.body)
    if reduction is None or (in_order and reduction.operator == "product"):
        return None
    bits = tvm.DataType(dtype_of(reduction.term)).bits
    value, dtype = reduction.store.value, dtype_of(reduction.store.value)
    ordered = isinstance(value, tirx.Max | tirx.Min) and "float" in dtype
    if bits not in (32, 64) or (ordered and in_order) or dtype_of(reduction.term) != dtype:
        return None
    # Conditions come to stand around the loop, which may have no visits.
    if not all(map(is_harmless, reduction.conditions)):
        return None
    moves = any(var in free_vars(i) for i in [*reduction.store.indices, *reduction.conditions])
    return None if moves or not _is_contiguous(reduction.term, var) else reduction


def _variables(loop: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The variables of the block in a loop that are the loop's; the others, with their values."""
    pairs = list(zip(loop.body.block.iter_vars, loop.body.iter_values, strict=True))
    own = [v for v, value in pairs if value.same_as(loop.loop_var)]
    return own, [(v, value) for v, value in pairs if not value.same_as(loop.loop_var)]


def _is_contiguous(term: Any, var: Any) -> bool:
    """Whether a term reads along a variable, or gathers by what it reads along it."""
    loads = [x for x in nodes_of(ir.TensorLoad, term) if var in free_vars(x)]
    return bool(loads) and all(_goes_along(x, var) for x in loads)


def _goes_along(load: Any, var: Any) -> bool:
    if any(isinstance(i, ir.TensorLoad) for i in load.indices):
        return True
    *outer, last = wide_indices(load.source, load.indices)
    return is_along(last, var) and not any(var in free_vars(i) for i in outer)


def _grouped(loop: Any, inner: Any, reduction: Reduction, tiles: Tiles, lanes: int) -> tirx.Stmt:
    """A loop around a reduction to an element, several of its visits at once; or the loop as it is.

    inner : the reduction's loop, which stands in `loop` alone, or behind an init
    lanes : of a vector
    """
    realize = inner.body
    before = list(loop.body.seq)[:-1] if isinstance(loop.body, tirx.SeqStmt) else []
    at = values_of(realize)
    spatial = {v.var for v in realize.block.iter_vars if v.iter_type == tirx.IterVar.DataPar}
    visited = any(v in spatial and x.same_as(loop.loop_var) for v, x in at.items())
    init = realize.block.init
    if len(before) == 1 and isinstance(before[0], s_tir.SBlockRealize) and init is None:
        init = substitute(before[0].block.body, values_of(before[0]))
    elif before:
        return loop
    store, term = (substitute(x, at) for x in (reduction.store, reduction.term))
    held: Any = tirx.BufferLoad(store.buffer, store.indices)
    if init is not None:
        init = substitute(init, at)
        if not isinstance(init, tirx.BufferStore) or not init.buffer.same_as(store.buffer):
            return loop
        if not same_indices(init.indices, store.indices):
            return loop
        held = init.value
    selects = isinstance(reduction.store.value, tirx.Select)
    if not visited or selects or reduction.conditions or not is_one(realize.predicate):
        return loop
    dtype, of = str(store.buffer.ty.dtype), dtype_of(loop.loop_var)
    width = min(lanes, tiles.lanes)
    group = min(GROUP if tiles.lanes <= lanes else GROUP // 2, width)
    tile = as_dtype(tiles.lanes, dtype_of(inner.loop_var))
    acc, parts = (buffer_var([n], dtype, name) for n, name in (
        (tiles.lanes, "acc"), (group * width, "parts"),
    ))  # fmt: skip
    sums = buffer_var([group], dtype, "sums")
    number = tirx.Var(f"{loop.loop_var.name}_0", of)
    body: list[Any] = []
    combined, identity = reduction.combine, reduction.identity(dtype)

    def visit(n: int, expr: Any, at: Any = None) -> Any:
        """An expression in a visit of the group, at a visit of the reduction."""
        here = {loop.loop_var: number * as_dtype(group, of) + as_dtype(n, of)}
        return substitute(expr, here if at is None else {**here, inner.loop_var: at})

    def each(count: int, value: Callable[[Any], Any], to: Any = acc, at: int = 0) -> None:
        """Store values of so many lanes."""
        lane = tirx.Var(f"{inner.loop_var.name}_lane", dtype_of(inner.loop_var))
        place = lane + as_dtype(at, dtype_of(lane)) if at else lane
        stored = tirx.BufferStore(to, value(lane), [place])
        body.append(loop_over(lane, count, stored, tirx.ForKind.VECTORIZED))

    def held_by(lane: Any, far: int = 0) -> Any:
        return tirx.BufferLoad(acc, [lane + as_dtype(far, dtype_of(lane)) if far else lane])

    def second(n: int, lane: Any) -> Any:
        """The value of the second tile, without what the first has had."""
        if tiles.whole:
            return visit(n, term, tile + lane)
        mine = visit(n, term, inner.extent - tile + lane)
        return tirx.Select(lane >= tile + tile - inner.extent, mine, identity)

    for n in range(group):
        each(tiles.lanes, lambda lane, n=n: visit(n, term, lane))
        if tiles.count == 2:
            each(tiles.lanes, lambda lane, n=n: combined(held_by(lane), second(n, lane)))
        half = tiles.lanes // 2
        while half >= width:
            each(half, lambda lane, half=half: combined(held_by(lane), held_by(lane, half)))
            half //= 2
        each(width, held_by, parts, n * width)
    rows = [tirx.BufferLoad(parts, [tirx.Ramp(n * width, 1, width)]) for n in range(group)]
    total = add_up(rows, width, dtype, combined)
    body.append(tirx.BufferStore(sums, total, [tirx.Ramp(0, 1, group)]))
    for n in range(group):
        value = combined(visit(n, held), tirx.BufferLoad(sums, [tirx.IntImm("int32", n)]))
        indices = [visit(n, i) for i in store.indices]
        body.append(tirx.BufferStore(store.buffer, value, indices))
    block = s_tir.SBlock(
        [],
        [],
        [],
        f"{realize.block.name_hint}_group",
        as_one(body),
        alloc_buffers=[acc, parts, sums],
    )
    known = {r.source: r.source for r in [*realize.block.reads, *realize.block.writes]}
    reads, writes = s_tir.analysis.get_sblock_read_write_region(block, known)
    block = block_with(block, reads=reads, writes=writes)
    size = as_dtype(group, of)
    groups = tirx.floordiv(loop.extent, size)
    done = groups * size
    whole = loop_with(
        loop, loop_var=number, extent=groups, body=s_tir.SBlockRealize([], True, block)
    )
    rest = tirx.Var(f"{loop.loop_var.name}_rest", of)
    again = renewed(loop.body, {loop.loop_var: done + rest, **fresh_definitions(loop.body)}, True)
    return tirx.SeqStmt([whole, loop_over(rest, loop.extent - done, again)])


def _in_vectors(
    loop: Any, reduction: Reduction, bits: int, tiles: Tiles | None = None
) -> tirx.Stmt:
    """A reduction in vectors, or the loop as it is.

    tiles : None for one vector at a time, and for what is shorter none
    """
    extent, dtype = loop.extent, dtype_of(loop.loop_var)
    (own,), _ = _variables(loop)
    if tiles is None:
        lanes = _lanes(reduction, bits)
        if nodes_of(ir.TensorLoad, extent):
            lanes = min(RAGGED_LANES, lanes)
        few = isinstance(extent, tirx.IntImm) and int(extent) < lanes
        exact = isinstance(extent, tirx.IntImm) and int(extent) % lanes == 0
        if lanes < 2 or few:
            return loop
        tiles = Tiles(lanes, None, exact)
        any_size = not isinstance(extent, tirx.IntImm)
    else:
        any_size = False
    lanes = tiles.lanes
    var = own.var
    store, name = reduction.store, loop.loop_var.name
    acc = buffer_var([lanes], store.buffer.ty.dtype, "acc")
    width, zero = as_dtype(lanes, dtype), as_dtype(0, dtype)
    whole = tirx.floordiv(extent, width)
    held = tirx.BufferLoad(store.buffer, store.indices)
    steps, fewer = tirx.Var(f"{name}_0", dtype), tirx.Var(f"{name}_1", dtype)

    def term(at: Any) -> Any:
        return substitute(reduction.term, {var: at})

    def each(count: int, value: Callable[[Any], Any]) -> tirx.Stmt:
        """Values of so many lanes."""
        lane = tirx.Var(f"{name}_lane", dtype)
        kind = tirx.ForKind.VECTORIZED
        return loop_over(lane, count, tirx.BufferStore(acc, value(lane), [lane]), kind)

    def of(lane: Any) -> Any:
        return tirx.BufferLoad(acc, [lane])

    combined = reduction.combine
    identity = reduction.identity(str(store.buffer.ty.dtype))
    if lanes == 1:
        value = held
        for n in range(tiles.count or 0):
            value = combined(value, term(as_dtype(n, dtype)))
        return _placed(loop, reduction, [tirx.BufferStore(store.buffer, value, store.indices)], [])
    if tiles.count is None:
        parts = [each(lanes, lambda _: identity)]
        vectors = each(lanes, lambda lane: combined(of(lane), term(steps * width + lane)))
        parts.append(loop_over(steps, whole, vectors))
        new = whole * width - extent + width  # lanes of the last vector from here on
    else:
        parts = [each(lanes, term)]
        new = width + width - extent

    def last(lane: Any) -> Any:
        return tirx.Select(lane >= new, term(extent - width + lane), identity)

    if not tiles.whole:
        parts.append(each(lanes, lambda lane: combined(of(lane), last(lane))))
    elif tiles.count == 2:
        parts.append(each(lanes, lambda lane: combined(of(lane), term(width + lane))))
    half = lanes // 2
    while half:
        far = as_dtype(half, dtype)
        parts.append(each(half, lambda lane, far=far: combined(of(lane), of(lane + far))))
        half //= 2
    parts.append(tirx.BufferStore(store.buffer, combined(held, of(zero)), store.indices))
    each_one = tirx.BufferStore(store.buffer, combined(held, term(fewer)), store.indices)
    body = tirx.SeqStmt(parts)
    if any_size:
        body = tirx.IfThenElse(extent >= width, body, loop_over(fewer, extent, each_one))
    return _placed(loop, reduction, [body], [acc])


def _placed(loop: Any, reduction: Reduction, body: list[Any], locals_: list[Any]) -> tirx.Stmt:
    """The block of a loop's reduction, with another body and no loop."""
    block = loop.body.block
    _, others = _variables(loop)
    done, init = under(reduction.conditions, as_one(body)), block.init
    if init is not None and not any(v.iter_type == tirx.IterVar.CommReduce for v, _ in others):
        done, init = tirx.SeqStmt([init, done]), None
    known = {r.source: r.source for r in [*block.reads, *block.writes]}
    made = block_with(block, iter_vars=[v for v, _ in others], body=done, alloc_buffers=locals_)
    made = block_with(made, init=init, reads=[], writes=[])
    reads, writes = s_tir.analysis.get_sblock_read_write_region(made, known)
    made = block_with(made, reads=reads, writes=writes)
    return s_tir.SBlockRealize([value for _, value in others], True, made)
