"""The parser of tile programs for :mod:`sparsetir.schedules.gpu.passes.warp_mma_program`.

It determines the kind of each statement of a block: a product, elements, sums over rows, or a loop
around such; the buffers that are register tiles; and the factors that are in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir.schedules.gpu.passes.ptx import PRODUCTS
from sparsetir.schedules.gpu.passes.tile_parts import (
    PANEL,
    Factor,
    Loop,
    Nest,
    RegisterTile,
    Side,
    find_parts,
    stride_of,
)
from sparsetir.schedules.passes.nests import WARP
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, loads_of, nodes_of, substitute
from sparsetir.sparse_ir.position_space import LAYOUTS
from sparsetir.sparse_ir.reduction import factors_of, reduction_of
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars, nest_of, values_of
from sparsetir.sparse_ir.traversal import map_expr

NAME = "warp_mma_program"
ROWS = COLUMNS = 16  # of the product of two instructions
REGISTERS = 208  # per thread, for tiles and factors; the rest is for everything else


class TileProgram:
    """The tile program of a block; swizzled : whether its factors are in panels for `wgmma`."""

    def __init__(
        self, func: Any, block: str, owner: str, warps: int, swizzled: bool = False
    ) -> None:
        blocks = [b for b in nodes_of(s_tir.SBlock, func.body) if str(b.name_hint) == block]
        if not blocks:
            raise ScheduleError(f"{NAME}: argument 'block': no block '{block}'")
        self.swizzled = swizzled
        self.layouts = {str(k): v for k, v in func.attrs[LAYOUTS].items()}
        self.block, self.owner = blocks[0], owner
        self.tree = list(self._parsed(self.block.body))
        self.rows = self._owned(warps)
        self.tiles = self._tiles()
        self.inlined = self._inlined()
        self._in_parts()
        self.loops: list[Loop] = []
        self.factors: list[Factor] = []
        self.sides: dict[int, tuple[RegisterTile | Side, Side]] = {}
        self.held: dict[Side, Any] = {}  # left factors kept in registers
        self.named = 0
        self._collect(self.tree, None)
        dtypes = {str(f.shared.ty.dtype) for f in self.factors}
        if len(dtypes) != 1:
            raise ScheduleError(
                f"{NAME}: block '{block}': expected factors of one type, float16 or "
                f"bfloat16, got {sorted(dtypes) or 'no products'}"
            )
        (self.dtype,) = dtypes

    # -- parsing --------------------------------------------------------------------------------

    def _parsed(self, stmt: Any) -> Iterator[Any]:
        """The statements of a body, as nests and loops."""
        if isinstance(stmt, tirx.SeqStmt):
            for s in stmt.seq:
                yield from self._parsed(s)
            return
        nest, inner = nest_of(stmt)
        loops = [(loop.loop_var, loop.extent) for loop in nest]
        if not isinstance(inner, s_tir.SBlockRealize):
            self.refuse(stmt)
        block = inner.block
        values = {v: as_dtype(x, dtype_of(v)) for v, x in values_of(inner).items()}
        stores = list(self._stores(substitute(block.body, values)))
        if None not in stores and all(isinstance(n, tirx.IntImm) for _, n in loops):
            kinds = {values[v.var]: v.iter_type for v in block.iter_vars}
            reduced = [v for v, _ in loops if kinds.get(v) == tirx.IterVar.CommReduce]
            init = None if block.init is None else substitute(block.init, values)
            name = str(block.name_hint)
            yield Nest(name, [(v, int(n)) for v, n in loops], reduced, init, stores)
        elif len(loops) == 1 and block.init is None:
            body = list(self._parsed(substitute(block.body, values)))
            ((var, extent),) = loops
            yield Loop(str(block.name_hint), var, extent, body)
        else:
            self.refuse(stmt)

    def _stores(self, stmt: Any, condition: Any = None) -> Iterator[Any]:
        """(condition, store) of each store; None for another statement."""
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

    def refuse(self, stmt: Any) -> NoReturn:
        """Refuse a statement."""
        raise ScheduleError(
            f"{NAME}: block '{self.block.name_hint}': expected products, elements, sums over rows "
            f"and loops around these, got\n{stmt}"
        )

    def _locals(self) -> list[Any]:
        blocks = [self.block, *nodes_of(s_tir.SBlock, self.block.body)]
        allocated = [v for b in blocks for v in b.alloc_buffers]
        return [v for v in allocated if v.ty.storage_scope == "local"]

    def _axes(self, buffer: Any) -> list[str]:
        return [str(a.name) for a in self.layouts[buffer.name].axes]

    def _owned(self, warps: int) -> int:
        """The number of coordinates per warp."""
        lengths = {
            int(n)
            for b in self._locals()
            for a, n in zip(self._axes(b), b.ty.shape, strict=True)
            if a == self.owner
        }
        if len(lengths) != 1 or next(iter(lengths)) % ROWS:
            owned = sorted(lengths) or "none of its tiles is over it"
            raise ScheduleError(
                f"{NAME}: argument 'owner': expected an axis of a multiple of {ROWS} coordinates, "
                f"got '{self.owner}' ({owned})"
            )
        groups = next(iter(lengths)) // ROWS
        self.warps = max(w for w in range(1, warps + 1) if groups % w == 0)
        return groups // self.warps * ROWS

    def _tiles(self) -> dict[Any, RegisterTile]:
        """The register tiles, by buffer."""
        out = {}
        for buffer in self._locals():
            axes = self._axes(buffer)
            if self.owner not in axes or len(axes) > 2:
                raise ScheduleError(
                    f"{NAME}: expected tiles of one or two axes, '{self.owner}' among them, got "
                    f"'{buffer.name}' over {axes}"
                )
            owner_at = axes.index(self.owner)
            columns = int(buffer.ty.shape[1 - owner_at]) if len(axes) == 2 else 0
            if columns % COLUMNS:
                raise ScheduleError(
                    f"{NAME}: expected tiles of a multiple of {COLUMNS} columns, got {columns} of "
                    f"'{buffer.name}'"
                )
            size = self.rows * columns // WARP if columns else self.rows // 8
            name = f"{buffer.name}_tile"
            registers = buffer_var([size], dtype_of(buffer), name, "local")
            out[buffer] = RegisterTile(buffer, owner_at, columns, registers)
        return out

    def _in_parts(self) -> None:
        """Execute the statements of a loop in parts if their tiles exceed the registers."""
        for loop in [s for s in self.tree if isinstance(s, Loop)]:
            outside = self._nests([s for s in self.tree if s is not loop])
            tiles, loop.parts = find_parts(loop, outside, self.tiles, COLUMNS)
            for tile in tiles:
                count = loop.parts.count if loop.parts else 1
                size = int(tile.registers.ty.shape[0]) // count
                old, tile.columns = tile.registers, tile.columns // count
                tile.registers = buffer_var([size], dtype_of(old), old.name, "local")

    def _nests(self, tree: list[Any] | None = None) -> Iterator[Nest]:
        for s in self.tree if tree is None else tree:
            if isinstance(s, Loop):
                yield from self._nests(s.body)
            else:
                yield s

    def _inlined(self) -> dict[Any, tuple[list[Any], Any]]:
        """Tiles that only hold a factor of products: (coordinates, value) of each.

        Only values that no thread has written, so that all warps can compute them together.
        """
        out = {}
        nests = list(self._nests())
        for buffer in self.tiles:
            stores = [
                (nest, s) for nest in nests for _, s in nest.stores if s.buffer.same_as(buffer)
            ]
            others = [n for n in nests if any(loads_of(s, buffer) for _, s in n.stores)]
            if len(stores) != 1 or not others or any(self.product(n) is None for n in others):
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

    def product(self, nest: Nest) -> tuple[Any, list[Any]] | None:
        """The tile that a nest adds a product to, and the factors; None for another nest."""
        if len(nest.stores) != 1 or len(nest.loops) != 3 or len(nest.reduced) != 1:
            return None
        condition, store = nest.stores[0]
        tile = self.tiles.get(store.buffer)
        if condition is not None or tile is None or not tile.columns:
            return None
        reduction = reduction_of(store)
        if not isinstance(store.value, tirx.Add) or reduction is None:
            return None
        return tile, factors_of(reduction.term)

    def _collect(self, tree: list[Any], step: Any) -> None:
        """Collect the factors to keep in shared memory, and where they are copied."""
        for s in tree:
            if isinstance(s, Loop):
                if step is not None:
                    raise ScheduleError(
                        f"{NAME}: expected no loops in others, got that of block '{s.name}' in "
                        f"that of '{step.name}'"
                    )
                self.loops.append(s)
                self._collect(s.body, s)
                continue
            product = self.product(s)
            if product is None:
                continue
            tile, factors = product
            left, right = self._sides(s, tile, factors, step)
            self.sides[id(s)] = left, right
            if step is not None and isinstance(left, Side) and left.factor.step is None:
                self._hold(left)

    def _hold(self, side: Side) -> None:
        """Keep a left factor that each step of a loop uses in registers, if there are enough."""
        f = side.factor
        count = f.rows * f.columns // self.warps // WARP // 2
        kept = [*(t.registers for t in self.tiles.values()), *self.held.values()]
        room = REGISTERS - sum(int(b.ty.shape[0]) for b in kept)
        if side not in self.held and count <= room:
            self.held[side] = buffer_var([count], "uint32", self.name("held"), "local")

    def _sides(
        self, nest: Nest, tile: RegisterTile, factors: list[Any], step: Any
    ) -> tuple[RegisterTile | Side, Side]:
        """The factors of a product: the left one, possibly a tile, and the right one."""
        _, store = nest.stores[0]
        (k,) = nest.reduced
        m, n = (store.indices[i] for i in (tile.owner, 1 - tile.owner))
        sides: tuple[list[Any], list[Any]] = ([], [])
        for factor in map(self._with_inlined, factors):
            used = free_vars(factor) & {m, n, k}
            sides[n in used].append(factor)
        if not all(sides):
            self.refuse(store)
        (left, right), extents = sides, dict(nest.loops)
        held: Any = left[0] if len(left) == 1 else None
        if isinstance(held, ir.TensorLoad) and held.source in self.tiles:
            reg = self.tiles[held.source]
            if held.indices[reg.owner].same_as(m) and held.indices[1 - reg.owner].same_as(k):
                return reg, self._factor(right, n, k, extents, step)
        return self._factor(left, m, k, extents, step), self._factor(right, n, k, extents, step)

    def _with_inlined(self, expr: Any) -> Any:
        def load(node: Any) -> Any:
            if node.source not in self.inlined:
                return node
            indices, value = self.inlined[node.source]
            return substitute(value, dict(zip(indices, node.indices, strict=True)))

        return map_expr(expr, [(ir.TensorLoad, load)])

    def _factor(self, parts: list[Any], x: Any, k: Any, extents: Any, step: Any) -> Side:
        """A tile over x and k, in memory order: neighbours in a row."""
        value = parts[0]
        for part in parts[1:]:
            value = value * part
        if any(loads_of(value, t) for t in self.tiles):
            self.refuse(value)
        half = {dtype_of(n) for n in nodes_of(ir.TensorLoad, value)} & set(PRODUCTS)
        if len(half) != 1:
            raise ScheduleError(
                f"{NAME}: expected factors that are loaded in float16 or bfloat16, got {value}"
            )
        (dtype,) = half
        loads = [n for n in nodes_of(ir.TensorLoad, value) if dtype_of(n) == dtype]
        inner = k if any(k in free_vars(n.indices[-1]) for n in loads) else x
        outer = x if inner is k else k
        if extents[x] % COLUMNS or extents[k] % COLUMNS:
            raise ScheduleError(
                f"{NAME}: expected extents that are multiples of {COLUMNS}, got "
                f"{extents[x]} and {extents[k]} of {value}"
            )
        while isinstance(value, tirx.Cast) and dtype_of(value.value) == dtype:
            value = value.value
        if step is not None and step.var not in free_vars(value):
            step = None
        for factor in self.factors:
            same = {factor.row: outer, factor.column: inner}
            if (
                (factor.rows, factor.columns) == (extents[outer], extents[inner])
                and factor.step is step
                and tvm_ffi.structural_equal(substitute(factor.value, same), value)
            ):
                return Side(factor, inner is k)
        row, column = (tirx.Var(x, dtype_of(v)) for x, v in (("row", outer), ("column", inner)))
        name = self.name(f"{loads[0].source.name}_shared")
        shape = extents[outer], extents[inner]
        if self.swizzled and shape[1] % PANEL:
            raise ScheduleError(
                f"{NAME}: expected factors whose rows in memory are a multiple of {PANEL} numbers, "
                f"got {shape[1]} of {value}"
            )
        size = shape[0] * (shape[1] if self.swizzled else stride_of(shape[1]))
        shared = buffer_var([size], dtype, name, "shared", align=64)
        value = substitute(value, {outer: row, inner: column})
        copy = f"{name}_copy"
        out = Factor(row, column, *shape, value, step, shared, copy, self.swizzled)
        self.factors.append(out)
        return Side(out, inner is k)

    def name(self, prefix: str) -> str:
        self.named += 1
        return f"{prefix}{self.named}"
