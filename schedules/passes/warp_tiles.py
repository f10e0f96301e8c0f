"""Tiles of a block of threads, in the registers of its warps, multiplied by tensor cores (GPU).

For a loop over blocks of threads whose visits work on tiles of constant sizes: buffers in scope
"local" over two axes are tiles, over one axis numbers for each row. `owner` is the axis whose
coordinates the warps share out, 16 or a multiple of them each: a row of a tile lies in one warp, so
that sums and maxima over rows need shuffles alone, and what a product gives is where the next one
wants it (as in FlashAttention-2). Before::

    for io in range(rows):  # of blocks of threads
        with T.sblock("rows0"):
            for jo in range(JO_indptr[io + 1] - JO_indptr[io]):
                with T.sblock("keys0"):
                    for ii, ji, f in T.grid(64, 64, 64):
                        SCORE[ii, ji] += Q[io * 64 + ii, f] * K[J[io, jo] * 64 + ji, f]
                    for ii, ji in T.grid(64, 64):
                        TOP[ii] = T.max(TOP[ii], SCORE[ii, ji])
                    for ii, w, ji in T.grid(64, 64, 64):
                        TOTAL[ii, w] += SCORE[ii, ji] * V[J[io, jo] * 64 + ji, w]

After, for each of the threads of 4 warps::

    copy Q's rows to shared memory; load them to registers
    for jo in range(...):
        copy K's and V's rows to shared memory, some blocks ahead
        SCORE_tile[..] = mma(Q's registers, K's, SCORE_tile)
        TOP_tile[..] = T.max(TOP_tile[..], SCORE_tile[..]), and of the other lanes of a row
        TOTAL_tile[..] = mma(SCORE_tile rounded to 16 bits, V's registers, TOTAL_tile)

Factors of products are rounded to the 16-bit type that they are loaded in; sums are in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.copy_together import copy_together
from sparsetir.schedules.passes.fragments import (
    LEFT,
    RIGHT,
    SUMS,
    Tile,
    left_of_sums,
    load_left,
    load_right,
    place_of_sum,
)
from sparsetir.schedules.passes.nests import (
    WARP,
    block_of,
    for_threads,
    is_choice,
    is_zero,
    unrolled,
)
from sparsetir.schedules.passes.ptx import (
    PRODUCTS,
    barrier,
    commit_copies,
    multiply,
    wait_for_copies,
)
from sparsetir.schedules.passes.software_pipeline import MAX_SHARED, software_pipeline
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    buffer_var,
    loads_of,
    map_expr,
    nodes_of,
    same_indices,
    substitute,
)
from sparsetir.sparse_ir.position_space import LAYOUTS, as_dtype, dtype_of
from sparsetir.sparse_ir.statements import as_one, block_with, loop_over
from sparsetir.sparse_ir.translate import free_vars

__all__ = ["in_warp_tiles"]

WHO = "in_warp_tiles"
ROWS = COLUMNS = 16  # of what two instructions multiply
VECTOR = 8  # 16-bit numbers in 16 bytes
HALF_BYTES = 2
STATIC_BYTES = MAX_SHARED
DYNAMIC_BYTES = 163 * 1024  # at most, on sm_80
QUAD = 4  # lanes that have a row of a tile


def in_warp_tiles(
    func: tirx.PrimFunc, block: str, owner: str, warps: int = 4, stages: int = 2
) -> tirx.PrimFunc:
    """Let warps work on the tiles of a block.

    func : a stage-II function; the one given is left as it is
    block : name of the block, which loops over blocks of threads are around
    owner : name of the axis whose coordinates are shared out
    warps : at most; fewer where there are not 16 coordinates for each
    stages : tiles that are in shared memory at a time, of those that a loop copies, 2 to 4

    Raises ScheduleError for statements that are none of these, and names them: a product of two
    factors, of which one may be a tile; an element by itself; a sum or maximum over each row; a
    loop around such statements.
    """
    if stages not in (2, 3, 4):
        raise ScheduleError(f"{WHO}: argument 'stages': expected 2 to 4, got {stages!r}")
    found = [b for b in nodes_of(s_tir.SBlock, func.body) if str(b.name_hint) == block]
    if not found:
        raise ScheduleError(f"{WHO}: argument 'block': no block '{block}'")
    work = _Tiling(func, found[0], owner, warps)
    out = _with_block(func, work.run())
    for f in work.factors:
        out = copy_together(out, f.copy, warps=work.warps, vector=VECTOR if f.plain() else 1)
    for loop in work.loops:
        copies = [f.copy for f in work.factors if f.step is loop]
        if copies:
            out = software_pipeline(out, loop.name, copies, stages=stages, room=DYNAMIC_BYTES)
    (made,) = [b for b in nodes_of(s_tir.SBlock, out.body) if str(b.name_hint) == block]
    return _with_block(out, work.closed(made))


def _with_block(func: tirx.PrimFunc, block: Any) -> tirx.PrimFunc:
    """The function with a block for that of its name."""

    def visit(node: Any) -> Any:
        return block if str(node.name_hint) == str(block.name_hint) else node

    return func.with_body(map_expr(func.body, [(s_tir.SBlock, visit)]))


@dataclass(eq=False)
class _Nest:
    """Loops of constant extents around stores.

    loops : (variable, extent), outermost first
    reduced : variables of these that are reduced over
    init : what the result begins with
    stores : (condition or None, store)
    """

    name: str
    loops: list[tuple[Any, int]]
    reduced: list[Any]
    init: Any
    stores: list[tuple[Any, Any]]


@dataclass(eq=False)
class _Loop:
    """A loop of any extent around statements; name : of the block in it."""

    name: str
    var: Any
    extent: Any
    body: list[Any]


@dataclass(eq=False)
class _Tile:
    """A buffer that is kept in registers.

    owner : which of its dimensions is shared out; columns : extent of the other, 0 without one
    """

    buffer: Any
    owner: int
    columns: int
    registers: Any


@dataclass(eq=False)
class _Factor:
    """A tile of numbers in shared memory.

    value : in terms of `row` and `column`
    step : the loop that it is copied in; None for one that stays
    shared : the buffer; copy : name of the block that fills it
    """

    row: Any
    column: Any
    rows: int
    columns: int
    value: Any
    step: Any
    shared: Any
    copy: str

    def at(self, row: Any, column: Any) -> list[Any]:
        """The index of an element. One: TVM takes places out that it sees unused."""
        return [as_dtype(row, "int32") * self.stride + as_dtype(column, "int32")]

    @property
    def stride(self) -> int:
        """Of rows: an odd number of 16 bytes, so that 8 rows begin in different banks."""
        return _stride(self.columns)

    def plain(self) -> bool:
        """Whether rows are copied as they are, 16 bytes at a time."""
        condition, source = _guarded(self.value)
        if source is None or self.columns % VECTOR:
            return False
        *outer, last = source.indices
        others = [*outer] if condition is None else [*outer, condition]
        if any(self.column in free_vars(x) for x in others) or not last.same_as(self.column):
            return False
        length = source.source.ty.shape[-1]
        return isinstance(length, tirx.IntImm) and int(length) % VECTOR == 0


class _Side(NamedTuple):
    """A factor of one product; along : whether its rows lie along the sum."""

    factor: _Factor
    along: bool


class _Tiling:
    def __init__(self, func: Any, block: Any, owner: str, warps: int) -> None:
        self.layouts = {str(k): v for k, v in func.attrs[LAYOUTS].items()}
        self.block, self.owner = block, owner
        self.tree = list(self._parsed(block.body))
        self.rows = self._owned(warps)
        self.tiles = self._tiles()
        self.warp, self.lane = tirx.Var("warp", "int32"), tirx.Var("lane", "int32")
        self.inlined = self._inlined()
        self.loops: list[_Loop] = []
        self.factors: list[_Factor] = []
        self.sides: dict[int, tuple[_Tile | _Side, _Side]] = {}
        self.held: dict[_Side, Any] = {}  # left factors that stay, in registers
        self.named = 0
        self._collect(self.tree, None)
        dtypes = {str(f.shared.ty.dtype) for f in self.factors}
        if len(dtypes) != 1:
            raise ScheduleError(
                f"{WHO}: block '{block.name_hint}': expected factors of one type, float16 or "
                f"bfloat16, got {sorted(dtypes) or 'no products'}"
            )
        (self.dtype,) = dtypes

    # -- reading what there is ------------------------------------------------------------------

    def _parsed(self, stmt: Any) -> Iterator[Any]:
        """The statements of a body, as nests and loops."""
        if isinstance(stmt, tirx.SeqStmt):
            for s in stmt.seq:
                yield from self._parsed(s)
            return
        loops, inner = [], stmt
        while isinstance(inner, tirx.For):
            loops.append((inner.loop_var, inner.extent))
            inner = inner.body
        if not isinstance(inner, s_tir.SBlockRealize):
            self._refuse(stmt)
        block = inner.block
        at = {
            v.var: as_dtype(x, dtype_of(v.var))
            for v, x in zip(block.iter_vars, inner.iter_values, strict=True)
        }
        stores = list(self._stores(substitute(block.body, at)))
        if None not in stores and all(isinstance(n, tirx.IntImm) for _, n in loops):
            kinds = {at[v.var]: v.iter_type for v in block.iter_vars}
            reduced = [v for v, _ in loops if kinds.get(v) == tirx.IterVar.CommReduce]
            init = None if block.init is None else substitute(block.init, at)
            name = str(block.name_hint)
            yield _Nest(name, [(v, int(n)) for v, n in loops], reduced, init, stores)
        elif len(loops) == 1 and block.init is None:
            body = list(self._parsed(substitute(block.body, at)))
            yield _Loop(str(block.name_hint), *loops[0], body)
        else:
            self._refuse(stmt)

    def _stores(self, stmt: Any, condition: Any = None) -> Iterator[Any]:
        """(condition, store) of each; None for another statement."""
        if isinstance(stmt, tirx.SeqStmt):
            for s in stmt.seq:
                yield from self._stores(s, condition)
        elif isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
            both = stmt.condition if condition is None else tirx.And(condition, stmt.condition)
            yield from self._stores(stmt.then_case, both)
        elif isinstance(stmt, tirx.BufferStore):
            yield condition, stmt
        else:
            yield None

    def _refuse(self, stmt: Any) -> Any:
        raise ScheduleError(
            f"{WHO}: block '{self.block.name_hint}': expected products, elements, sums over rows "
            f"and loops around these, got\n{stmt}"
        )

    def _locals(self) -> list[Any]:
        blocks = [self.block, *nodes_of(s_tir.SBlock, self.block.body)]
        found = [v for b in blocks for v in b.alloc_buffers]
        return [v for v in found if v.ty.storage_scope == "local"]

    def _axes(self, buffer: Any) -> list[str]:
        return [str(a.name) for a in self.layouts[buffer.name].axes]

    def _owned(self, warps: int) -> int:
        """Coordinates that each warp has."""
        found = {
            int(n)
            for b in self._locals()
            for a, n in zip(self._axes(b), b.ty.shape, strict=True)
            if a == self.owner
        }
        if len(found) != 1 or next(iter(found)) % ROWS:
            got = sorted(found) or "none of its tiles is over it"
            raise ScheduleError(
                f"{WHO}: argument 'owner': expected an axis of a multiple of {ROWS} coordinates, "
                f"got '{self.owner}' ({got})"
            )
        groups = next(iter(found)) // ROWS
        self.warps = max(w for w in range(1, warps + 1) if groups % w == 0)
        return groups // self.warps * ROWS

    def _tiles(self) -> dict[Any, _Tile]:
        """What is in registers, by the buffer."""
        out = {}
        for buffer in self._locals():
            axes = self._axes(buffer)
            if self.owner not in axes or len(axes) > 2:
                raise ScheduleError(
                    f"{WHO}: expected tiles of one or two axes, '{self.owner}' among them, got "
                    f"'{buffer.name}' over {axes}"
                )
            at = axes.index(self.owner)
            columns = int(buffer.ty.shape[1 - at]) if len(axes) == 2 else 0
            if columns % COLUMNS:
                raise ScheduleError(
                    f"{WHO}: expected tiles of a multiple of {COLUMNS} columns, got {columns} of "
                    f"'{buffer.name}'"
                )
            size = self.rows * columns // WARP if columns else self.rows // 8
            name = f"{buffer.name}_tile"
            registers = buffer_var([size], _dtype(buffer), name, "local")
            out[buffer] = _Tile(buffer, at, columns, registers)
        return out

    def _nests(self, tree: list[Any] | None = None) -> Iterator[_Nest]:
        for s in self.tree if tree is None else tree:
            if isinstance(s, _Loop):
                yield from self._nests(s.body)
            else:
                yield s

    def _inlined(self) -> dict[Any, tuple[list[Any], Any]]:
        """Tiles that hold a factor of products and nothing else: (coordinates, value) of each.

        Of what no thread has written, so that all warps can compute it together.
        """
        out = {}
        nests = list(self._nests())
        for buffer in self.tiles:
            stores = [
                (nest, s) for nest in nests for _, s in nest.stores if s.buffer.same_as(buffer)
            ]
            others = [n for n in nests if any(loads_of(s, buffer) for _, s in n.stores)]
            if len(stores) != 1 or not others or any(self._product(n) is None for n in others):
                continue
            ((nest, store),) = stores
            plain = len(nest.stores) == 1 and not nest.reduced and nest.stores[0][0] is None
            local = any(loads_of(store.value, t) for t in self.tiles)
            if plain and not local:
                out[buffer] = (list(store.indices), store.value)
        for buffer in out:
            del self.tiles[buffer]
        return out

    # -- products -------------------------------------------------------------------------------

    def _product(self, nest: _Nest) -> tuple[Any, list[Any]] | None:
        """The tile that a nest adds a product to, and the factors; None for another nest."""
        if len(nest.stores) != 1 or len(nest.loops) != 3 or len(nest.reduced) != 1:
            return None
        condition, store = nest.stores[0]
        tile = self.tiles.get(store.buffer)
        if condition is not None or tile is None or not tile.columns:
            return None
        if not isinstance(store.value, tirx.Add) or not _is_load(store.value.a, store):
            return None
        return tile, list(_factors(store.value.b))

    # -- code -----------------------------------------------------------------------------------

    def run(self) -> Any:
        """The block, in which threads do all but the copies to shared memory."""
        buffers = [*(f.shared for f in self.factors), *(t.registers for t in self.tiles.values())]
        allocs = [tirx.AllocBuffer(b) for b in [*buffers, *self.held.values()]]
        stay = [f for f in self.factors if f.step is None]
        first: list[Any] = [self._copied(f) for f in stay]
        if stay:
            first += [commit_copies(), wait_for_copies(0), barrier()]
        first += [self._by_threads("held", self._holding(*x)) for x in self.held.items()]
        body = tirx.SeqStmt([*allocs, *first, *self._code(self.tree)])
        return block_with(self.block, body=body, alloc_buffers=[])

    def closed(self, node: Any) -> Any:
        """The finished block: one loop over threads around all, and one array in shared memory.

        The array's last element is used: TVM makes arrays as small as the elements which it sees
        used, and an instruction uses more than the one whose address it takes.
        """
        allocs = [s.buffer for s in node.body.seq if isinstance(s, tirx.AllocBuffer)]
        shared = [b for b in allocs if b.ty.storage_scope == "shared"]
        sizes = [int(b.ty.shape[0]) for b in shared]
        begins = {b: sum(sizes[:n]) for n, b in enumerate(shared)}
        scope = "shared" if sum(sizes) * HALF_BYTES <= STATIC_BYTES else "shared.dyn"
        array = buffer_var([sum(sizes)], self.dtype, "factors", scope, align=64)

        def at(buffer: Any, indices: Any) -> list[Any]:
            return [indices[0] + as_dtype(begins[buffer], "int32")]

        def load(x: Any) -> Any:
            return tirx.BufferLoad(array, at(x.source, x.indices)) if x.source in begins else x

        def store(x: Any) -> Any:
            if x.buffer not in begins:
                return x
            return tirx.BufferStore(array, x.value, at(x.buffer, x.indices))

        last = tirx.BufferLoad(array, [as_dtype(sum(sizes) - 1, "int32")])
        kept = [tirx.AllocBuffer(b) for b in [array, *(b for b in allocs if b not in begins)]]
        use = tirx.Evaluate(tirx.address_of(last))
        rest = tirx.SeqStmt([*kept, use, *node.body.seq[len(allocs) :]])
        body = map_expr(rest, [(ir.TensorLoad, load), (tirx.BufferStore, store)])

        def code(warp: Any, lane: Any) -> Any:
            of_thread = {"threadIdx.x": lane, "threadIdx.y": warp}

            def visit(loop: Any) -> Any:
                if loop.thread_binding is None:
                    return loop
                tag = str(loop.thread_binding.thread_tag)
                return substitute(loop.body, {loop.loop_var: of_thread[tag]})

            return map_expr(body, [(tirx.For, visit)])

        return block_with(node, body=for_threads(f"{node.name_hint}_tiles", self.warps, code))

    def _by_threads(self, name: str, stmt: Any) -> Any:
        """A statement in terms of warp and lane, for all of them."""

        def code(warp: Any, lane: Any) -> Any:
            return substitute(stmt, {self.warp: warp, self.lane: lane})

        return for_threads(name, self.warps, code)

    def _holding(self, side: _Side, held: Any) -> Any:
        """Load all of a left factor."""
        f = side.factor
        depth, groups = (f.columns if side.along else f.rows) // COLUMNS, self.rows // ROWS

        def load(s: Any, g: Any) -> Any:
            return self._loaded(side, s, g, _some(held, (s * groups + g) * LEFT, LEFT))

        return unrolled([depth, groups], load)

    def _collect(self, tree: list[Any], step: Any) -> None:
        """Find the factors that are to be in shared memory, and where they are copied."""
        for s in tree:
            if isinstance(s, _Loop):
                if step is not None:
                    raise ScheduleError(
                        f"{WHO}: expected no loops in others, got that of block '{s.name}' in "
                        f"that of '{step.name}'"
                    )
                self.loops.append(s)
                self._collect(s.body, s)
                continue
            product = self._product(s)
            if product is None:
                continue
            tile, found = product
            left, right = self._sides(s, tile, found, step)
            self.sides[id(s)] = left, right
            if step is not None and isinstance(left, _Side) and left.factor.step is None:
                self._hold(left)

    def _hold(self, side: _Side) -> None:
        """Keep a left factor that is used in each step of a loop in registers."""
        if side not in self.held:
            f = side.factor
            count = f.rows * f.columns // self.warps // WARP // 2
            self.held[side] = buffer_var([count], "uint32", self._name("held"), "local")

    def _sides(
        self, nest: _Nest, tile: _Tile, factors: list[Any], step: Any
    ) -> tuple[_Tile | _Side, _Side]:
        """What to multiply: the left factor, which may be a tile, and the right one."""
        _, store = nest.stores[0]
        (k,) = nest.reduced
        m, n = (store.indices[i] for i in (tile.owner, 1 - tile.owner))
        sides: tuple[list[Any], list[Any]] = ([], [])
        for factor in map(self._with_inlined, factors):
            used = free_vars(factor) & {m, n, k}
            sides[n in used].append(factor)
        if not all(sides):
            self._refuse(store)
        (left, right), extents = sides, dict(nest.loops)
        held = left[0] if len(left) == 1 else None
        if isinstance(held, ir.TensorLoad) and held.source in self.tiles:
            own = self.tiles[held.source]
            if held.indices[own.owner].same_as(m) and held.indices[1 - own.owner].same_as(k):
                return own, self._factor(right, n, k, extents, step)
        return self._factor(left, m, k, extents, step), self._factor(right, n, k, extents, step)

    def _with_inlined(self, expr: Any) -> Any:
        def load(node: Any) -> Any:
            if node.source not in self.inlined:
                return node
            indices, value = self.inlined[node.source]
            return substitute(value, dict(zip(indices, node.indices, strict=True)))

        return map_expr(expr, [(ir.TensorLoad, load)])

    def _factor(self, parts: list[Any], x: Any, k: Any, extents: Any, step: Any) -> _Side:
        """A tile over x and k, as it is found in memory: neighbours in a row."""
        value = parts[0]
        for part in parts[1:]:
            value = value * part
        if any(loads_of(value, t) for t in self.tiles):
            self._refuse(value)
        half = {dtype_of(n) for n in nodes_of(ir.TensorLoad, value)} & set(PRODUCTS)
        if len(half) != 1:
            raise ScheduleError(
                f"{WHO}: expected factors that are loaded in float16 or bfloat16, got {value}"
            )
        (dtype,) = half
        loads = [n for n in nodes_of(ir.TensorLoad, value) if dtype_of(n) == dtype]
        inner = k if any(k in free_vars(n.indices[-1]) for n in loads) else x
        outer = x if inner is k else k
        if extents[x] % COLUMNS or extents[k] % COLUMNS:
            raise ScheduleError(
                f"{WHO}: expected extents that are multiples of {COLUMNS}, got "
                f"{extents[x]} and {extents[k]} of {value}"
            )
        while isinstance(value, tirx.Cast) and dtype_of(value.value) == dtype:
            value = value.value
        if step is not None and step.var not in free_vars(value):
            step = None
        for known in self.factors:
            same = {known.row: outer, known.column: inner}
            if (
                (known.rows, known.columns) == (extents[outer], extents[inner])
                and known.step is step
                and tvm_ffi.structural_equal(substitute(known.value, same), value)
            ):
                return _Side(known, inner is k)
        row, column = (tirx.Var(x, dtype_of(v)) for x, v in (("row", outer), ("column", inner)))
        name = self._name(f"{loads[0].source.name}_shared")
        shape = extents[outer], extents[inner]
        size = shape[0] * _stride(shape[1])
        shared = buffer_var([size], dtype, name, "shared", align=64)
        value = substitute(value, {outer: row, inner: column})
        out = _Factor(row, column, *shape, value, step, shared, f"{name}_copy")
        self.factors.append(out)
        return _Side(out, inner is k)

    def _copied(self, f: _Factor) -> Any:
        """The nest that copies a factor."""
        dtype = str(f.shared.ty.dtype)
        value = f.value if dtype_of(f.value) == dtype else tirx.Cast(dtype, f.value)
        row, column = (tirx.Var(v.name, dtype_of(v)) for v in (f.row, f.column))
        value = substitute(value, {f.row: row, f.column: column})
        body: Any = block_of(f.copy, tirx.BufferStore(f.shared, value, f.at(row, column)))
        return loop_over(row, f.rows, loop_over(column, f.columns, body))

    def _code(self, tree: list[Any]) -> Iterator[Any]:
        """The statements in the place of these."""
        for s in tree:
            if isinstance(s, _Loop):
                copies = [self._copied(f) for f in self.factors if f.step is s]
                body = as_one([*copies, *self._code(s.body)])
                yield loop_over(s.var, s.extent, block_of(s.name, body))
            elif not any(x.buffer in self.inlined for _, x in s.stores):
                made = self._multiplied(s) if id(s) in self.sides else self._elementwise(s)
                for n, part in enumerate(made):
                    yield self._by_threads(s.name if n == 0 else f"{s.name}_{n}", part)

    def _multiplied(self, nest: _Nest) -> Iterator[Any]:
        """Products of 16 x 16 by 16 x 8 for all groups of rows and columns of a tile."""
        left, right = self.sides[id(nest)]
        _, store = nest.stores[0]
        tile = self.tiles[store.buffer]
        if nest.init is not None:
            loops = [(v, n) for v, n in nest.loops if v not in nest.reduced]
            yield from self._elementwise(_Nest(nest.name, loops, [], None, [(None, nest.init)]))
        depth = dict(nest.loops)[nest.reduced[0]] // COLUMNS
        groups, pairs = self.rows // ROWS, tile.columns // COLUMNS
        held = self.held.get(left) if isinstance(left, _Side) else None
        a = buffer_var([groups * LEFT], "uint32", self._name("left"), "local")
        a = a if held is None else held
        b = buffer_var([2 * RIGHT], "uint32", self._name("right"), "local")

        def step(s: Any) -> Any:
            first = s * (groups * LEFT) if held is not None else 0

            def columns(p: Any) -> Any:
                to = _some(b, 0, 2 * RIGHT)
                load = load_right(to, _tile(right), p * COLUMNS, s * COLUMNS, self.lane)

                def product(half: Any, g: Any) -> Any:
                    sums = _some(tile.registers, (g * pairs * 2 + p * 2 + half) * SUMS, SUMS)
                    factors = _some(a, first + g * LEFT, LEFT), _some(b, half * RIGHT, RIGHT)
                    return multiply(self.dtype, sums, *factors)

                return tirx.SeqStmt([load, unrolled([2, groups], product)])

            products = unrolled([pairs], columns)
            if held is not None:
                return products
            loads = unrolled([groups], lambda g: self._left(left, s, g, a))
            return tirx.SeqStmt([loads, products])

        allocs = [tirx.AllocBuffer(x) for x in ([b] if held is not None else [a, b])]
        yield tirx.SeqStmt([*allocs, unrolled([depth], step)])

    def _name(self, what: str) -> str:
        self.named += 1
        return f"{what}{self.named}"

    def _left(self, left: _Tile | _Side, s: Any, g: Any, a: Any) -> Any:
        """Load the left factor's 16 x 16 numbers of a step, for a group of rows."""
        registers = _some(a, g * LEFT, LEFT)
        if isinstance(left, _Side):
            return self._loaded(left, s, g, registers)
        first = (g * (left.columns // 8) + s * 2) * SUMS
        both = (_some(left.registers, first + n, SUMS) for n in (0, SUMS))
        return left_of_sums(registers, *both, self.dtype)

    def _loaded(self, left: _Side, s: Any, g: Any, registers: list[Any]) -> Any:
        row = self.warp * self.rows + g * ROWS
        return load_left(registers, _tile(left), row, s * COLUMNS, self.lane)

    # -- elements -------------------------------------------------------------------------------

    def _elementwise(self, nest: _Nest) -> Iterator[Any]:
        """Each lane's elements of a tile, or numbers of rows, or sums over rows."""
        if nest.init is not None or nest.reduced:
            yield from self._over_rows(nest)
            return
        for condition, store in nest.stores:
            m, n = self._coordinates(nest, store)
            if {v for v, _ in nest.loops} - {m, n}:
                self._refuse(store)
            yield self._each(m, n, dict(nest.loops), condition, store)

    def _coordinates(self, nest: _Nest, store: Any) -> tuple[Any, Any]:
        """The variables of the owner and of the columns (None for numbers of rows)."""
        accesses = [*nodes_of(ir.TensorLoad, store.value)]
        found = [(x.source, x.indices) for x in accesses] + [(store.buffer, store.indices)]
        owners = {idx[self.tiles[b].owner] for b, idx in found if b in self.tiles}
        loops = [v for v, _ in nest.loops]
        if len(owners) != 1 or not owners <= set(loops) or len(loops) > 2:
            self._refuse(store)
        (m,) = owners
        others = [v for v in loops if not v.same_as(m)]
        return m, (others[0] if others else None)

    def _each(self, m: Any, n: Any, extents: Any, condition: Any, store: Any) -> Any:
        """A store for each of a lane's elements."""
        groups = self.rows // ROWS
        inside = store.buffer in self.tiles
        if n is None:

            def row(g: Any, r: Any) -> Any:
                out = self._stored(store, {m: self._row(g, r)}, (g, None, r, None), condition)
                first = tirx.EQ(tirx.floormod(self.lane, QUAD), as_dtype(0, "int32"))
                return out if inside else tirx.IfThenElse(first, out, None)

            return unrolled([groups, 2], row)
        if extents[n] % 8:
            self._refuse(store)
        count = extents[n] // 8
        side_by_side = not inside and self._neighbours(store, n, condition)

        def element(g: Any, t: Any, r: Any, c: Any) -> Any:
            places = {m: self._row(g, r), n: self._column(t, c)}
            return self._stored(store, places, (g, t, r, c), condition)

        def pair(g: Any, t: Any, r: Any) -> Any:
            c = tirx.Var("pair", "int32")
            both = self._stored(
                store, {m: self._row(g, r), n: self._column(t, c)}, (g, t, r, c), None
            )
            out = loop_over(c, 2, both, tirx.ForKind.VECTORIZED)
            if condition is None:
                return out
            at = {m: as_dtype(self._row(g, r), dtype_of(m))}
            return tirx.IfThenElse(substitute(condition, at), out, None)

        if side_by_side:
            return unrolled([groups, count, 2], pair)
        return unrolled([groups, count, 2, 2], element)

    def _neighbours(self, store: Any, n: Any, condition: Any) -> bool:
        """Whether two columns are side by side in memory, at an even place."""
        *outer, last = store.indices
        length = store.buffer.ty.shape[-1]
        return (
            last.same_as(n)
            and not any(n in free_vars(i) for i in outer)
            and (condition is None or n not in free_vars(condition))
            and isinstance(length, tirx.IntImm)
            and int(length) % 2 == 0
        )

    def _row(self, g: Any, r: Any) -> Any:
        return self.warp * self.rows + g * ROWS + place_of_sum(self.lane, r * 2)[0]

    def _column(self, t: Any, c: Any) -> Any:
        return t * 8 + place_of_sum(self.lane, c)[1]

    def _stored(self, store: Any, places: Any, at: Any, condition: Any) -> Any:
        """A store to one of a lane's elements."""
        value = self._held_at(store.value, at)
        target, indices = store.buffer, list(store.indices)
        if target in self.tiles:
            target, indices = self.tiles[target].registers, [self._number(self.tiles[target], at)]
        out = tirx.BufferStore(target, value, indices)
        if condition is not None:
            out = tirx.IfThenElse(self._held_at(condition, at), out, None)
        return substitute(out, {v: as_dtype(x, dtype_of(v)) for v, x in places.items()})

    def _held_at(self, expr: Any, at: Any) -> Any:
        """An expression of one of a lane's elements."""

        def load(node: Any) -> Any:
            tile = self.tiles.get(node.source)
            if tile is None:
                return node
            return tirx.BufferLoad(tile.registers, [self._number(tile, at)])

        return map_expr(expr, [(ir.TensorLoad, load)])

    def _number(self, tile: _Tile, at: Any) -> Any:
        """Which of a lane's numbers of a tile it is."""
        g, t, r, c = at
        if not tile.columns:
            return as_dtype(g * 2 + r, "int32")
        return as_dtype((g * (tile.columns // 8) + t) * SUMS + r * 2 + c, "int32")

    def _over_rows(self, nest: _Nest) -> Iterator[Any]:
        """Sums, maxima or minima over the columns of each row."""
        if len(nest.stores) != 1 or len(nest.reduced) != 1 or len(nest.loops) != 2:
            self._refuse(nest.stores[0][1])
        condition, store = nest.stores[0]
        tile = self.tiles.get(store.buffer)
        if tile is None or tile.columns or condition is not None:
            self._refuse(store)
        m, n = self._coordinates(nest, store)
        combine, term = _reduction(store)
        if combine is None or not n.same_as(nest.reduced[0]):
            self._refuse(store)
        if nest.init is not None:
            extents = {v: x for v, x in nest.loops if v.same_as(m)}
            yield self._each(m, None, extents, None, nest.init)
        groups, terms = self.rows // ROWS, dict(nest.loops)[n] // QUAD
        part = buffer_var([groups * 2], _dtype(store.buffer), self._name("part"), "local")

        def place(g: Any, r: Any) -> list[Any]:
            return [as_dtype(g * 2 + r, "int32")]

        def own(g: Any, r: Any, number: Any) -> Any:
            """The lane's term of this number."""
            t, c = tirx.floordiv(number, 2), tirx.floormod(number, 2)
            places = {m: self._row(g, r), n: self._column(t, c)}
            places = {v: as_dtype(x, dtype_of(v)) for v, x in places.items()}
            return substitute(self._held_at(term, (g, t, r, c)), places)

        def row(g: Any, r: Any) -> Any:
            at = place(g, r)
            held = tirx.BufferLoad(part, at)
            out = [tirx.BufferStore(part, own(g, r, as_dtype(0, "int32")), at)]

            def more(j: Any) -> Any:
                return tirx.BufferStore(part, combine(held, own(g, r, j + 1)), at)

            out.append(unrolled([terms - 1], more))
            for distance in (1, 2):
                other = _from_lane(held, distance)
                out.append(tirx.BufferStore(part, combine(held, other), at))
            so_far = tirx.BufferLoad(tile.registers, at)
            out.append(tirx.BufferStore(tile.registers, combine(so_far, held), at))
            return tirx.SeqStmt(out)

        yield tirx.SeqStmt([tirx.AllocBuffer(part), unrolled([groups, 2], row)])


def _tile(side: _Side) -> Tile:
    """A side of a product, as instructions load it."""
    f, along = side

    def element(place: Any, depth: Any) -> Any:
        return tirx.BufferLoad(f.shared, f.at(*(place, depth) if along else (depth, place)))

    return Tile(element, along, _dtype(f.shared))


def _stride(columns: int) -> int:
    return columns if columns // VECTOR % 2 else columns + VECTOR


def _dtype(buffer: Any) -> str:
    return str(buffer.ty.dtype)


def _some(buffer: Any, first: Any, many: int) -> list[Any]:
    """Elements of a buffer that follow each other."""
    return [tirx.BufferLoad(buffer, [as_dtype(first + i, "int32")]) for i in range(many)]


def _is_load(expr: Any, store: Any) -> bool:
    """Whether an expression is what a store overwrites."""
    return (
        isinstance(expr, ir.TensorLoad)
        and expr.source.same_as(store.buffer)
        and same_indices(expr.indices, store.indices)
    )


def _factors(expr: Any) -> Iterator[Any]:
    """The factors of a product, without casts to a wider type around products."""
    if isinstance(expr, tirx.Mul):
        yield from _factors(expr.a)
        yield from _factors(expr.b)
    else:
        yield expr


def _guarded(value: Any) -> tuple[Any, Any]:
    """(condition or None, load) of a load that is zero without the condition; (None, None)."""
    condition = None
    if is_choice(value) and is_zero(value.args[2]):
        condition, value, _ = value.args
    return (condition, value) if isinstance(value, ir.TensorLoad) else (None, None)


def _reduction(store: Any) -> tuple[Any, Any]:
    """(how two are combined, the term) of an update of a row's number; (None, None)."""
    value = store.value
    if isinstance(value, tirx.Add | tirx.Max | tirx.Min):
        kind = type(value)
        for mine, term in ((value.a, value.b), (value.b, value.a)):
            if _is_load(mine, store):
                return (lambda x, y: kind(x, y)), term
    return None, None


def _from_lane(value: Any, distance: int) -> Any:
    """What the lane at a distance has, of all lanes of a warp."""
    mask = tirx.const(0xFFFFFFFF, "uint32")
    lanes = [as_dtype(distance, "int32"), as_dtype(WARP, "int32")]
    return tirx.call_extern(dtype_of(value), "__shfl_xor_sync", mask, value, *lanes)
