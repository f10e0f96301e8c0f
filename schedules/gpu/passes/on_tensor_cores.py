"""Products of tiles in shared memory on tensor cores, with sums in registers.

Before, nests as `precompute` makes them of a result and of both operands::

    for ii, k1 in T.grid(32, 128):
        with T.sblock("start0"): C_ws[ii, k1] = 0.0
    ...
        for ii, k1, ji in T.grid(32, 128, 32):
            with T.sblock("reduce_rest0"):
                C_ws[ii, k1] += T.Cast("float32", A_ws[ii, ji]) * T.Cast("float32", B_ws[ji, k1])
    for ii, k1 in T.grid(32, 128):
        with T.sblock("write0"): C[io * 32 + ii, k0 * 128 + k1] = C_ws[ii, k1]

After `on_tensor_cores(func, "reduce_rest0", ["start0", "write0"], warps=(1, 4))`, where each of
four warps has 32 rows and 32 columns of the sums, each thread 2 by 4 tiles of four::

    for u0, u1, u2 in T.grid(2, 4, 4):                      # unrolled, as all that follow
        C_ws[u0, u1, u2] = 0.0
    ...
        for u0 in range(2):                                 # 16 of the 32 terms
            ...                                             # load 2 left and 4 right factors
            for u1, u2 in T.grid(2, 4):
                T.ptx.mma(C_ws[u1, u2, 0], ...)
    for u0, u1, u2 in T.grid(2, 4, 4):
        C[io * 32 + u0 * 16 + lane // 4 + u2 // 2 * 8, ...] = C_ws[u0, u1, u2]

The 16 rows of an instruction are those of the result where there are as many; of 8 rows they are
its columns, and the product is the transposed one, so that nothing of the instruction is wasted.
A sum over less than the depth of an instruction is one with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.fragments import (
    LEFT,
    RIGHT,
    SUMS,
    Tile,
    load_left,
    load_right,
    place_of_sum,
    registers,
)
from sparsetir.schedules.gpu.passes.ptx import PRODUCTS, multiply
from sparsetir.schedules.passes.nests import (
    Nest,
    allocated,
    find_nest,
    for_threads,
    replaced,
    unrolled,
    with_buffer,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import as_dtype, dtype_of, free_vars, uncast
from sparsetir.sparse_ir.nodes import accesses_of, buffer_var, map_expr, substitute
from sparsetir.sparse_ir.reduction import reduction_of, taken_apart, under
from sparsetir.sparse_ir.statements import as_one, loop_over

__all__ = ["on_tensor_cores"]

WHO = "on_tensor_cores"
ROWS, COLUMNS = 16, 8  # of an instruction
TERMS = 8  # which begin 16 bytes of 16-bit numbers


class _Factor(NamedTuple):
    load: Any  # from shared memory
    loop: Any  # that goes along it, and not along the sum


class _Product(NamedTuple):
    """A product of tiles as a block has it.

    left, right : of the 16 rows and of the 8 columns of instructions
    sum : the loop over terms
    places : the two loops in the order of the result's indices
    """

    result: Any
    dtype: str
    left: _Factor
    right: _Factor
    sum: Any
    places: list[Any]


def on_tensor_cores(
    func: tirx.PrimFunc,
    reduce: str,
    steps: Sequence[str],
    *,
    warps: tuple[int, int],
    pairs: bool = False,
) -> tirx.PrimFunc:
    """A stage-II function with a product of tiles on tensor cores.

    reduce : block that adds products of two 2-dimensional tiles in shared memory to a third,
        in "local" scope; loops of constant extents
    steps : blocks of all other accesses of the sums, in loops like these over rows and columns:
        what they begin with, and where they are written
    warps : among how many warps the rows and the columns of the sums are divided
    pairs : two neighbours of a row are written at once; the caller's word that these are neighbours
        in memory from a multiple of two on, and that conditions hold for both or none

    Raises ScheduleError for blocks of another shape, and tiles that instructions do not divide.
    """
    nest = find_nest(WHO, func, reduce)
    product = _product(nest, warps)
    work = _Warps(product, warps)
    # TVM has registers of 32-bit integers without a sign.
    sums = {"int32": "uint32"}.get(PRODUCTS[product.dtype].sums, PRODUCTS[product.dtype].sums)
    new = buffer_var([*work.tiles, SUMS], sums, product.result.name, "local")
    others = [find_nest(WHO, func, step) for step in steps]
    for step in others:
        func = replaced(func, step, work.over_sums(step, new, pairs))
    func = replaced(func, nest, work.multiply(reduce, new))
    left = accesses_of(func.body, product.result)
    if left:
        raise ScheduleError(
            f"{WHO}: argument 'steps': expected the blocks of all accesses of the sums, got "
            f"{left[0]} in another"
        )
    func = with_buffer(func, product.result, new, lambda _, indices: indices)
    for buffer in work.factors:
        func = allocated(func, buffer)
    return func


class _Warps:
    """What each warp does of a product."""

    def __init__(self, product: _Product, warps: tuple[int, int]) -> None:
        self.product, self.warps = product, warps
        by_row = product.left.loop is product.places[0]
        self.shares = warps if by_row else warps[::-1]  # of left and right
        extents = [int(f.loop.extent) for f in (product.left, product.right)]
        left, right = (e // w for e, w in zip(extents, self.shares, strict=True))
        self.own = left, right
        self.tiles = left // ROWS, right // COLUMNS
        self.depth = PRODUCTS[product.dtype].depth
        self.left = registers([self.tiles[0], LEFT], f"{product.left.load.source.name}_registers")
        self.right = registers(
            [self.tiles[1], RIGHT], f"{product.right.load.source.name}_registers"
        )
        self.factors = [self.left, self.right]
        self.by_row = by_row

    def _begins(self, warp: Any) -> tuple[Any, Any]:
        """Where a warp's part of the left and of the right begins."""
        at = (warp // self.warps[1], warp % self.warps[1])
        left, right = at if self.by_row else at[::-1]
        return left * self.own[0], right * self.own[1]

    def over_sums(self, nest: Nest, sums: Any, pairs: bool) -> Any:
        """A step for each row and column, for the sums that a thread has."""
        loops = {x.loop_var: x for x in nest.loops}
        accesses = accesses_of(nest.body, self.product.result)
        indices = list(accesses[0].indices) if accesses else []
        if [*loops] != indices and set(loops) != set(indices) or len(loops) != 2:
            raise ScheduleError(
                f"{WHO}: argument 'steps': expected loops over rows and columns of the sums around "
                f"block '{nest.name}', got {[v.name for v in loops]} around {list(indices)}"
            )
        order = 1 if self.by_row else -1

        def code(warp: Any, lane: Any) -> Any:
            begins = self._begins(warp)

            def one(stmt: Any, i: Any, j: Any, e: Any, place: Any) -> Any:
                row, column = place
                at = [begins[0] + i * ROWS + row, begins[1] + j * COLUMNS + column][::order]
                places = {v: as_dtype(x, dtype_of(v)) for v, x in zip(indices, at, strict=True)}
                return substitute(_held(stmt, self.product.result, sums, [i, j, e]), places)

            def single(i: Any, j: Any, e: Any) -> Any:
                return one(nest.body, i, j, e, place_of_sum(lane, e))

            def pair(i: Any, j: Any, half: Any) -> Any:
                conditions, store = taken_apart(nest.body)
                n = tirx.Var("pair", "int32")
                row, column = lane // 4 + half * 8, lane % 4 * 2
                both = one(store, i, j, half * 2 + n, (row, column + n))
                first = [one(c, i, j, half * 2, (row, column)) for c in conditions]
                return under(first, loop_over(n, 2, both, tirx.ForKind.VECTORIZED))

            written = taken_apart(nest.body)[1]
            inside = isinstance(written, tirx.BufferStore) and written.buffer.same_as(
                self.product.result
            )
            if pairs and self.by_row and not inside:
                return unrolled([*self.tiles, SUMS // 2], pair)
            return unrolled([*self.tiles, SUMS], single)

        return for_threads(nest.name, self.warps[0] * self.warps[1], code)

    def multiply(self, name: str, sums: Any) -> Any:
        """The product."""
        product = self.product
        terms = int(product.sum.extent)
        count, rest = divmod(terms, self.depth)
        left, right = (self._tile(f) for f in (product.left, product.right))

        def code(warp: Any, lane: Any) -> Any:
            at_left, at_right = self._begins(warp)

            def step(depth: Any, own: int | None) -> Any:
                parts = [
                    unrolled([self.tiles[0]], lambda i: load_left(
                        [_at(self.left, i, n) for n in range(LEFT)], left,
                        at_left + i * ROWS, depth, lane, own)),
                    *self._load_right(right, at_right, depth, lane, own),
                    unrolled([*self.tiles], lambda i, j: multiply(
                        product.dtype, [_at(sums, i, j, n) for n in range(SUMS)],
                        [_at(self.left, i, n) for n in range(LEFT)],
                        [_at(self.right, j, n) for n in range(RIGHT)])),
                ]  # fmt: skip
                return tirx.SeqStmt(parts)

            whole = [unrolled([count], lambda u: step(u * self.depth, None))] if count else []
            part = [step(as_dtype(count * self.depth, "int32"), rest)] if rest else []
            parts = whole + part
            return as_one(parts)

        return for_threads(name, self.warps[0] * self.warps[1], code)

    def _load_right(self, tile: Tile, at: Any, depth: Any, lane: Any, own: int | None) -> list[Any]:
        """Two tiles at a time, and the last one alone if their number is odd."""
        pairs, odd = divmod(self.tiles[1], 2)

        def load(first: Any, count: int) -> Any:
            to = [_at(self.right, first + n, m) for n in range(count) for m in range(RIGHT)]
            return load_right(to, tile, at + first * COLUMNS, depth, lane, own)

        out = [unrolled([pairs], lambda u: load(u * 2, 2))] if pairs else []
        return out + ([load(as_dtype(2 * pairs, "int32"), 1)] if odd else [])

    def _tile(self, factor: _Factor) -> Tile:
        over, along = factor.loop.loop_var, self.product.sum.loop_var
        source, indices = factor.load.source, list(factor.load.indices)

        def element(place: Any, depth: Any) -> Any:
            at = {over: as_dtype(place, dtype_of(over)), along: as_dtype(depth, dtype_of(along))}
            return tirx.BufferLoad(source, [substitute(i, at) for i in indices])

        return Tile(element, indices[-1].same_as(along), self.product.dtype)


def _at(buffer: Any, *indices: Any) -> Any:
    return tirx.BufferLoad(buffer, [as_dtype(i, "int32") for i in indices])


def _held(body: Any, old: Any, new: Any, indices: list[Any]) -> Any:
    """A statement with one element of another buffer for those of the sums."""
    at = [as_dtype(i, "int32") for i in indices]

    plain, held = str(old.ty.dtype), str(new.ty.dtype)

    def load(node: Any) -> Any:
        return as_dtype(tirx.BufferLoad(new, at), plain) if node.source.same_as(old) else node

    def store(node: Any) -> Any:
        if not node.buffer.same_as(old):
            return node
        return tirx.BufferStore(new, as_dtype(node.value, held), at)

    return map_expr(body, [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def _product(nest: Nest, warps: tuple[int, int]) -> _Product:
    nest.extents(WHO)
    reduction = reduction_of(nest.body)
    store = reduction.store if reduction is not None else None
    loads: list[Any] = []
    if reduction is not None and isinstance(reduction.term, tirx.Mul):
        loads = [uncast(f) for f in (reduction.term.a, reduction.term.b)]
    good = len(loads) == 2 and all(
        isinstance(x, ir.TensorLoad) and x.source.ty.storage_scope.startswith("shared")
        for x in loads
    )
    if store is None or not good or reduction is None or reduction.conditions:
        _refuse(nest, "X[..] = X[..] + A[..] * B[..] of A and B in shared memory")
    by_var = {x.loop_var: x for x in nest.loops}
    spatial = [by_var[i] for i in store.indices if i in by_var]
    summed = [x for x in nest.loops if x not in spatial]
    if len(spatial) != len(store.indices) or (len(spatial), len(summed)) != (2, 1):
        _refuse(nest, "loops over rows and columns of X, and one over terms")
    dtypes = {dtype_of(x) for x in loads}
    (dtype,) = dtypes if len(dtypes) == 1 else (" and ".join(sorted(dtypes)),)
    if dtype not in PRODUCTS or dtype_of(store.value) != PRODUCTS[dtype].sums:
        legal = ", ".join(f"{k} and {v.sums}" for k, v in PRODUCTS.items())
        _refuse(nest, f"factors and sums of {legal}")
    factors = [_factor(nest, loads, x, summed[0]) for x in spatial]
    extents = [int(x.extent) // w for x, w in zip(spatial, warps, strict=True)]
    if any(int(x.extent) % w for x, w in zip(spatial, warps, strict=True)):
        extents = [0, 0]
    terms = int(summed[0].extent)
    for left, right in ((0, 1), (1, 0)):
        fits = extents[left] % ROWS == 0 and extents[right] % COLUMNS == 0 and all(extents)
        if fits and terms % TERMS == 0:
            return _Product(store.buffer, dtype, factors[left], factors[right], summed[0], spatial)
    _refuse(
        nest,
        f"rows and columns of a warp that {ROWS} and {COLUMNS} divide, and terms that {TERMS} does",
        f"{[int(x.extent) for x in spatial]} for {list(warps)} warps, and {terms} terms",
    )


def _factor(nest: Nest, loads: list[Any], loop: Any, summed: Any) -> _Factor:
    both = [loop.loop_var, summed.loop_var]
    for load in loads:
        used = [v for v in (x.loop_var for x in nest.loops) if v in free_vars(load)]
        indices = [i for i in load.indices if isinstance(i, ir.Var)]
        if set(used) == set(both) and load.indices[-1] in both and len(indices) >= 2:
            return _Factor(load, loop)
    _refuse(nest, f"a factor over '{loop.loop_var.name}' and '{summed.loop_var.name}' alone")


def _refuse(nest: Nest, expected: str, got: str = "") -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'reduce': expected {expected}, got {got or nest.body} in block "
        f"'{nest.name}'"
    )
