"""Elements of register tiles, and sums over their rows, computed by each lane for its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.fragments import SUMS, place_of_sum
from sparsetir.schedules.gpu.passes.ptx import exponential
from sparsetir.schedules.gpu.passes.tile_parts import Nest, RegisterTile
from sparsetir.schedules.gpu.passes.tile_programs import ROWS, TileProgram
from sparsetir.schedules.passes.nests import WARP, unrolled
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, loop_over
from sparsetir.sparse_ir.traversal import map_expr

QUAD = 4  # lanes that share a row of a tile


class Elements:
    """The statements of a program that compute single elements, or sums over rows."""

    def __init__(self, program: TileProgram, warp: Any, lane: Any) -> None:
        self.program, self.warp, self.lane = program, warp, lane
        self.rows, self.tiles = program.rows, program.tiles

    def code(self, nest: Nest) -> Iterator[Any]:
        """The code for a lane's elements of a tile, or per-row values, or sums over rows."""
        if nest.init is not None or nest.reduced:
            yield from self._over_rows(nest)
            return
        for condition, store in nest.stores:
            m, n = self._coordinates(nest, store)
            if {v for v, _ in nest.loops} - {m, n}:
                self.program.refuse(store)
            yield self._each(m, n, nest, condition, store)

    def _coordinates(self, nest: Nest, store: Any) -> tuple[Any, Any]:
        """The variables of the owner and of the columns (None for per-row values)."""
        accesses = [*nodes_of(ir.TensorLoad, store.value)]
        indexed = [(x.source, x.indices) for x in accesses] + [(store.buffer, store.indices)]
        owners = {idx[self.tiles[b].owner] for b, idx in indexed if b in self.tiles}
        loops = [v for v, _ in nest.loops]
        if len(owners) != 1 or not owners <= set(loops) or len(loops) > 2:
            self.program.refuse(store)
        (m,) = owners
        others = [v for v in loops if not v.same_as(m)]
        return m, (others[0] if others else None)

    def _each(self, m: Any, n: Any, nest: Nest, condition: Any, store: Any) -> Any:
        """A store for each of a lane's elements."""
        if condition is not None and not free_vars(condition) & {m, n}:
            return tirx.IfThenElse(condition, self._each(m, n, nest, None, store), None)
        extents = nest.extents
        groups = self.rows // ROWS
        inside = store.buffer in self.tiles
        if n is None:

            def row(g: Any, r: Any) -> Any:
                out = self._stored(store, {m: self._row(g, r)}, (g, None, r, None), condition)
                first = tirx.EQ(tirx.floormod(self.lane, QUAD), as_dtype(0, "int32"))
                return out if inside else tirx.IfThenElse(first, out, None)

            return unrolled([groups, 2], row)
        if extents[n] % 8:
            self.program.refuse(store)
        count = extents[n] // 8
        side_by_side = not inside and self._neighbours(store, n, condition)

        def element(g: Any, t: Any, r: Any, c: Any) -> Any:
            places = {m: self._row(g, r), n: nest.first(n) + self._column(t, c)}
            return self._stored(store, places, (g, t, r, c), condition)

        def pair(g: Any, t: Any, r: Any) -> Any:
            c = tirx.Var("pair", "int32")
            places = {m: self._row(g, r), n: nest.first(n) + self._column(t, c)}
            both = self._stored(store, places, (g, t, r, c), None)
            out = loop_over(c, 2, both, tirx.ForKind.VECTORIZED)
            if condition is None:
                return out
            row_of = {m: as_dtype(self._row(g, r), dtype_of(m))}
            return tirx.IfThenElse(substitute(condition, row_of), out, None)

        if side_by_side:
            return unrolled([groups, count, 2], pair)
        return unrolled([groups, count, 2, 2], element)

    def _neighbours(self, store: Any, n: Any, condition: Any) -> bool:
        """Whether two columns are adjacent in memory, the first at an even index."""
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
            target, indices = (self.tiles[target].registers, [self._number(self.tiles[target], at)])
        out = tirx.BufferStore(target, value, indices)
        if condition is not None:
            out = tirx.IfThenElse(self._held_at(condition, at), out, None)
        return substitute(out, {v: as_dtype(x, dtype_of(v)) for v, x in places.items()})

    def _held_at(self, expr: Any, index: Any) -> Any:
        """An expression evaluated for one of a lane's elements."""

        def load(node: Any) -> Any:
            tile = self.tiles.get(node.source)
            if tile is None:
                return node
            return tirx.BufferLoad(tile.registers, [self._number(tile, index)])

        def call(node: Any) -> Any:
            is_exp = isinstance(node.op, ir.Op) and node.op.name == "tirx.exp"
            return exponential(*node.args) if is_exp and dtype_of(node) == "float32" else node

        return map_expr(expr, [(ir.TensorLoad, load), (ir.Call, call)])

    def _number(self, tile: RegisterTile, index: Any) -> Any:
        """The index of a value among those that a lane holds of a tile."""
        g, t, r, c = index
        if not tile.columns:
            return as_dtype(g * 2 + r, "int32")
        return as_dtype((g * (tile.columns // 8) + t) * SUMS + r * 2 + c, "int32")

    def _over_rows(self, nest: Nest) -> Iterator[Any]:
        """Sums, maxima or minima over the columns of each row."""
        if len(nest.stores) != 1 or len(nest.reduced) != 1 or len(nest.loops) != 2:
            self.program.refuse(nest.stores[0][1])
        condition, store = nest.stores[0]
        tile: Any = self.tiles.get(store.buffer)
        if tile is None or tile.columns or condition is not None:
            self.program.refuse(store)
        m, n = self._coordinates(nest, store)
        plain = isinstance(store.value, tirx.Add | tirx.Max | tirx.Min)
        reduction = reduction_of(store) if plain else None
        if reduction is None or not n.same_as(nest.reduced[0]):
            self.program.refuse(store)
        combine, term = reduction.combine, reduction.term
        if nest.init is not None:
            yield self._each(m, None, nest, None, nest.init)
        groups, terms = self.rows // ROWS, nest.extents[n] // QUAD
        dtype = dtype_of(store.buffer)
        part = buffer_var([groups * 2], dtype, self.program.name("part"), "local")

        def place(g: Any, r: Any) -> list[Any]:
            return [as_dtype(g * 2 + r, "int32")]

        def own(g: Any, r: Any, number: Any) -> Any:
            """The lane's term of this number."""
            t, c = tirx.floordiv(number, 2), tirx.floormod(number, 2)
            places = {m: self._row(g, r), n: self._column(t, c)}
            places = {v: as_dtype(x, dtype_of(v)) for v, x in places.items()}
            return substitute(self._held_at(term, (g, t, r, c)), places)

        def row(g: Any, r: Any) -> Any:
            index = place(g, r)
            held = tirx.BufferLoad(part, index)
            out = [tirx.BufferStore(part, own(g, r, as_dtype(0, "int32")), index)]

            def more(j: Any) -> Any:
                return tirx.BufferStore(part, combine(held, own(g, r, j + 1)), index)

            out.append(unrolled([terms - 1], more))
            for distance in (1, 2):
                other = from_lane(held, distance)
                out.append(tirx.BufferStore(part, combine(held, other), index))
            so_far = tirx.BufferLoad(tile.registers, index)
            out.append(tirx.BufferStore(tile.registers, combine(so_far, held), index))
            return tirx.SeqStmt(out)

        yield tirx.SeqStmt([tirx.AllocBuffer(part), unrolled([groups, 2], row)])


def from_lane(value: Any, distance: int) -> Any:
    """The value of the lane at a distance, in all lanes of a warp."""
    mask = tirx.const(0xFFFFFFFF, "uint32")
    lanes = [as_dtype(distance, "int32"), as_dtype(WARP, "int32")]
    return tirx.call_extern(dtype_of(value), "__shfl_xor_sync", mask, value, *lanes)
