"""Vectorise innermost reductions to one element, with vectors of partial results (CPU).

A reduction to one element waits in each step for the one before, and a division in its term is done
for one nonzero at a time. The loop may be over the elements of a row, or over dense features for
each element of any storage, at the top level or nested. Before::

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

The last vector begins earlier, and only adds the remaining terms. Conditions that do not depend on
the loop, such as that a slot is not padding, are hoisted around it.

If the loop's extent is a size, such as the features, the loop around it has versions by size:
straight-line code for few vectors, where the last one may begin earlier, and a loop for more.
For up to 8, several visits of the loop around share the shuffles that reduce their lanes::

    if feat == 32: ...
    elif feat <= 24:
        for j in range(J_indptr[vi + 1] - J_indptr[vi]):
            acc[0:8] = X[vi, 0:8] * Y[J_indices[vi, vj], 0:8]
            acc[0:8] = acc[0:8] + X[vi, 8:16] * Y[J_indices[vi, vj], 8:16]
            acc[0:8] = acc[0:8] + T.Select(.., X[vi, feat - 8 : feat] * Y[..], 0.0) ...

Partial results have the term's type: 16-bit numbers that are cast to float32 are summed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tvm
from tvm import ir, s_tir, tirx
from tvm_ffi import StructuralKey, structural_equal

from sparsetir.schedules.passes.add_lanes import add_up
from sparsetir.schedules.passes.nests import is_offset_of, wide_indices, with_fresh
from sparsetir.schedules.passes.prefetch import PREFETCHING, rows_ahead
from sparsetir.sparse_ir.nodes import (
    buffer_var,
    fresh_definitions,
    nodes_of,
    same_indices,
    substitute,
)
from sparsetir.sparse_ir.reduction import Reduction, add_guards, reduction_of
from sparsetir.sparse_ir.speculation import is_speculatable
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    cast,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    loop_with,
    uncast,
    values_of,
    with_body,
)
from sparsetir.sparse_ir.traversal import map_expr

WIDE = 4  # vectors of partial results for loops longer than TOGETHER
TOGETHER = 8  # vectors up to which the lanes of several visits are reduced together
STRAIGHT = 16  # vectors as straight-line code, if their number is constant
GROUP = 8  # the most visits whose lanes are reduced together
FEW = 4  # visits of a loop that are unrolled
COUNTS = (TOGETHER, 4, 3, 2)  # vectors up to which an unknown size has a version, descending
OTHERS = 4  # the most loops besides reductions in a loop with versions
RAGGED_LANES = 8  # the most for ragged rows: in graphs most rows are shorter than longer vectors


def vectorize_reductions(
    func: tirx.PrimFunc, bits: int, cache: int, any_order: bool = False
) -> tirx.PrimFunc:
    """Rewrite serial loops that reduce to one element, for vectors of `bits` bits.

    Sums and extrema of 32-bit and 64-bit types. Those whose result depends on the position of a NaN
    are repeated one by one if there is one.

    cache : bytes; rows gathered from a larger buffer are prefetched
    any_order : also vectorise products over a size
    """
    by_size = _BySize(func, bits, cache, any_order)

    def visit(loop: Any) -> Any:
        if by_size.contains_only_reductions(loop):
            return loop
        loop = by_size.with_versions(loop)
        reduction = _innermost(loop)
        return loop if reduction is None else _in_vectors(loop, reduction, bits)

    return with_body(func, by_size.with_versions(map_expr(func.body, [(tirx.For, visit)])))


class _BySize:
    """Loops around reductions over sizes, which get versions by these.

    waiting : by the variable of the outermost loop that contains nothing else, the size, and the
        lanes of vectors for the reductions inside
    alone : the variables of reductions with versions of their own
    """

    def __init__(self, func: tirx.PrimFunc, bits: int, cache: int, any_order: bool) -> None:
        self.func, self.cache = func, cache
        self.in_order = not any_order
        self.sizes = {v for v in func.params if not tirx.is_buffer_var(v)}
        self.bits = bits
        self.waiting: dict[Any, tuple[Any, int]] = {}
        self.alone: set[Any] = set()

    def contains_only_reductions(self, loop: Any) -> bool:
        """Whether a loop only contains such reductions, and statements along with them."""
        reduction = self._reduction(loop)
        if reduction is not None:
            self.waiting[loop.loop_var] = loop.extent, _lanes(reduction, self.bits)
            return True
        inner = [x for x in nodes_of(tirx.For, loop.body) if x.loop_var in self.waiting]
        one = {(str(size), lanes) for size, lanes in (self.waiting[x.loop_var] for x in inner)}
        direct = all(self._reduction(x) is not None for x in inner)
        if len(one) != 1 or not (direct or _only_within(loop).same_as(inner[0])):
            return False
        others = len(nodes_of(tirx.For, loop.body)) - len(nodes_of(tirx.For, *inner))
        if others > OTHERS:  # with tiles of their own, which each version would copy
            self.alone.update(x.loop_var for x in inner)
            return False
        for x in inner:
            self.waiting[loop.loop_var] = self.waiting.pop(x.loop_var)
        return True

    def with_versions(self, stmt: Any) -> Any:
        """A statement with versions of the waiting loops in it."""

        def visit(loop: Any) -> Any:
            waiting = self.waiting.pop(loop.loop_var, None)
            if waiting is None:
                return loop
            if self._reduction(loop) is not None and loop.loop_var not in self.alone:
                return self._replaced(loop)
            return self._versions(loop, *waiting)

        return map_expr(stmt, [(tirx.For, visit)]) if self.waiting else stmt

    def _reduction(self, loop: Any) -> Reduction | None:
        constant = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 1
        return _innermost(loop, self.in_order) if constant or loop.extent in self.sizes else None

    def _replaced(self, stmt: Any, tiles: Tiles | None = None) -> Any:
        """A statement with its reductions vectorised."""
        # Except for loops around these that become reductions when an inner one has a single term.
        reduced = {x.loop_var for x in nodes_of(tirx.For, stmt) if self._reduction(x) is not None}

        def visit(loop: Any) -> Any:
            reduction = self._reduction(loop) if loop.loop_var in reduced else None
            return loop if reduction is None else _in_vectors(loop, reduction, self.bits, tiles)

        return map_expr(stmt, [(tirx.For, visit)])

    def _in_groups(self, stmt: Any, tiles: Tiles, lanes: int) -> Any:
        """A statement whose loops around one reduction reduce the lanes of several together."""

        def visit(loop: Any) -> Any:
            inner = loop.body.seq[-1] if isinstance(loop.body, tirx.SeqStmt) else loop.body
            reduction = self._reduction(inner) if isinstance(inner, tirx.For) else None
            if reduction is None:
                return loop
            grouped = FEW <= tiles.lanes <= lanes and not _is_ordered(reduction)
            term = substitute(reduction.term, values_of(inner.body))

            def prefetches(visited: Any) -> list[Any]:
                at = {loop.loop_var: visited, inner.loop_var: as_dtype(0, dtype_of(inner.loop_var))}
                count = tiles.count or (TOGETHER if tiles.lanes == lanes else 2)
                span, (gathers, along) = tiles.lanes * count, at
                if span < PREFETCHING * lanes:
                    return []
                return rows_ahead(self.func, term, gathers, along, at, span, self.cache)

            done = _grouped(loop, inner, reduction, tiles, prefetches) if grouped else None
            return _with_prefetches(loop, prefetches(loop.loop_var)) if done is None else done

        return map_expr(stmt, [(tirx.For, visit)])

    def _versions(self, loop: Any, extent: Any, lanes: int) -> tirx.Stmt:
        """A loop around reductions over a size, with versions by it unless it is constant."""

        def version(*tiles: Any) -> Any:
            again = with_fresh(loop, fresh_definitions(loop), blocks=True)
            return self._replaced(self._in_groups(again, Tiles(*tiles), lanes), Tiles(*tiles))

        def number(n: int) -> Any:
            return as_dtype(n, dtype_of(extent))

        if isinstance(extent, tirx.IntImm):
            return version(*_tiles_of(int(extent), lanes))
        below: Any = version(1, 0, True)
        for few in range(1, FEW + 1):
            exact = tirx.EQ(extent, number(few))
            tiles = (FEW, 1, True) if few == FEW else (1, few, True)
            below = tirx.IfThenElse(exact, version(*tiles), below)
        size = FEW
        while size < lanes:
            exact = tirx.EQ(extent, number(2 * size))
            done = tirx.IfThenElse(exact, version(2 * size, 1, True), version(size, 2, False))
            below = tirx.IfThenElse(extent > number(size), done, below)
            size *= 2
        long = extent > number(TOGETHER * lanes)
        above = tirx.IfThenElse(long, version(WIDE * lanes), version(lanes))
        for count in COUNTS:
            most = number(count * lanes)
            if count < TOGETHER:
                above = tirx.IfThenElse(extent > most, above, version(lanes, count, False))
            if count != 3:  # usual sizes, whose last vector does not begin earlier
                exact = tirx.EQ(extent, most)
                above = tirx.IfThenElse(exact, version(lanes, count, True), above)
        return tirx.IfThenElse(extent > number(max(lanes, FEW)), above, below)


def _tiles_of(size: int, lanes: int) -> tuple[int, int | None, bool]:
    """The tiles of a constant size, for vectors of `lanes` lanes."""
    if size < FEW:
        return 1, size, True
    if size > STRAIGHT * lanes:
        return WIDE * lanes, None, size % (WIDE * lanes) == 0
    width = min(lanes, 1 << size.bit_length() - 1)
    return width, -(-size // width), size % width == 0


def _lanes(reduction: Reduction, bits: int) -> int:
    return bits // tvm.DataType(dtype_of(reduction.term)).bits


def _only_within(loop: Any) -> Any:
    """The only statement in a loop, through blocks with nothing else."""
    stmt = loop.body
    while isinstance(stmt, s_tir.SBlockRealize) and stmt.block.init is None:
        stmt = stmt.block.body
    return stmt


class Tiles(NamedTuple):
    """Tiles of a reduction.

    lanes : per tile; 1 for no vectors
    count : the number of tiles; None if it depends on the size
    whole : whether the last tile does not overlap; None if that depends on the size
    """

    lanes: int
    count: int | None = None
    whole: bool | None = None


def _innermost(loop: Any, in_order: bool = True) -> Reduction | None:
    """The reduction to one element of a loop directly around a block; None for other loops.

    in_order : only for operators whose result depends on the order by rounding at most
    """
    realize = loop.body
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(realize, s_tir.SBlockRealize):
        return None
    block = realize.block
    if not is_one(realize.predicate) or block.alloc_buffers:
        return None
    reducing, others = _variables(loop)
    if len(reducing) != 1 or reducing[0].iter_type != tirx.IterVar.CommReduce:
        return None
    var = reducing[0].var
    if any(loop.loop_var in free_vars(value) for _, value in others):
        return None
    reduction = reduction_of(block.body)
    if reduction is None or (in_order and reduction.operator == "product"):
        return None
    if tvm.DataType(dtype_of(reduction.term)).bits not in (32, 64):
        return None
    # Conditions are hoisted out of the loop, which may have no visits.
    if not all(map(is_speculatable, reduction.conditions)):
        return None
    moves = any(var in free_vars(i) for i in [*reduction.store.indices, *reduction.conditions])
    return None if moves or not _is_contiguous(reduction.term, var) else reduction


def _variables(loop: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The variables of a block that are its loop's; and the others, with their values."""
    pairs = list(zip(loop.body.block.iter_vars, loop.body.iter_values, strict=True))
    of_loop = [v for v, value in pairs if value.same_as(loop.loop_var)]
    return of_loop, [(v, value) for v, value in pairs if not value.same_as(loop.loop_var)]


