"""Tiles of a thread block, in its warps' registers, multiplied by tensor cores (GPU).

For a loop over thread blocks whose visits work on tiles of constant sizes: buffers in scope "local"
over two axes are tiles, over one axis per-row values. `owner` is the axis whose coordinates are
divided among the warps, 16 or a multiple each: a row of a tile lies in one warp, so that sums and
maxima over rows only need shuffles, and the result of a product is where the next one needs it (as
in FlashAttention-2). Before::

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

After, for each thread of 4 warps::

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
from typing import Any

from tvm import s_tir, tirx

from sparsetir.schedules.gpu.passes.cooperative_copy import cooperative_copy
from sparsetir.schedules.gpu.passes.fragments import (
    LEFT,
    RIGHT,
    SUMS,
    Tile,
    left_of_sums,
    load_left,
    load_right,
)
from sparsetir.schedules.gpu.passes.ptx import commit_copies, multiply, wait_for_copies
from sparsetir.schedules.gpu.passes.software_pipeline import (
    DYNAMIC_BYTES,
    MAX_SHARED,
    software_pipeline,
)
from sparsetir.schedules.gpu.passes.tile_elements import Elements
from sparsetir.schedules.gpu.passes.tile_parts import Factor, Loop, Nest, RegisterTile, Side
from sparsetir.schedules.gpu.passes.tile_programs import COLUMNS, NAME, ROWS, TileProgram
from sparsetir.schedules.passes.nests import block_of, for_threads, redirected, unrolled, with_block
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.tir import as_dtype, as_one, barrier, block_with, dtype_of, loop_over
from sparsetir.sparse_ir.traversal import map_expr

HALF_BYTES = 2


def warp_mma_program(
    func: tirx.PrimFunc, block: str, owner: str, warps: int = 4, stages: int = 2
) -> tirx.PrimFunc:
    """Map the tiles of a thread block to its warps.

    func : a stage-II function, which is not modified
    block : name of the block inside the loops over thread blocks
    owner : name of the axis whose coordinates are divided among warps
    warps : the most warps; fewer if there are not 16 coordinates for each
    stages : tiles of a loop's copies that are in shared memory at a time, 2 to 4

    Raises ScheduleError, which names the statement, unless each is a product of two factors, one
    of which may be a tile; a single element; a sum or maximum over each row; or a loop around such
    statements.
    """
    if stages not in (2, 3, 4):
        raise ScheduleError(f"{NAME}: argument 'stages': expected 2 to 4, got {stages!r}")
    if isinstance(warps, bool) or not isinstance(warps, int) or warps < 1:
        raise ScheduleError(f"{NAME}: argument 'warps': expected at least 1, got {warps!r}")
    return mapped(func, block, Code(TileProgram(func, block, owner, warps), stages))


def mapped(func: tirx.PrimFunc, block: str, work: Code) -> tirx.PrimFunc:
    """A function in which the code of threads replaces a block's tile program."""
    done, stages = work.run(), work.stages
    out = with_block(func, block, lambda _: done)
    for f in work.factors:
        out = cooperative_copy(out, f.copy, warps=work.warps, vector=f.vector())
    for loop in work.program.loops:
        copies = [f.copy for f in work.factors if f.step is loop]
        if copies:
            how = {"stages": stages, "room": DYNAMIC_BYTES, "shown": work.shown}
            out = software_pipeline(out, loop.name, copies, **how)
    (compiled,) = [b for b in nodes_of(s_tir.SBlock, out.body) if str(b.name_hint) == block]
    closed = work.closed(compiled)
    return with_block(out, block, lambda _: closed)


