"""Products of tiles in shared memory, divided among the threads of a block, by TVM's `tensorize`.

A tensor intrinsic multiplies tiles of constant sizes. It replaces loops that `precompute` creates
for a result and both operands::

    for ii, k1, ji in T.grid(32, 128, 32):
        with T.sblock("reduce_rest0"):
            C_ws[ii, k1] += T.Cast("float32", A_ws[ii, ji]) * T.Cast("float32", B_ws[ji, k1])

Each thread keeps its sums at the start of the workspace. :func:`sums_by_thread` turns the loops
that set and read the workspace into loops over the sums of a thread.
Before, and after, with a workspace of 32 registers::

    for ii, k1 in T.grid(32, 128):
        with T.sblock("write0"): C[io * 32 + ii, k0 * 128 + k1] = C_ws[ii, k1]

    for u0, u1, u2, u3 in T.grid(2, 4, 2, 2):               # unrolled
        C[io * 32 + u0 * 16 + lane // 4 + u2 * 8, ...] = C_ws[u0 * 16 + u1 * 4 + u2 * 2 + u3]

Memory is written in sectors of 32 bytes, which the lanes of an instruction should fill. So lanes at
a distance may exchange half of their sums first (:class:`Exchanged`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NoReturn

from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from sparsetir.schedules.gpu.passes.fragments import Tile
from sparsetir.schedules.gpu.passes.tile_elements import from_lane
from sparsetir.schedules.passes.nests import (
    Nest,
    allocated,
    element_bytes,
    find_nest,
    for_threads,
    plain_nest,
    redirected,
    replaced,
    unrolled,
    with_buffer,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import accesses_of, buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.reduction import add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.tile_marks import conjuncts
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    cast,
    dtype_of,
    free_vars,
    loop_over,
    uncast,
    values_of,
)
from sparsetir.sparse_ir.traversal import map_expr


class Division:
    """A division of a tile's sums among threads.

    caller : the pass, for errors
    sizes : rows and columns of the tile
    warps : warps per thread block
    own : extents of loops over a thread's sums
    rows : which of these run over rows
    turned : whether the innermost of these runs down a column
    name : a name of the division with the sizes
    """

    caller: str
    sizes: tuple[int, int]
    warps: int
    own: list[int]
    rows: tuple[int, ...] = (0,)
    turned = False
    name: str

    def place(self, warp: Any, lane: Any, index: Sequence[Any]) -> Sequence[Any]:
        """Row and column of a thread's sum; index : the variables of the loops over its sums"""
        raise NotImplementedError

    def held(self, index: Sequence[Any]) -> list[Any]:
        """The index of a thread's sum in the workspace: the first ones, in the loops' order."""
        number, columns = number_of(index, self.own), as_dtype(self.sizes[1], "int32")
        return [tirx.floordiv(number, columns), tirx.floormod(number, columns)]

    def multiply(self, sums: Any, left: Tile, right: Tile, terms: int) -> Any:
        """The code by which threads compute the product, with separate registers for factors."""
        raise NotImplementedError

    def exchange(self, sums: Any, lane: Any) -> tuple[list[Any], Any]:
        """The statements that bring sums of other lanes, and the array that then holds a lane's."""
        del lane
        return [], sums

    def when_added(self) -> Division:
        """The division by which sums are added to memory, one by one."""
        return self

    def when_stored(self, item: int) -> Division:
        """The division by which pairs of sums are stored; item : bytes of each in memory."""
        del item
        return self


