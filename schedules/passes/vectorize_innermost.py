"""Vectorise innermost contiguous loops of a CPU program, with reductions over them in registers.

TVM's split of a loop of unknown extent leaves a predicate, which makes the whole loop scalar. Here
the loop is cut into a vectorised part and a scalar remainder. Before::

    for j, k in T.grid(J_indptr[vi + 1] - J_indptr[vi], feat):
        with T.sblock("spmm1"): ...                     # C[vi, k] = C[vi, k] + A[vi, j] * B[.., k]

After, for each width from half of the vector registers down to one element, halving::

    for k_tile in range(feat // 128):
        acc[0:128] = 0.0
        for j in range(J_indptr[vi + 1] - J_indptr[vi]):
            if min(n, J_indices_reuse) * feat > 65536:   # rows of B are not in the cache anyway
                prefetch(B[J_indices[vi, min(j + 8, ..)], k_tile * 128]) ...
            acc[0:128] = acc[0:128] + A[vi, j] * B[.., k_tile * 128 : k_tile * 128 + 128]
        C[vi, k_tile * 128 : k_tile * 128 + 128] = acc[0:128]

Rows of a block, which share the rows of B, are accumulated several at a time. Prefetching a row
costs as many instructions as adding two vectors: narrow tiles do not prefetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import tvm
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_equal

from sparsetir.schedules.passes.launches import top_level
from sparsetir.schedules.passes.nests import is_offset_of, is_zero, wide_indices, with_fresh
from sparsetir.schedules.passes.prefetch import PREFETCHING, bytes_of, gathering_loads, rows_ahead
from sparsetir.sparse_ir.exact import is_choice
from sparsetir.sparse_ir.nodes import (
    buffer_var,
    fresh_definitions,
    is_among,
    loads_of,
    nodes_of,
    same_indices,
    stores_of,
    substitute,
)
from sparsetir.sparse_ir.races import FREE, facts_of
from sparsetir.sparse_ir.reduction import add_guards, split_guards
from sparsetir.sparse_ir.speculation import is_speculatable
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    loop_with,
    nest_of,
    values_of,
    with_body,
)
from sparsetir.sparse_ir.traversal import map_expr

SHORTER = 4  # lanes of a vector per lane of the shorter one that serves loops which fill none
ROWS = 4  # rows accumulated in registers at a time
STRAIGHT = 4  # terms of a sum in such rows as straight-line code
# The least multiple of the cache size for which operands shared by rows are read row by row, in
# longer pieces. (Zen 3, one thread: 1.3 times as fast with 5 MB, 0.6 to 0.9 with 1 to 4 MB.)
FAR = 8
MANY_TERMS = 16  # the least terms of a block for which rereading and writing result rows pays
MOST_NESTS = 4  # the most nests of a function with versions by size


class SizeRange(NamedTuple):
    """The sizes that a version of a function is for.

    size : the variable, None for functions without versions
    low, high : its least and its largest value, None for no bound
    """

    size: Any
    low: int
    high: int | None

    def of(self, extent: Any) -> tuple[int, int | None]:
        """The least and the largest value of an extent."""
        if isinstance(extent, tirx.IntImm):
            return int(extent), int(extent)
        return (self.low, self.high) if _same(extent, self.size) else (0, None)


ANY_SIZE = SizeRange(None, 0, None)


def vectorize_innermost(
    func: tirx.PrimFunc, bits: int, cache: int, vectors: int, among: SizeRange = ANY_SIZE,
    sums_alone: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """Vectorise a stage-II function for registers of `bits` bits; the last step of a schedule.

    cache : bytes; rows gathered from a larger buffer are prefetched
    vectors : accumulator vectors of the widest tile, as many as fit the registers
    among : the sizes that the result is for
    sums_alone : only vectorise reductions, not other loops, such as those left by an earlier call
    """

    def vectorized(stmt: Any, rows: bool) -> Any:
        nests = _nests_of(func, stmt, rows)

        def visit(loop: Any) -> Any:
            nest = nests.get(loop.loop_var)
            if nest is None:
                return loop
            lanes = bits // max(8, tvm.DataType(nest.dtype).bits)
            if is_zero(nest.along.extent):
                return loop
            if not nest.reduces:
                return loop if sums_alone else nest.in_vectors(lanes, cache)
            if dtype_of(nest.store.value) == "bool":
                return loop  # TVM does not vectorise local booleans
            if nest.rows is None:
                return nest.in_registers(lanes, cache, vectors, among)
            alone = vectorized(with_fresh(loop, fresh_definitions(loop), blocks=True), rows=False)
            tiles = nest.in_registers(lanes, cache, vectors, among)
            return tirx.IfThenElse(
                nest.bytes_shared() > as_dtype(FAR * cache, "int64"), alone, tiles
            )

        return map_expr(stmt, [(tirx.For, visit)])

    return with_body(func, vectorized(func.body, rows=True))


def size_of_tiles(func: tirx.PrimFunc, bits: int, vectors: int) -> tuple[Any, int] | None:
    """The variable by which code for sums in registers differs, and the widest tile.

    None if there is no such variable, or if all versions would take long to compile: with many
    nests, or visits of several steps, each dispatches on the size.
    """
    if any(_has_steps(part) for part in top_level(func)):
        return None
    nests = [n for n in _nests_of(func, func.body).values() if n.reduces]
    sizes = [n.along.extent for n in nests if isinstance(n.along.extent, ir.Var)]
    if not sizes or len(nests) > MOST_NESTS or any(x not in func.params for x in sizes):
        return None
    size = max(sizes, key=sizes.count)
    of_size = [n for n in nests if _same(n.along.extent, size)]
    kinds = {n.dtype for n in of_size} - {"bool"}
    widths = {vectors * (bits // max(8, tvm.DataType(x).bits)) for x in kinds}
    return (size, max(widths)) if widths else None


def _has_steps(stmt: Any) -> bool:
    """Whether a statement has several loops in sequence inside another one."""
    loops = nodes_of(tirx.For, stmt)
    return sum(not nodes_of(tirx.For, loop.body) for loop in loops) > 1


def tile_sizes(width: int) -> list[int]:
    """The largest sizes of versions that need no loop over tiles of a width."""
    return [1 << n for n in range(width.bit_length())]


def _nests_of(func: tirx.PrimFunc, stmt: Any, rows: bool = True) -> dict[Any, _Nest]:
    """Nests to vectorise in a statement of a function, by the variable of their outermost loop.

    rows : whether they may contain a loop over rows
    """
    nests: dict[Any, _Nest] = {}
    inside: set[Any] = set()
    for outer in nodes_of(tirx.For, stmt):
        nest = None if outer.loop_var in inside else _Nest.of(outer, func, rows)
        if nest is not None:
            nests[outer.loop_var] = nest
            inside |= {loop.loop_var for loop in nest.loops}
    return nests


class _Nest:
    """Perfectly nested loops around a block with one store, contiguous along one spatial loop.

    loops : from the outside in; `along` is the contiguous one, the others are reductions
    conditions, store, init : of the block, in terms of the loops
    of_terms : conditions on terms: for sums with an init those that it does not have, for others
        those that vary by term
    rows : a spatial loop of a known number of visits with the same loads in the contiguous one,
        such as the rows of a block; None in most nests
    outer : the block's other variables, with their values
    updates : whether sums start from the results of earlier visits, and not with an init
    """

    def __init__(self, func: Any, loops: list[Any], realize: Any, along: Any, rows: Any) -> None:
        self.func, self.loops, self.along = func, loops, along
        self.block = realize.block
        self.rows: Any = rows
        self.others = [lp for lp in loops if not lp.same_as(along) and not lp.same_as(rows)]
        self.reduces = bool(self.others)
        loop_vars = {lp.loop_var for lp in loops}
        pairs = list(zip(self.block.iter_vars, realize.iter_values, strict=True))
        self.outer = [(v, x) for v, x in pairs if x not in loop_vars]
        mapping = {v.var: x for v, x in pairs if x in loop_vars}
        self.conditions, store = split_guards(substitute(self.block.body, mapping))
        self.store: Any = store
        init = self.block.init
        self.updates = init is None
        self.of_init, first = split_guards(None if init is None else substitute(init, mapping))
        self.init: Any = first
        summed = {lp.loop_var for lp in self.others}
        differ = [
            self._varies(x, summed) if self.updates else not is_among(x, self.of_init)
            for x in self.conditions
        ]
        self.of_terms = [*compress(self.conditions, differ)]
        self.conditions = [*compress(self.conditions, map(not_, differ))]
        self.held = 1  # of `rows` at a time
        self.lanes = 1  # per accumulator vector
        self.dtype = self._widened() or str(self.store.buffer.ty.dtype)

    def _varies(self, condition: Any, summed: set[Any]) -> bool:
        """Whether a condition may vary by term of a sum."""
        return bool(free_vars(condition) & summed or loads_of(condition, self.store.buffer))

    @staticmethod
    def of(loop: Any, func: Any, several: bool = True) -> _Nest | None:
        """The nest of `func` that starts at `loop`; None for another form.

        several : whether it may contain a loop over rows
        """
        loops, kinds, realize = _straight(loop)
        if any(lp.kind != tirx.ForKind.SERIAL or lp.loop_var not in kinds for lp in loops):
            return None
        if not isinstance(realize, s_tir.SBlockRealize):
            return None
        store = split_guards(realize.block.body)[1]
        if not isinstance(store, tirx.BufferStore):
            return None
        last = wide_indices(store.buffer, store.indices)[-1:]
        spatial = [lp for lp in loops if kinds[lp.loop_var] == tirx.IterVar.DataPar]
        if len(spatial) not in (1, 1 + several) or not last:
            return None
        *rows, along = spatial
        nest = _Nest(func, loops, realize, along, rows[0] if rows else None)
        if any(free_vars(x) & {lp.loop_var for lp in loops} for _, x in nest.outer):
            return None
        return nest if nest._fits(kinds, realize) and nest._shares(realize) else None

    def _fits(self, kinds: dict[Any, Any], realize: Any) -> bool:
        """Whether all accesses are along one loop, and each of its visits has its own element."""
        at, along = self.store.indices, self.along.loop_var
        (last,) = wide_indices(self.store.buffer, at)[-1:]
        body = add_guards([*self.conditions, *self.of_terms], self.store)
        one = self.reduces and is_one(self.along.extent) and self._widened()  # kept in a register
        across = self._transposes()
        if (
            not is_offset_of(last, along)
            and not one
            and not across
            or any(_uses(x.extent, along) for x in self.others)
            or any(_uses(self.along.extent, x.loop_var) for x in self.loops)
        ):
            return False  # tiles are around all other loops, or no loop is contiguous
        strided = self.store.buffer if across else None
        if not _contiguous_in(along, body, gathers=len(self.loops) == 1, strided=strided):
            return False
        if not self.reduces:
            if self.outer and not (_gathers(self.store) and self._is_free(along, realize)):
                return False  # LLVM vectorises these, and calls memset for zeros
            return len(self.conditions) < 2
        reduced = {lp.loop_var for lp in self.others}
        if any(kinds[v] != tirx.IterVar.CommReduce for v in reduced) or not is_one(
            realize.predicate
        ):
            return False
        loads = loads_of(body, self.store.buffer)
        if not all(same_indices(x.indices, at) for x in loads):
            return False
        if self.updates:
            ahead = [*self.conditions, *at]
            still = not any(free_vars(x) & reduced for x in at)
            return bool(loads) and still and all(is_speculatable(x) for x in ahead)
        if self.rows is not None or len(self.of_init) != len(self.conditions):
            return False  # rows of blocks update their results, in pieces that suit the caches
        first = isinstance(self.init, tirx.BufferStore) and same_indices(self.init.indices, at)
        return first and all(v.iter_type == tirx.IterVar.DataPar for v, _ in self.outer)

    def _transposes(self) -> bool:
        """Whether an operand is contiguous along the loop, and only the result is strided."""
        along = self.along.loop_var
        *others, last = wide_indices(self.store.buffer, self.store.indices)
        within = [x for x in others if _uses(x, along)]
        loads = [x for x in nodes_of(ir.TensorLoad, self.store.value) if _uses(x, along)]
        return (
            self.reduces
            and not _uses(last, along)
            and len(within) == 1
            and is_offset_of(within[0], along)
            and any(not x.source.same_as(self.store.buffer) for x in loads)
        )

    def _shares(self, realize: Any) -> bool:
        """Whether visits of `rows`, if there are such, have the same loads in the contiguous loop.

        Each has its own elements of the result.
        """
        if self.rows is None:
            return True
        along, row = self.along.loop_var, self.rows.loop_var
        loads = [x for x in nodes_of(ir.TensorLoad, self.store.value) if _uses(x, along)]
        others = [x for x in loads if not x.source.same_as(self.store.buffer)]
        known = isinstance(self.rows.extent, tirx.IntImm) and is_zero(self.rows.min)
        if not self.loops[0].same_as(self.rows) and self._terms_of_rows() >= MANY_TERMS:
            return False  # a block at a time, whose operand stays in the L1 cache
        facts = facts_of(self.block)
        free = all(facts[v] == FREE for v, x in values_of(realize).items() if _uses(x, row))
        return self.reduces and known and free and any(not _uses(x, row) for x in others)

    def bytes_shared(self) -> Any:
        """The size of the arrays whose loads all of `rows` share; an int64."""
        row, along = self.rows.loop_var, self.along.loop_var
        loads = [x for x in nodes_of(ir.TensorLoad, self.store.value) if _uses(x, along)]
        shared = {x.source.__chandle__(): x.source for x in loads if not _uses(x, row)}
        return sum(map(bytes_of, shared.values()), as_dtype(0, "int64"))

    def _terms_of_rows(self) -> int:
        """The number of terms in each visit of `rows`, as far as it is constant."""
        first = next(n for n, loop in enumerate(self.loops) if loop.same_as(self.rows))
        extents = [x.extent for x in self.loops[first + 1 :] if not x.same_as(self.along)]
        return math.prod(int(x) for x in extents if isinstance(x, tirx.IntImm))

    def _held_rows(self, vectors: int) -> int:
        """Rows accumulated at a time: the most that divide their number."""
        count = 1 if self.rows is None else int(self.rows.extent)
        return next(n for n in range(min(ROWS, vectors), 0, -1) if count % n == 0)

    def _is_free(self, along: Any, realize: Any) -> bool:
        """Whether visits of a loop may be lanes, and no loop around it is a reduction."""
        facts = facts_of(self.block)
        if any(v.iter_type != tirx.IterVar.DataPar for v in self.block.iter_vars):
            return False
        return all(facts[v] == FREE for v, x in values_of(realize).items() if along in free_vars(x))

    def in_vectors(self, lanes: int, cache: int) -> tirx.Stmt:
        """The contiguous loop in vectors, and its remainder."""
        lanes = self._at_most_extent(lanes)
        if lanes < 2:
            return self.along
        again = not loads_of(self.block.body, self.store.buffer)
        body = substitute(
            add_guards(self.conditions, self.store), {v.var: x for v, x in self.outer}
        )

        def prefetches(start: Any) -> list[tirx.Stmt]:
            at, around = {self.along.loop_var: start}, [x for _, x in self.outer]
            return [
                ask
                for last in around[-1:]
                for ask in rows_ahead(self.func, body, last, self.along.loop_var, at, lanes, cache)
            ]

        return _vectors_and_rest(self.along, lanes, again, prefetches)

    def in_registers(self, lanes: int, cache: int, vectors: int, among: SizeRange) -> tirx.Stmt:
        """Tiles of the contiguous loop outermost, each accumulated in registers."""
        low, high = among.of(self.along.extent)
        self.lanes = lanes
        # Spilled values stay in the L1 cache; rows are read in fewer, longer pieces.
        self.held = self._held_rows(vectors)
        of_row = 1 << (vectors // self.held).bit_length() - 1  # tiles halve to one element
        width = of_row * self.lanes * (2 if self._has_contiguous_rows() else 1)
        if high is not None and high <= width:
            return self._few(high, cache)
        if self.updates:  # tiles that overlap would add some of their terms twice
            return self._tiles(self._at_most_extent(width), self.along.extent, cache)
        if high is None and low < width:
            return self._by_size([*tile_sizes(width), None], width, cache)
        return self._many(width, cache)

    def _widened(self) -> str | None:
        """The type in which terms are combined, if the result is read and stored through casts."""
        value = self.store.value
        if not isinstance(value, tirx.Cast):
            return None
        wide, buffer = dtype_of(value.value), self.store.buffer
        read = [x.value for x in nodes_of(tirx.Cast, value.value) if dtype_of(x) == wide]
        through = [x for x in read if isinstance(x, ir.TensorLoad) and x.source.same_as(buffer)]
        return wide if len(through) == len(loads_of(value, buffer)) else None

    def _has_contiguous_rows(self) -> bool:
        """Whether an operand's rows are contiguous in memory, one per term of a sum."""
        visited = self.others[-1].loop_var
        loads = [x.indices for x in nodes_of(ir.TensorLoad, self.store.value)]
        along = [at for at in loads if at and self.along.loop_var in free_vars(at[-1])]
        return any(index.same_as(visited) for at in along for index in at)

    def _by_size(self, ends: list[int | None], width: int, cache: int) -> tirx.Stmt:
        """Versions by the largest extent of the contiguous loop, dispatched by bisection."""
        if len(ends) == 1:
            (most,) = ends
            return self._many(width, cache) if most is None else self._few(most, cache)
        middle = len(ends) // 2
        parts = [self._by_size(some, width, cache) for some in (ends[:middle], ends[middle:])]
        most = as_dtype(ends[middle - 1], dtype_of(self.along.extent))
        return tirx.IfThenElse(self.along.extent <= most, *parts)

    def _few(self, most: int, cache: int) -> tirx.Stmt:
        """All of the contiguous loop at once: two vectors or tiles, the last of them earlier.

        most : its largest extent; the extent exceeds half of it, or it is 1
        """
        extent, dtype = self.along.extent, dtype_of(self.along.loop_var)
        one = as_dtype(1, dtype)
        if most == 1:
            return self._tile(extent, lambda tile: [(tile, 1)], None)
        exact = isinstance(extent, tirx.IntImm)
        half = 1 << (most - 1).bit_length() - 1
        if exact and most == 2 * half:
            starts: list[tuple[Any, int]] = [(as_dtype(0, dtype), most)]
        elif exact and most > self.lanes:
            whole = most // self.lanes * self.lanes
            starts = [(as_dtype(0, dtype), whole)]
            starts += [(as_dtype(most - self.lanes, dtype), self.lanes)] if whole < most else []
        else:
            starts = [(as_dtype(0, dtype), half), (extent - as_dtype(half, dtype), half)]
        prefetches = cache if most >= PREFETCHING * self.lanes else None
        tiles = self._tile(one, lambda _: starts, prefetches)
        if exact or most > self.lanes:
            return tiles
        whole = self._tile(one, lambda _: [(as_dtype(0, dtype), most)], prefetches)
        return tirx.IfThenElse(tirx.EQ(extent, as_dtype(most, dtype)), whole, tiles)

    def _many(self, width: int, cache: int) -> tirx.Stmt:
        """Tiles as wide as registers hold; the remainder is the end of an overlapping tile."""
        extent, dtype = self.along.extent, dtype_of(self.along.loop_var)
        size = as_dtype(width, dtype)
        tiles = self._tile(tirx.floordiv(extent, size), lambda tile: [(tile * size, width)], cache)
        left = Analyzer().simplify(tirx.floormod(extent, size))
        if isinstance(left, tirx.IntImm):
            if not int(left):
                return tiles
            last = -(-int(left) // self.lanes) * self.lanes
            return tirx.SeqStmt([tiles, self._last(last, cache)])
        rest, last = self._last(width, cache), width // 2
        while last >= self.lanes:
            narrower = self._last(last, cache)
            rest, last = tirx.IfThenElse(left <= as_dtype(last, dtype), narrower, rest), last // 2
        return tirx.SeqStmt([tiles, tirx.IfThenElse(left > as_dtype(0, dtype), rest, None)])

    def _last(self, width: int, cache: int) -> tirx.Stmt:
        dtype = dtype_of(self.along.loop_var)
        start = self.along.extent - as_dtype(width, dtype)
        prefetches = cache if width >= PREFETCHING * self.lanes else None
        return self._tile(as_dtype(1, dtype), lambda _: [(start, width)], prefetches)

    def _tiles(self, width: int, left: Any, cache: int) -> tirx.Stmt:
        """Tiles of a width for the remaining visits, then narrower ones for the remainder."""
        extent, dtype = self.along.extent, dtype_of(self.along.loop_var)
        size = as_dtype(width, dtype)
        prefetches = cache if width >= PREFETCHING * self.lanes else None
        count, start = tirx.floordiv(left, size), extent - left
        tiles = self._tile(count, lambda tile: [(start + tile * size, width)], prefetches)
        rest = Analyzer().simplify(tirx.floormod(extent, size))
        if isinstance(rest, tirx.IntImm) and not int(rest):
            return tiles
        narrower = self._tiles(width // 2, rest, cache)
        # One comparison per row, where most feature sizes end, instead of one per width.
        return tirx.SeqStmt([tiles, tirx.IfThenElse(rest > as_dtype(0, dtype), narrower, None)])

    def _at_most_extent(self, lanes: int) -> int:
        if isinstance(self.along.extent, tirx.IntImm):
            while lanes > int(self.along.extent):
                lanes //= 2
        return lanes

    def _tile(
        self, count: Any, places: Callable[[Any], list[tuple[Any, int]]], cache: int | None
    ) -> tirx.Stmt:
        """Tiles, each accumulated in registers.

        count : the number of tiles
        places : the first visits of the contiguous loop in a tile's parts, and the length of each,
            by the number of the tile
        cache : None for tiles without prefetches
        """
        dtype = dtype_of(self.along.loop_var)
        tile = tirx.Var(f"{self.along.loop_var.name}_tile", dtype)
        if self.rows is None:
            return loop_over(tile, count, self._sums(places(tile), [{}], cache))
        var, held = self.rows.loop_var, self.held
        first = tirx.Var(var.name, dtype_of(var))
        begin = first * as_dtype(held, dtype_of(var))
        at = [{var: begin + as_dtype(n, dtype_of(var))} for n in range(held)]
        body = self._sums(places(tile), at, cache)
        tests = [substitute(x, m) for x in self.conditions if _uses(x, var) for m in at]
        if tests:
            one = tirx.Var(var.name, dtype_of(var))
            alone = loop_over(one, held, self._sums(places(tile), [{var: begin + one}], cache))
            body = tirx.IfThenElse(self._outside(tirx.all(*tests)), body, alone)
        groups = int(self.rows.extent) // held
        return loop_over(tile, count, loop_over(first, groups, body))

    def _outside(self, expr: Any) -> Any:
        """An expression of the block in terms of its variables' values, for use outside it."""
        return substitute(expr, {v.var: x for v, x in self.outer})

    def _sums(
        self, places: list[tuple[Any, int]], rows: list[dict[Any, Any]], cache: int | None
    ) -> tirx.Stmt:
        """The parts of a tile in some rows, accumulated in registers.

        rows : by the variable of the loop over them
        """
        along = self.along.loop_var
        dtype, name = dtype_of(along), along.name
        # LLVM emits the pieces of longer vectors in any order; this order reads memory in order.
        vectors = [
            (start + as_dtype(n, dtype), min(width, self.lanes))
            for start, width in places
            for n in range(0, width, self.lanes)
        ]
        parts = [
            (row, start, width, buffer_var([width], self.dtype, "acc"))
            for row in rows
            for start, width in vectors
        ]
        fresh = {
            lp.loop_var: tirx.Var(lp.loop_var.name, dtype_of(lp.loop_var)) for lp in self.others
        }

        terms = self.of_terms

        def shared(condition: Any) -> bool:
            """Whether a condition is the same for everything accumulated at a time."""
            of_sums = loads_of(condition, self.store.buffer)
            return not of_sums and not any(_uses(condition, v) for v in rows[0])

        def lanes_of(make: Any) -> tirx.Stmt:
            """`make(acc, lane, mapping)` for every element; `mapping` gives the loops' values."""
            return as_one([part(make, *x) for x in parts])

        def part(make: Any, row: Any, start: Any, width: int, acc: Any) -> tirx.Stmt:
            if width == 1:
                at = {**fresh, **row, self.along.loop_var: start}
                return make(acc, as_dtype(0, dtype), at)
            lane = tirx.Var(f"{name}_lane", dtype)
            made = make(acc, lane, {**fresh, **row, self.along.loop_var: start + lane})
            return loop_over(lane, width, made, tirx.ForKind.VECTORIZED)

        def updates(total: Any) -> tirx.Stmt:
            """Updates of all elements, with a branch for each case of a choice that they share."""
            for test in [*self.conditions, *terms]:
                total = _decided(total, test, 1)
            differ = [x for x in terms if not shared(x)]
            tests = [
                test
                for test in _first_choices(total.value)
                if shared(test) and not _uses(test, along) and (not differ or is_speculatable(test))
            ]
            if not tests:
                return lanes_of(partial(update, add_guards(differ, total)))
            test = tests[0]
            cases = [updates(_decided(total, test, case)) for case in (1, 2)]
            return tirx.IfThenElse(substitute(test, fresh), *cases)

        def update(body: Any, acc: Any, lane: Any, mapping: Any) -> tirx.Stmt:
            def load(node: Any) -> Any:
                mine = node.source.same_as(self.store.buffer)
                return tirx.BufferLoad(acc, [lane]) if mine else node

            def store(node: Any) -> Any:
                same = dtype_of(node.value) == self.dtype
                return tirx.BufferStore(acc, node.value if same else node.value.value, [lane])

            body = map_expr(body, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
            return substitute(body, mapping)

        def write(acc: Any, lane: Any, mapping: Any) -> tirx.Stmt:
            index = [substitute(i, mapping) for i in self.store.indices]
            value = as_dtype(tirx.BufferLoad(acc, [lane]), self.store.buffer.ty.dtype)
            return tirx.BufferStore(self.store.buffer, value, index)

        held = (
            tirx.BufferLoad(self.store.buffer, self.store.indices)
            if self.updates
            else self.init.value
        )
        held = as_dtype(held, self.dtype)
        first = lanes_of(lambda acc, lane, m: tirx.BufferStore(acc, substitute(held, m), [lane]))
        inner = add_guards([substitute(x, fresh) for x in terms if shared(x)], updates(self.store))
        if cache is not None:
            prefetches = [
                ask
                for start, width in places
                for ask in rows_ahead(
                    self.func,
                    substitute(self.store, rows[0]),
                    self.others[-1].loop_var,
                    self.along.loop_var,
                    {**fresh, self.along.loop_var: start},
                    width,
                    cache,
                )  # fmt: skip
            ]
            inner = tirx.SeqStmt([*prefetches, inner]) if prefetches else inner
        *outer, last = self.others
        if rows[0] and _is_multiple(last, STRAIGHT):
            inner = _straight_steps(last, inner, fresh[last.loop_var])
        else:
            outer = self.others
        for loop in reversed(outer):
            extent = substitute(loop.extent, fresh)
            inner = loop_with(loop, loop_var=fresh[loop.loop_var], extent=extent, body=inner)
        body = tirx.SeqStmt([first, inner, lanes_of(write)])
        several = [*rows[0]] if len(rows) > 1 else []
        tests = [x for x in self.conditions if not any(_uses(x, v) for v in several)]
        if self.updates:
            some = [lp.extent > as_dtype(0, dtype_of(lp.extent)) for lp in self.others]
            tests = [tirx.all(*[x for x in some if not free_vars(x) & set(fresh)]), *tests]
        body = substitute(add_guards(tests, body), rows[0])
        body = self._outside(body)
        buffers = {r.source: r.source for r in [*self.block.reads, *self.block.writes]}
        widths = (str(width) for _, width in places)
        name = "_".join([f"{self.block.name_hint}_tile", *widths])
        block = s_tir.SBlock([], [], [], name, body, alloc_buffers=[acc for *_, acc in parts])
        reads, writes = s_tir.analysis.get_sblock_read_write_region(block, buffers)
        block = block_with(block, reads=reads, writes=writes)
        return s_tir.SBlockRealize([], True, block)


def _is_multiple(loop: Any, number: int) -> bool:
    """Whether a loop from 0 has a constant number of visits divisible by a number."""
    return (
        isinstance(loop.extent, tirx.IntImm)
        and is_zero(loop.min)
        and int(loop.extent) % number == 0
    )


def _straight_steps(loop: Any, body: Any, var: Any) -> tirx.Stmt:
    """The visits of a loop over a variable in unrolled steps."""
    dtype = dtype_of(var)
    step, one = tirx.Var(var.name, dtype), tirx.Var(var.name, dtype)
    body = substitute(body, {var: step * as_dtype(STRAIGHT, dtype) + one})
    body = loop_over(one, STRAIGHT, body, tirx.ForKind.UNROLLED)
    return loop_over(step, int(loop.extent) // STRAIGHT, body)


def _straight(loop: Any) -> tuple[list[Any], dict[Any, Any], Any]:
    """Perfectly nested loops, through blocks; and the last block, in terms of the loops.

    Also the kind of each in the block right inside: spatial, a reduction, or neither.
    """
    loops: list[Any] = []
    kinds: dict[Any, Any] = {}
    stmt = loop
    while True:
        here, stmt = nest_of(stmt)
        loops += here
        if not isinstance(stmt, s_tir.SBlockRealize):
            return loops, kinds, stmt
        block = stmt.block
        pairs = zip(block.iter_vars, stmt.iter_values, strict=True)
        kinds |= {x: v.iter_type for v, x in pairs if isinstance(x, ir.Var)}
        plain = isinstance(block.body, tirx.For) and block.init is None and is_one(stmt.predicate)
        if not plain or block.alloc_buffers or block.match_buffers:
            return loops, kinds, stmt
        stmt = substitute(block.body, values_of(stmt))


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, ir.Var) and isinstance(b, ir.Var) and a.same_as(b)


def _contiguous_in(var: Any, body: Any, gathers: bool, strided: Any = None) -> bool:
    """Whether every access that depends on `var` is contiguous along it by its last index only.

    gathers : whether loads may be indexed by loads that are contiguous
    strided : a buffer whose accesses may have any stride; None for none
    """
    conditions = [branch.condition for branch in nodes_of(tirx.IfThenElse, body)]
    accesses = [(x.buffer, x.indices) for x in stores_of(body)] + [
        (x.source, x.indices)
        for x in nodes_of(ir.TensorLoad, body)
        if not (gathers and any(isinstance(i, ir.TensorLoad) for i in x.indices))
    ]
    indices = [wide_indices(*x) for x in accesses if strided is None or not x[0].same_as(strided)]
    return not any(_uses(c, var) for c in conditions) and all(
        not any(_uses(i, var) for i in index[:-1])
        and (not index or is_offset_of(index[-1], var) or not _uses(index[-1], var))
        for index in indices
    )


def _first_choices(value: Any) -> list[Any]:
    """The conditions of choices that contain no other choice."""
    choices = [x for x in nodes_of(ir.Call, value) if is_choice(x)]
    inside = [y for x in choices for y in nodes_of(ir.Call, *x.args)]
    return [x.args[0] for x in choices if not any(x.same_as(y) for y in inside)]


def _decided(store: Any, test: Any, case: int) -> Any:
    """A store with the choices by a condition resolved.

    case : the index of the chosen value among their arguments
    """

    def visit(node: Any) -> Any:
        mine = is_choice(node) and structural_equal(node.args[0], test)
        return node.args[case] if mine else node

    return map_expr(store, [(ir.Call, visit)])


def _uses(expr: Any, var: Any) -> bool:
    return any(_same(v, var) for v in nodes_of(ir.Var, expr))


def _gathers(store: Any) -> bool:
    """Whether a store loads from another buffer at a loaded index."""
    return any(not x.source.same_as(store.buffer) for x in gathering_loads(store))


def _vectors_and_rest(
    loop: Any, lanes: int, again: bool, prefetches: Callable[[Any], list[tirx.Stmt]]
) -> tirx.Stmt:
    """Vectors of `lanes` lanes, and the remainder.

    again : whether elements may be stored twice: then the last vector begins earlier, and shorter
        loops use shorter vectors
    """
    dtype = dtype_of(loop.loop_var)
    width, name = as_dtype(lanes, dtype), loop.loop_var.name
    whole = tirx.floordiv(loop.extent, width)
    k0, rest = (tirx.Var(f"{name}_{suffix}", dtype) for suffix in (0, "rest"))

    def vector(start: Any, suffix: str = "") -> tirx.Stmt:
        k1 = tirx.Var(f"{name}_1", dtype)
        return loop_over(k1, width, _copy(loop, start + k1, suffix), tirx.ForKind.VECTORIZED)

    vectors = loop_over(k0, whole, as_one([*prefetches(k0 * width), vector(k0 * width)]))
    if isinstance(loop.extent, tirx.IntImm) and int(loop.extent) % lanes == 0:
        return vectors
    if not again:
        left = loop.extent - whole * width
        return tirx.SeqStmt(
            [vectors, loop_over(rest, left, _copy(loop, whole * width + rest, "_rest"))]
        )
    last = vector(loop.extent - width, "_last")
    if isinstance(loop.extent, tirx.IntImm):
        return tirx.SeqStmt([vectors, last])
    part = tirx.IfThenElse(whole * width < loop.extent, last, None)
    shorter = lanes // SHORTER
    if shorter > 1:
        copied = with_fresh(loop, {}, blocks=True)
        fewer = _vectors_and_rest(copied, shorter, again, lambda _: [])
    else:
        fewer = loop_over(rest, loop.extent, _copy(loop, rest, "_rest"))
    return tirx.IfThenElse(loop.extent >= width, tirx.SeqStmt([vectors, part]), fewer)


def _copy(loop: Any, value: Any, suffix: str) -> tirx.Stmt:
    """The loop's block at another value of its variable, with fresh variables."""
    copied = with_fresh(loop.body, {loop.loop_var: value}, blocks=True)
    block = block_with(copied.block, name_hint=copied.block.name_hint + suffix)
    return s_tir.SBlockRealize(copied.iter_values, copied.predicate, block)