class Code:
    """The code of threads that replaces a tile program.

    shown : statements by which a thread shows its copies to more than ordinary loads
    align : bytes that the shared array is aligned to
    """

    shown: tuple[Any, ...] = ()
    align = 64

    def __init__(self, program: TileProgram, stages: int) -> None:
        self.program, self.rows, self.warps = program, program.rows, program.warps
        self.stages = stages
        self.block, self.dtype, self.factors = program.block, program.dtype, program.factors
        self.warp, self.lane = tirx.Var("warp", "int32"), tirx.Var("lane", "int32")
        self.elements = Elements(program, self.warp, self.lane)

    def run(self) -> Any:
        """The block, in which threads do everything but the copies to shared memory."""
        buffers = [
            *(f.shared for f in self.factors),
            *(t.registers for t in self.program.tiles.values()),
        ]
        allocs = [tirx.AllocBuffer(b) for b in [*buffers, *self.program.held.values()]]
        stay = [f for f in self.factors if f.step is None]
        first: list[Any] = [self._copied(f) for f in stay]
        if stay:
            first += [commit_copies(), wait_for_copies(0), *self.shown, barrier()]
        first += [self._by_threads("held", self._holding(*x)) for x in self.program.held.items()]
        body = tirx.SeqStmt([*allocs, *first, *self._code(self.program.tree)])
        return block_with(self.block, body=body, alloc_buffers=[])

    def closed(self, node: Any) -> Any:
        """The finished block: one loop over threads around everything, and one shared array.

        The array's last element is accessed: TVM shrinks arrays to the elements whose use it sees,
        and an instruction uses more than the one whose address it takes.
        """
        allocs = [s.buffer for s in node.body.seq if isinstance(s, tirx.AllocBuffer)]
        shared = [b for b in allocs if b.ty.storage_scope == "shared"]
        begins, size = self._begins(shared)
        scope = "shared" if size * HALF_BYTES <= MAX_SHARED else "shared.dyn"
        array = buffer_var([size], self.dtype, "factors", scope, align=self.align)

        def at(buffer: Any, indices: list[Any]) -> Any:
            if buffer not in begins:
                return None
            return array, [indices[0] + as_dtype(begins[buffer], "int32")]

        last = tirx.BufferLoad(array, [as_dtype(size - 1, "int32")])
        kept = [tirx.AllocBuffer(b) for b in [array, *(b for b in allocs if b not in begins)]]
        use = tirx.Evaluate(tirx.address_of(last))
        rest = tirx.SeqStmt([*kept, use, *node.body.seq[len(allocs) :]])
        body = redirected(rest, at)

        def code(warp: Any, lane: Any) -> Any:
            of_thread = {"threadIdx.x": lane, "threadIdx.y": warp}

            def visit(loop: Any) -> Any:
                if loop.thread_binding is None:
                    return loop
                tag = str(loop.thread_binding.thread_tag)
                return substitute(loop.body, {loop.loop_var: of_thread[tag]})

            return map_expr(body, [(tirx.For, visit)])

        return block_with(node, body=for_threads(f"{node.name_hint}_tiles", self.warps, code))

    def _begins(self, shared: list[Any]) -> tuple[dict[Any, int], int]:
        """The place of each array in the one that holds them all, and the size of that.

        A factor that is only loaded to registers, before the loops, lies where the last stage of
        another is: copies to that begin behind a barrier of the loop.
        """
        read = [x for sides in self.program.sides.values() for x in sides if isinstance(x, Side)]
        in_loops = {x.factor.shared.name for x in read if x not in self.program.held}
        staged = {f.shared.name for f in self.factors if f.step is not None}
        begins: dict[Any, int] = {}
        last_stages: list[tuple[int, int]] = []  # places and sizes
        size = 0
        for array in sorted(shared, key=lambda b: b.name not in staged):
            length = int(array.ty.shape[0])
            fitting = [r for r in last_stages if r[1] >= length and array.name not in in_loops]
            begins[array] = fitting[0][0] if fitting else size
            if fitting:
                last_stages.remove(fitting[0])
                continue
            size += length
            if array.name in staged:
                last_stages.append((size - length // self.stages, length // self.stages))
        return begins, size

    def _by_threads(self, name: str, stmt: Any) -> Any:
        """A statement in terms of warp and lane, for all of them."""

        def code(warp: Any, lane: Any) -> Any:
            return substitute(stmt, {self.warp: warp, self.lane: lane})

        return for_threads(name, self.warps, code)

    def _holding(self, side: Side, held: Any) -> Any:
        """Load a whole left factor."""
        f = side.factor
        depth, groups = (f.columns if side.along else f.rows) // COLUMNS, self.rows // ROWS

        def load(s: Any, g: Any) -> Any:
            return self._loaded(side, s, g, some(held, (s * groups + g) * LEFT, LEFT))

        return unrolled([depth, groups], load)

    def _copied(self, f: Factor) -> Any:
        """The nest that copies a factor."""
        dtype = str(f.shared.ty.dtype)
        value = f.value if dtype_of(f.value) == dtype else tirx.Cast(dtype, f.value)
        row, column = (tirx.Var(v.name, dtype_of(v)) for v in (f.row, f.column))
        value = substitute(value, {f.row: row, f.column: column})
        body: Any = block_of(f.copy, tirx.BufferStore(f.shared, value, f.at(row, column)))
        return loop_over(row, f.rows, loop_over(column, f.columns, body))

    def _code(self, tree: list[Any]) -> Iterator[Any]:
        """The statements that replace these."""
        for s in tree:
            if isinstance(s, Loop):
                copies = [self._copied(f) for f in self.factors if f.step is s]
                work = list(self._code(s.body))
                if s.parts is not None:
                    inside = block_of(f"{s.name}_part", as_one(work))
                    work = [loop_over(s.parts.var, s.parts.count, inside)]
                body = as_one([*copies, *work])
                yield loop_over(s.var, s.extent, block_of(s.name, body))
            elif not any(x.buffer in self.program.inlined for _, x in s.stores):
                code = self.multiplied(s) if id(s) in self.program.sides else self.elements.code(s)
                for n, part in enumerate(code):
                    yield self._by_threads(s.name if n == 0 else f"{s.name}_{n}", part)

    def multiplied(self, nest: Nest) -> Iterator[Any]:
        """Products of 16 x 16 by 16 x 8 for all groups of rows and columns of a tile."""
        left, right = self.program.sides[id(nest)]
        _, store = nest.stores[0]
        tile = self.program.tiles[store.buffer]
        if nest.init is not None:
            loops = [(v, n) for v, n in nest.loops if v not in nest.reduced]
            init = Nest(nest.name, loops, [], None, [(None, nest.init)], nest.cut)
            yield from self.elements.code(init)
        (k,) = nest.reduced
        depth, begin = nest.extents[k] // COLUMNS, nest.first(k)
        across = nest.first(store.indices[1 - tile.owner])
        groups, pairs = self.rows // ROWS, tile.columns // COLUMNS
        held = self.program.held.get(left) if isinstance(left, Side) else None
        a = buffer_var([groups * LEFT], "uint32", self.program.name("left"), "local")
        a = a if held is None else held
        b = buffer_var([2 * RIGHT], "uint32", self.program.name("right"), "local")

        def step(s: Any) -> Any:
            first = s * (groups * LEFT) if held is not None else 0

            def columns(p: Any) -> Any:
                to = some(b, 0, 2 * RIGHT)
                origin = across + p * COLUMNS, begin + s * COLUMNS
                load = load_right(to, _tile(right), *origin, self.lane)

                def product(half: Any, g: Any) -> Any:
                    sums = some(tile.registers, (g * pairs * 2 + p * 2 + half) * SUMS, SUMS)
                    factors = some(a, first + g * LEFT, LEFT), some(b, half * RIGHT, RIGHT)
                    return multiply(self.dtype, sums, *factors)

                return tirx.SeqStmt([load, unrolled([2, groups], product)])

            products = unrolled([pairs], columns)
            if held is not None:
                return products
            loads = unrolled([groups], lambda g: self._left(left, s, g, a))
            return tirx.SeqStmt([loads, products])

        allocs = [tirx.AllocBuffer(x) for x in ([b] if held is not None else [a, b])]
        yield tirx.SeqStmt([*allocs, unrolled([depth], step)])

    def _left(self, left: RegisterTile | Side, s: Any, g: Any, a: Any) -> Any:
        """Load the left factor's 16 x 16 numbers of a step, for a group of rows."""
        registers = some(a, g * LEFT, LEFT)
        if isinstance(left, Side):
            return self._loaded(left, s, g, registers)
        first = (g * (left.columns // 8) + s * 2) * SUMS
        low, high = (some(left.registers, first + n, SUMS) for n in (0, SUMS))
        return left_of_sums(registers, low, high, self.dtype)

    def _loaded(self, left: Side, s: Any, g: Any, registers: list[Any]) -> Any:
        row = self.warp * self.rows + g * ROWS
        return load_left(registers, _tile(left), row, s * COLUMNS, self.lane)


def _tile(side: Side) -> Tile:
    """A side of a product, in the form that instructions load."""
    f, along = side

    def element(place: Any, depth: Any) -> Any:
        return tirx.BufferLoad(f.shared, f.at(*(place, depth) if along else (depth, place)))

    return Tile(element, along, dtype_of(f.shared))


def some(buffer: Any, first: Any, many: int) -> list[Any]:
    """Consecutive elements of a buffer."""
    return [tirx.BufferLoad(buffer, [as_dtype(first + i, "int32")]) for i in range(many)]