class Exchanged(Division):
    """A division after lanes at a distance have exchanged half of their sums.

    A bit of the place of a sum in its thread and a bit of its lane change places: `own` has a loop
    of two before the last one, over sums that came from two lanes, and the lowest bit of the
    variable of a loop before is that of the lane. For each two sums, all loops being unrolled::

        other[0] = __shfl_xor_sync(T.Select(upper, C_ws[first], C_ws[second]), distance)
        held[n] = T.Select(upper, other[0], C_ws[first])
        held[n + own[-1]] = T.Select(upper, C_ws[second], other[0])

    of : the division before
    loop : the number of the loop, of an even extent
    distance : a power of two, below the lanes of a warp; lanes with its bit are the upper ones
    rows : as for the division
    """

    def __init__(
        self, of: Division, loop: int, distance: int, rows: tuple[int, ...] = (0,)
    ) -> None:
        self.caller, self.sizes, self.warps, self.of = of.caller, of.sizes, of.warps, of
        self.loop, self.distance, self.rows = loop, distance, rows
        *outer, last = (n // 2 if k == loop else n for k, n in enumerate(of.own))
        self.own = [*outer, 2, last]

    def _before(self, index: Sequence[Any], bit: Any) -> list[Any]:
        """The index of a sum in the division before."""
        *outer, _, last = index
        return [x * 2 + bit if k == self.loop else x for k, x in enumerate([*outer, last])]

    def place(self, warp: Any, lane: Any, index: Sequence[Any]) -> Sequence[Any]:
        d = self.distance
        holder = lane // (2 * d) * (2 * d) + index[-2] * d + lane % d
        return self.of.place(warp, holder, self._before(index, lane // d % 2))

    def held(self, index: Sequence[Any]) -> list[Any]:
        return [number_of(index, self.own)]

    def exchange(self, sums: Any, lane: Any) -> tuple[list[Any], Any]:
        steps, sums = self.of.exchange(sums, lane)
        upper = tirx.EQ(lane // self.distance % 2, as_dtype(1, "int32"))
        other = buffer_var([1], dtype_of(sums), "other", "local")
        held = buffer_var([math.prod(self.own)], dtype_of(sums), "held", "local")
        got = tirx.BufferLoad(other, [as_dtype(0, "int32")])

        def pair(*index: Any) -> Any:
            *outer, last = index
            both = [[*outer, as_dtype(bit, "int32"), last] for bit in (0, 1)]
            first, second = (
                tirx.BufferLoad(sums, self.of.held(self._before(x, x[-2]))) for x in both
            )
            sent = from_lane(tirx.Select(upper, first, second), self.distance)
            kept = tirx.Select(upper, got, first), tirx.Select(upper, second, got)
            stores = [
                tirx.BufferStore(held, x, self.held(n)) for x, n in zip(kept, both, strict=True)
            ]
            return tirx.SeqStmt([tirx.BufferStore(other, sent, got.indices), *stores])

        *outer, _, last = self.own
        allocs = [tirx.AllocBuffer(other), tirx.AllocBuffer(held)]
        return [*steps, *allocs, unrolled([*outer, last], pair)], held


def number_of(index: Sequence[Any], extents: Sequence[int]) -> Any:
    """The number of a visit of loops, in their order."""
    number = as_dtype(0, "int32")
    for x, extent in zip(index, extents, strict=True):
        number = number * extent + as_dtype(x, "int32")
    return number


def intrinsic(
    division: Division, terms: int, dtypes: Sequence[str], along: Sequence[bool], sums: str
) -> str:
    """Register a tensor intrinsic that adds a product to sums in scope "local"; return its name.

    dtypes : types of the factors, in scope "shared"
    along : for the left and the right factor, whether neighbours in memory are along the sum
    sums : the type in which products are accumulated
    """
    name = f"{division.name}_{terms}_{'_'.join(dtypes)}_{'_'.join(map(str, along))}_{sums}"
    if s_tir.TensorIntrin.get(name, allow_missing=True) is not None:
        return name
    shapes = [(n, terms) if a else (terms, n) for n, a in zip(division.sizes, along, strict=True)]
    funcs = []
    makers: list[Any] = [partial(_described, sums), division.multiply]
    for of in makers:
        descriptions = zip("AB", shapes, dtypes, strict=True)
        factors = [_argument(x, shape, dtype, "shared") for x, shape, dtype in descriptions]
        total = _argument("C", division.sizes, _registers_of(sums), "local")
        reads, writes = [_all(b) for b in (total, *factors)], [_all(total)]
        tiles = [_tile(b, a) for b, a in zip(factors, along, strict=True)]
        block = s_tir.SBlock([], reads, writes, "root", of(total, *tiles, terms))
        func = tirx.PrimFunc([*factors, total], s_tir.SBlockRealize([], True, block))
        funcs.append(func.with_attr("s_tir", True))
    s_tir.TensorIntrin.register(name, *funcs)
    return name


def _registers_of(dtype: str) -> str:
    """The type of registers for sums: TVM's 32-bit integer ones are unsigned."""
    return {"int32": "uint32"}.get(dtype, dtype)


def _argument(name: str, shape: tuple[int, int], dtype: str, scope: str) -> Any:
    how: dict[str, Any] = {"strides": [tirx.Var(f"{name}_stride", "int32"), 1], "scope": scope}
    return tirx.decl_buffer(shape, dtype, name, offset_factor=1, layout=None, **how)


def _all(buffer: Any) -> Any:
    return tirx.BufferRegion(buffer, [ir.Range(0, n) for n in buffer.ty.shape])


def _tile(buffer: Any, along: bool) -> Tile:
    def element(place: Any, term: Any) -> Any:
        return tirx.BufferLoad(buffer, [place, term] if along else [term, place])

    return Tile(element, along, dtype_of(buffer))


def _described(wide: str, sums: Any, left: Tile, right: Tile, terms: int) -> Any:
    """The loops that an intrinsic replaces."""
    i, j, k = (tirx.Var(x, "int32") for x in "ijk")
    body = _added(sums, [i, j], left.element(i, k), right.element(j, k), wide)
    loops = zip((i, j, k), (*sums.ty.shape, terms), strict=True)
    return plain_nest("product", [*loops], body)


def _added(sums: Any, index: list[Any], left: Any, right: Any, wide: str) -> Any:
    total = cast(tirx.BufferLoad(sums, index), wide) + cast(left, wide) * cast(right, wide)
    return tirx.BufferStore(sums, cast(total, dtype_of(sums)), index)


def divided_product(
    caller: str,
    func: tirx.PrimFunc,
    reduce: str,
    steps: Sequence[str],
    make: Any,
    pairs: bool = False,
) -> tirx.PrimFunc:
    """A stage-II function with a product of tiles divided among threads.

    caller : the name of the pass, for errors
    reduce : block that adds products of two 2-dimensional tiles in shared memory to a third,
        in "local" scope; loops of constant extents over rows, columns and terms
    make : (rows, columns, types of the factors, type of the sums) -> division
    steps, pairs : see :func:`sums_by_thread`

    Raises ScheduleError for blocks of another form.
    """
    nest = find_nest(caller, func, reduce)
    sizes, reduction = nest.extents(caller), reduction_of(nest.body)
    sums = reduction is not None and reduction.operator == "sum" and not reduction.conditions
    term: Any = reduction.term if reduction is not None and sums and len(sizes) == 3 else None
    loads = [uncast(f) for f in (term.a, term.b)] if isinstance(term, tirx.Mul) else []
    if not loads or not all(isinstance(x, ir.TensorLoad) for x in loads):
        _refuse(caller, nest)
    rows, _, terms = (x.loop_var for x in nest.loops)
    left, right = loads if rows in free_vars(loads[0]) else loads[::-1]
    old, dtypes = nest.body.buffer, [dtype_of(left), dtype_of(right)]
    wide = dtype_of(old)
    division = make(sizes[0], sizes[1], dtypes, wide)
    along = [x.indices[-1].same_as(terms) for x in (left, right)]
    name, held = intrinsic(division, sizes[2], dtypes, along, wide), old
    if _registers_of(wide) != wide:
        held = buffer_var(old.ty.shape, _registers_of(wide), old.name, "local")
        func = with_buffer(func, old, held, list)
    body = _added(held, list(nest.body.indices), left, right, wide)
    plain = plain_nest(reduce, [(x.loop_var, x.extent) for x in nest.loops], body)
    sch = s_tir.Schedule(replaced(func, nest, plain))
    try:
        sch.tensorize(sch.get_loops(sch.get_sblock(reduce))[-3], name)
    except s_tir.ScheduleError:
        _refuse(caller, nest)
    return sums_by_thread(sch.mod["main"], steps, division, pairs)


def _refuse(caller: str, nest: Nest) -> NoReturn:
    raise ScheduleError(
        f"{caller}: argument 'reduce': expected X[..] = X[..] + A[..] * B[..] of A and B in shared "
        f"memory, in loops over rows, columns and terms, got {nest.body} in block '{nest.name}'"
    )


def sums_by_thread(
    func: tirx.PrimFunc, steps: Sequence[str], division: Division, pairs: bool = False
) -> tirx.PrimFunc:
    """A stage-II function whose steps around a tensorized product iterate over a thread's sums.

    steps : blocks of all accesses of the sums other than the product, in loops over their rows and
        columns: initialisation and write
    pairs : the last loop over a thread's sums becomes a vector in the write; the caller guarantees
        that these are contiguous in memory, aligned to their number, and that conditions hold for
        all or none

    Raises ScheduleError for steps of another form, and if one is missing.
    """
    lowered = s_tir.transform.LowerMatchBuffer()(ir.IRModule({"main": func}))
    func = lowered["main"]
    registers: list[Any] = []

    def opened(realize: Any) -> Any:
        """The threads' code, without the block of one visit that `tensorize` puts around it."""
        body = realize.block.body
        threads = isinstance(body, tirx.For) and body.thread_binding is not None
        if not threads or not realize.block.iter_vars:
            return realize
        registers.extend(x.buffer for x in nodes_of(tirx.AllocBuffer, body))
        none = [(tirx.AllocBuffer, lambda _: tirx.Evaluate(0))]
        return substitute(map_expr(body, none), values_of(realize))

    func = func.with_body(map_expr(func.body, [(s_tir.SBlockRealize, opened)]))
    nests = [find_nest(division.caller, func, step) for step in steps]
    bodies = [nest.body for nest in nests]
    used = {x.source for x in nodes_of(ir.TensorLoad, *bodies)}
    used |= {x.buffer for x in nodes_of(tirx.BufferStore, *bodies)}
    (sums,) = (b for b in used if b.ty.storage_scope == "local")
    for nest in nests:
        func = replaced(func, nest, _over_sums(nest, sums, division, pairs))
    straight = (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED)
    constants = {x.loop_var for x in nodes_of(tirx.For, func.body) if x.kind in straight}
    for left in accesses_of(func.body, sums):
        if any(free_vars(i) - constants for i in left.indices):
            raise ScheduleError(
                f"{division.caller}: argument 'steps': expected the blocks of all accesses of the "
                f"sums, got {left} in another"
            )
    new = buffer_var([math.prod(division.own)], dtype_of(sums), sums.name, "local")
    simplify, width = Analyzer().simplify, division.sizes[1]
    func = with_buffer(func, sums, new, lambda idx: [simplify(idx[0] * width + idx[1])])
    for buffer in registers:
        func = allocated(func, buffer)
    return func


def _over_sums(nest: Nest, sums: Any, division: Division, pairs: bool) -> Any:
    """A step over rows and columns, rewritten to one over a thread's sums."""
    accesses = accesses_of(nest.body, sums)
    indices = list(accesses[0].indices) if accesses else []
    loops = [x.loop_var for x in nest.loops]
    if len(loops) != 2 or set(loops) != set(indices):
        raise ScheduleError(
            f"{division.caller}: argument 'steps': expected loops over rows and columns of the "
            f"sums around block '{nest.name}', got {[v.name for v in loops]} around {indices}"
        )
    guards, written = split_guards(nest.body)
    conditions = [c for guard in guards for c in conjuncts(guard)]
    vector = False
    if not isinstance(written, tirx.BufferStore):
        division = division.when_added()
    elif pairs and not division.turned and not written.buffer.same_as(sums):
        division, vector = division.when_stored(element_bytes(written.buffer)), True

    def code(warp: Any, lane: Any) -> Any:
        steps, array = division.exchange(sums, lane)
        return as_one([*steps, of_lane(warp, lane, array)])

    def of_lane(warp: Any, lane: Any, array: Any) -> Any:
        def one(stmt: Any, *index: Any) -> Any:
            places = zip(indices, division.place(warp, lane, index), strict=True)
            values = {v: as_dtype(x, dtype_of(v)) for v, x in places}
            held = array, division.held(index)
            body = redirected(stmt, lambda b, _: held if b.same_as(sums) else None)
            return substitute(body, values)

        if not conditions and not vector:
            return unrolled(division.own, lambda *index: one(written, *index))
        row, column = indices
        on_row = [c for c in conditions if column not in free_vars(c)]
        on_column = [c for c in conditions if column in free_vars(c)]
        across = [k for k in range(len(division.own)) if k not in division.rows]
        extents, zero, first = [division.own[k] for k in across], as_dtype(0, "int32"), []
        if vector:  # along the last loop over columns; conditions are those of its first one
            extents, first = extents[:-1], [zero]

        def visit(stmt: Any, of_rows: Sequence[Any], of_columns: Sequence[Any]) -> Any:
            places = dict(zip((*division.rows, *across), (*of_rows, *of_columns), strict=True))
            return one(stmt, *(places[k] for k in range(len(places))))

        def stored(guards: list[Any]) -> Any:
            """All sums, by rows; guards : conditions on each column, or pair."""

            def of_row(*r: Any) -> Any:
                def each(*c: Any) -> Any:
                    inside = [visit(guard, r, [*c, *first]) for guard in guards]
                    if not vector:
                        return add_guards(inside, visit(written, r, c))
                    n = tirx.Var("pair", "int32")
                    both = visit(written, r, [*c, n])
                    both = loop_over(n, division.own[-1], both, tirx.ForKind.VECTORIZED)
                    return add_guards(inside, both)

                zeros = [zero] * len(across)
                return add_guards([visit(c, r, zeros) for c in on_row], unrolled(extents, each))

            return unrolled([division.own[k] for k in division.rows], of_row)

        if not on_column or any(row in free_vars(c) for c in on_column):
            return stored(on_column)
        # Stores under no condition of their own share the address of their row.
        zeros, every = [zero] * len(division.rows), product(*map(range, extents))
        places = [[*(as_dtype(x, "int32") for x in place), *first] for place in every]
        whole = [visit(c, zeros, place) for c in on_column for place in places]
        return tirx.IfThenElse(tirx.all(*whole), stored([]), stored(on_column))

    return for_threads(nest.name, division.warps, code)