def _is_contiguous(term: Any, var: Any) -> bool:
    """Whether a term is contiguous along a variable, or gathers by indices that are."""
    loads = [x for x in nodes_of(ir.TensorLoad, term) if var in free_vars(x)]
    return bool(loads) and all(_is_contiguous_load(x, var) for x in loads)


def _is_contiguous_load(load: Any, var: Any) -> bool:
    if any(isinstance(i, ir.TensorLoad) for i in load.indices):
        return True
    wide = wide_indices(load.source, load.indices)  # () for a single element
    along = bool(wide) and is_offset_of(wide[-1], var)
    return along and not any(var in free_vars(i) for i in wide[:-1])


def _is_ordered(reduction: Reduction) -> bool:
    """Whether the result depends on the position of a NaN: it is that of the terms after it."""
    extremum = isinstance(uncast(reduction.store.value), tirx.Max | tirx.Min)
    return extremum and "float" in dtype_of(reduction.term)


def _partial_results(
    acc: Any, terms: dict[int, Callable[[Any], Any]], loop: Any, tiles: Tiles,
    reduction: Reduction, nans: Any = None,
) -> list[tirx.Stmt]:  # fmt: skip
    """A reduction's loop in vectors, for one or more visits of the loops around.

    acc : the accumulator vectors
    terms : by the vector of their results, the term as a function of the loop's visit
    nans : flags per lane, whether a term is NaN; None if unused
    """
    kind = str(acc.ty.dtype)
    extent, dtype, name = loop.extent, dtype_of(loop.loop_var), loop.loop_var.name
    width, count = as_dtype(tiles.lanes, dtype), tiles.count

    def step(visit: Any = None, first: bool = False, new: Any = None) -> tirx.Stmt:
        """Vectors from a visit on; `new` is the first lane that was in no earlier vector."""
        stores: list[Any] = []
        for n, term in terms.items():
            lane = tirx.Var(f"{name}_lane", dtype)
            place = lane + as_dtype(n * tiles.lanes, dtype)
            value = identity = reduction.identity(kind)
            if visit is not None:
                value = term(visit + lane)
            if new is not None:
                value = tirx.Select(lane >= new, value, identity)
            flags = [] if nans is None else [_flag(nans, place, value, first)]
            if not first:
                value = reduction.combine(tirx.BufferLoad(acc, [place]), value)
            stored = as_one([*flags, tirx.BufferStore(acc, value, [place])])
            stores.append(loop_over(lane, tiles.lanes, stored, tirx.ForKind.VECTORIZED))
        return as_one(stores)

    if count is None:
        var, whole = tirx.Var(f"{name}_0", dtype), tirx.floordiv(extent, width)
        done = [step(first=True), loop_over(var, whole, step(var * width))]
        new = whole * width - extent + width
    else:
        full = count if tiles.whole else count - 1
        done = [step(as_dtype(n * tiles.lanes, dtype), first=not n) for n in range(full)]
        new = as_dtype(count * tiles.lanes, dtype) - extent
    if not tiles.whole:
        last = step(extent - width, new=new)
        done.append(last if tiles.whole is False else add_guards([new < width], last))
    return done


def _flag(nans: Any, place: Any, value: Any, first: bool) -> tirx.Stmt:
    """Record whether a value is NaN; first : whether there was none before."""
    kind = dtype_of(value)
    before = tirx.const(0, kind) if first else tirx.BufferLoad(nans, [place])
    number = value <= tirx.const(float("inf"), kind)
    return tirx.BufferStore(nans, tirx.Select(number, before, tirx.const(1, kind)), [place])


def _in_one_loop(stmts: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """Join neighbouring vectorised loops of equal extents, one body after the other.

    The vectors are the same. (TVM 0.27: the time of `FlattenBuffer` is quadratic in the number of
    loops.)
    """
    joined: list[Any] = []
    for stmt in (x for s in stmts for x in (s.seq if isinstance(s, tirx.SeqStmt) else [s])):
        before: Any = joined[-1] if joined else None
        both = _is_vector(before) and _is_vector(stmt)
        if both and structural_equal(before.extent, stmt.extent):
            body = substitute(stmt.body, {stmt.loop_var: before.loop_var})
            joined[-1] = loop_with(before, body=as_one([before.body, body]))
        else:
            joined.append(stmt)
    return joined


def _is_vector(stmt: Any) -> bool:
    return isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.VECTORIZED


def _with_prefetches(loop: Any, prefetches: list[Any]) -> tirx.Stmt:
    """A loop that first prefetches what later visits gather."""
    return loop_with(loop, body=tirx.SeqStmt([*prefetches, loop.body])) if prefetches else loop


def _merge_guards(stmts: Sequence[Any]) -> list[Any]:
    """Merge statements under equal conditions; those without conditions come first."""
    guards: dict[Any, list[Any]] = {None: []}
    for stmt in stmts:
        guarded = isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None
        condition = StructuralKey(stmt.condition) if guarded else None
        guards.setdefault(condition, []).append(stmt.then_case if guarded else stmt)
    plain = guards.pop(None)
    return [*plain, *(tirx.IfThenElse(x.key, as_one(inside), None) for x, inside in guards.items())]


def _grouped(
    loop: Any,
    inner: Any,
    reduction: Reduction,
    tiles: Tiles,
    prefetches: Callable[[Any], list[Any]],
) -> tirx.Stmt | None:
    """A loop around a reduction to an element, with several visits at once; None for other forms.

    inner : the reduction's loop, alone in `loop`, or after an init
    asks : returns the prefetches for a visit
    """
    realize = inner.body
    before = list(loop.body.seq)[:-1] if isinstance(loop.body, tirx.SeqStmt) else []
    values = values_of(realize)
    spatial = {v.var for v in realize.block.iter_vars if v.iter_type == tirx.IterVar.DataPar}
    visited = any(v in spatial and x.same_as(loop.loop_var) for v, x in values.items())
    init = realize.block.init
    if len(before) == 1 and isinstance(before[0], s_tir.SBlockRealize) and init is None:
        init = substitute(before[0].block.body, values_of(before[0]))
    elif before:
        return None
    store, term = (substitute(x, values) for x in (reduction.store, reduction.term))
    held: Any = tirx.BufferLoad(store.buffer, store.indices)
    if init is not None:
        init = substitute(init, values)
        if not isinstance(init, tirx.BufferStore) or not init.buffer.same_as(store.buffer):
            return None
        if not same_indices(init.indices, store.indices):
            return None
        held = init.value
    selects = isinstance(uncast(reduction.store.value), tirx.Select)
    if not visited or selects or reduction.conditions or not is_one(realize.predicate):
        return None
    dtype, of = dtype_of(term), dtype_of(loop.loop_var)
    lanes = tiles.lanes
    group = min(GROUP if tiles.count in (1, 2) else GROUP // 2, lanes)
    parts, sums = (buffer_var([n], dtype, name) for n, name in (
        (group * lanes, "parts"), (group, "sums"),
    ))  # fmt: skip
    number = tirx.Var(f"{loop.loop_var.name}_0", of)

    def visit(n: int, expr: Any, place: Any = None) -> Any:
        """An expression in a visit of the group, at a visit of the reduction."""
        here = {loop.loop_var: number * as_dtype(group, of) + as_dtype(n, of)}
        return substitute(expr, here if place is None else {**here, inner.loop_var: place})

    terms: dict[int, Any] = {n: lambda x, n=n: visit(n, term, x) for n in range(group)}
    # Many short ones run in sequence; few long ones are interleaved, so that their loads overlap.
    turns = [{n: each} for n, each in terms.items()] if group > GROUP // 2 else [terms]
    body = _merge_guards([ask for n in range(group) for ask in prefetches(visit(n, loop.loop_var))])
    steps = [s for each in turns for s in _partial_results(parts, each, inner, tiles, reduction)]
    body += _in_one_loop(steps)
    rows = [tirx.BufferLoad(parts, [tirx.Ramp(n * lanes, 1, lanes)]) for n in range(group)]
    total = add_up(rows, lanes, dtype, reduction.combine)
    body.append(tirx.BufferStore(sums, total, [tirx.Ramp(0, 1, group)]))
    for n in range(group):
        total = tirx.BufferLoad(sums, [tirx.IntImm("int32", n)])
        value = reduction.added(visit(n, held), total)
        indices = [visit(n, i) for i in store.indices]
        body.append(tirx.BufferStore(store.buffer, value, indices))
    block = s_tir.SBlock(
        [], [], [], f"{realize.block.name_hint}_group", as_one(body), alloc_buffers=[parts, sums]
    )
    sources = {r.source: r.source for r in [*realize.block.reads, *realize.block.writes]}
    reads, writes = s_tir.analysis.get_sblock_read_write_region(block, sources)
    block = block_with(block, reads=reads, writes=writes)
    size = as_dtype(group, of)
    groups = tirx.floordiv(loop.extent, size)
    done = groups * size
    whole = loop_with(
        loop, loop_var=number, extent=groups, body=s_tir.SBlockRealize([], True, block)
    )
    rest = tirx.Var(f"{loop.loop_var.name}_rest", of)
    again = with_fresh(
        loop.body, {loop.loop_var: done + rest, **fresh_definitions(loop.body)}, True
    )
    again = loop_over(rest, loop.extent - done, again)
    return tirx.SeqStmt([whole, _with_prefetches(again, prefetches(done + rest))])


def _in_vectors(
    loop: Any, reduction: Reduction, bits: int, tiles: Tiles | None = None
) -> tirx.Stmt:
    """A reduction in vectors, or the loop unchanged.

    tiles : None for one vector at a time, or several over a size, and none for shorter loops
    """
    extent = loop.extent
    if tiles is not None:
        if tiles.lanes > 1:
            return _placed(loop, reduction, *_vectors(loop, reduction, tiles))
        store, (var,) = reduction.store, (v.var for v in _variables(loop)[0])
        held = tirx.BufferLoad(store.buffer, store.indices)
        value = cast(held, dtype_of(reduction.term))
        for n in range(tiles.count or 0):
            step = as_dtype(n, dtype_of(loop.loop_var))
            value = reduction.combine(value, substitute(reduction.term, {var: step}))
        value = cast(value, dtype_of(held))
        return _placed(loop, reduction, tirx.BufferStore(store.buffer, value, store.indices), [])
    lanes, ragged = _lanes(reduction, bits), bool(nodes_of(ir.TensorLoad, extent))
    if ragged:
        lanes = min(RAGGED_LANES, lanes)
    constant = isinstance(extent, tirx.IntImm)
    if lanes < 2 or (constant and int(extent) < lanes):
        return loop
    if constant:
        tiles = Tiles(lanes, None, int(extent) % lanes == 0)
        return _placed(loop, reduction, *_vectors(loop, reduction, tiles))
    body, buffers = _one_by_one(loop, reduction), []
    # If terms are expensive, shorter vectors serve loops that do not fill one.
    costly = nodes_of((tirx.Div, ir.Call), reduction.term)
    widths = (lanes // 2, lanes) if costly and lanes > 2 else (lanes,)
    for width in widths if ragged else (*widths, WIDE * lanes):
        vectors, more = _vectors(loop, reduction, Tiles(width, None, False))
        body = tirx.IfThenElse(extent >= as_dtype(width, dtype_of(extent)), vectors, body)
        buffers += more
    return _placed(loop, reduction, body, buffers)


def _one_by_one(loop: Any, reduction: Reduction) -> tirx.Stmt:
    """The loop of a reduction, as a statement of its block."""
    store, (reduced,) = reduction.store, _variables(loop)[0]
    one = tirx.Var(f"{loop.loop_var.name}_1", dtype_of(loop.loop_var))
    held = tirx.BufferLoad(store.buffer, store.indices)
    value = reduction.added(held, substitute(reduction.term, {reduced.var: one}))
    return loop_over(one, loop.extent, tirx.BufferStore(store.buffer, value, store.indices))


def _vectors(loop: Any, reduction: Reduction, tiles: Tiles) -> tuple[tirx.Stmt, list[Any]]:
    """A reduction in tiles, and the buffers of their lanes.

    If its result depends on the position of a NaN, and there is one, it is repeated one by one.
    """
    dtype, name, store = dtype_of(loop.loop_var), loop.loop_var.name, reduction.store
    (reduced,), _ = _variables(loop)
    kind = dtype_of(reduction.term)
    acc, flags = (buffer_var([tiles.lanes], kind, label) for label in ("acc", "seen"))
    nans = flags if _is_ordered(reduction) else None

    def term(visit: Any) -> Any:
        return substitute(reduction.term, {reduced.var: visit})

    parts = _partial_results(acc, {0: term}, loop, tiles, reduction, nans)
    half = tiles.lanes // 2
    while half:
        far = as_dtype(half, dtype)
        lane = tirx.Var(f"{name}_lane", dtype)
        stores: list[Any] = []
        for buffer, combine in ((acc, reduction.combine), (nans, tirx.max)):
            if buffer is not None:
                pair = (tirx.BufferLoad(buffer, [i]) for i in (lane, lane + far))
                stores.append(tirx.BufferStore(buffer, combine(*pair), [lane]))
        parts.append(loop_over(lane, half, as_one(stores), tirx.ForKind.VECTORIZED))
        half //= 2
    zero, held = as_dtype(0, dtype), tirx.BufferLoad(store.buffer, store.indices)
    value = reduction.added(held, tirx.BufferLoad(acc, [zero]))
    done: Any = tirx.BufferStore(store.buffer, value, store.indices)
    if nans is None:
        return as_one([*parts, done]), [acc]
    numbers = tirx.BufferLoad(nans, [zero]) <= tirx.const(0, kind)
    done = tirx.IfThenElse(numbers, done, _one_by_one(loop, reduction))
    return as_one([*parts, done]), [acc, nans]


def _placed(loop: Any, reduction: Reduction, body: tirx.Stmt, locals_: list[Any]) -> tirx.Stmt:
    """The block of a loop's reduction, with another body and without the loop."""
    block = loop.body.block
    _, others = _variables(loop)
    done, init = add_guards(reduction.conditions, body), block.init
    if init is not None and not any(v.iter_type == tirx.IterVar.CommReduce for v, _ in others):
        done, init = tirx.SeqStmt([init, done]), None
    sources = {r.source: r.source for r in [*block.reads, *block.writes]}
    new = block_with(block, iter_vars=[v for v, _ in others], body=done, alloc_buffers=locals_)
    new = block_with(new, init=init, reads=[], writes=[])
    reads, writes = s_tir.analysis.get_sblock_read_write_region(new, sources)
    new = block_with(new, reads=reads, writes=writes)
    return s_tir.SBlockRealize([value for _, value in others], True, new)
