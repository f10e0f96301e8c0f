"""Products of tiles in shared memory by threads that keep a tile of the sums in registers each.

What :mod:`sparsetir.schedules.gpu.passes.on_tensor_cores` does for 16-bit types, for any. Before::

    for it, l1 in T.grid(32, 64):
        with T.sblock("start0"): Y_ws[it, l1] = 0.0
    ...
        for it, l1, k1 in T.grid(32, 64, 16):
            with T.sblock("product0"):
                Y_ws[it, l1] = Y_ws[it, l1] + G[it, k1] * W_ws[k1, l1]
    for it, l1 in T.grid(32, 64):
        with T.sblock("write0"): atomicAdd(Y[I[rt, it], l], Y_ws[it, l1])

After `register_tiles(func, "product0", ["start0", "write0"], warps=4, shape=(4, 4))`, where thread
t of 128 has the rows from t // 16 * 4 on and the columns from t % 16 * 4 on::

    for u0, u1 in T.grid(4, 4):                            # unrolled, as all others
        Y_ws[u0, u1] = 0.0
    ...
        for k in range(4):                                 # 4 of the 16 terms
            for u0 in range(4): left[u0, 0:4] = G[t // 16 * 4 + u0, k * 4:k * 4 + 4]
            for n in range(4):
                right[0:4] = W_ws[k * 4 + n, t % 16 * 4:t % 16 * 4 + 4]
                for u0, u1 in T.grid(4, 4):
                    Y_ws[u0, u1] = Y_ws[u0, u1] + left[u0, n] * right[u1]
    for u0, u1 in T.grid(4, 4):
        atomicAdd(Y[I[rt, t // 16 * 4 + u0], ...], Y_ws[u0, u1])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.gather_together import VECTOR_BYTES, in_vector
from sparsetir.schedules.passes.nests import (
    WARP,
    Nest,
    allocated,
    element_bytes,
    find_nest,
    for_threads,
    replaced,
    unrolled,
    with_buffer,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import as_dtype, cast, dtype_of
from sparsetir.sparse_ir.nodes import accesses_of, buffer_var, map_expr, substitute
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.statements import as_one, loop_over

__all__ = ["register_tiles"]

WHO = "register_tiles"


class _Product(NamedTuple):
    """A product of tiles as a block has it: loads over rows and terms, and terms and columns."""

    result: Any
    left: Any
    right: Any
    rows: Any
    columns: Any
    terms: Any


def register_tiles(
    func: tirx.PrimFunc, reduce: str, steps: Sequence[str], *, warps: int, shape: tuple[int, int]
) -> tirx.PrimFunc:
    """A stage-II function with a product of tiles by threads, and its sums in their registers.

    reduce : block that adds products of two 2-dimensional tiles in shared memory, over rows and
        terms and over terms and columns, in either order, to a third; loops of constant extents
    steps : blocks of all other accesses of the sums, in loops over rows and columns
    warps : of the block of threads
    shape : rows and columns of a thread's sums; with as many threads they make the tile

    Raises ScheduleError for blocks of another shape, and threads that do not make the tile.
    """
    nest = find_nest(WHO, func, reduce)
    product = _read(nest)
    work = _Threads(product, warps, shape, nest.name)
    for step in [find_nest(WHO, func, name) for name in steps]:
        func = replaced(func, step, for_threads(step.name, warps, work.over_sums(step)))
    func = replaced(func, nest, for_threads(nest.name, warps, work.multiply()))
    left = accesses_of(func.body, product.result)
    if left:
        raise ScheduleError(
            f"{WHO}: argument 'steps': expected the blocks of all accesses of the sums, got "
            f"{left[0]} in another"
        )
    func = with_buffer(func, product.result, work.sums, lambda _, indices: indices)
    for buffer in (work.left, work.right):
        func = allocated(func, buffer)
    return func


class _Threads:
    """What each thread does of a product."""

    def __init__(self, product: _Product, warps: int, shape: tuple[int, int], name: str) -> None:
        self.product, self.shape = product, shape
        rows, columns, terms = (
            int(x.extent) for x in (product.rows, product.columns, product.terms)
        )
        self.across = columns // shape[1]
        if (
            rows % shape[0]
            or columns % shape[1]
            or (rows // shape[0] * self.across != warps * WARP)
        ):
            raise ScheduleError(
                f"{WHO}: argument 'shape': expected {warps * WARP} tiles that make {rows} by "
                f"{columns} sums of block '{name}', got {shape}"
            )
        self.terms = terms
        size = element_bytes(product.left.source)
        self.step = math.gcd(terms, VECTOR_BYTES // size)
        self.sums = buffer_var(
            list(shape), str(product.result.ty.dtype), product.result.name, "local"
        )
        self.left = self._factor(product.left, shape[0], "left")
        self.right = self._factor(product.right, shape[1], "right")

    def _along_terms(self, load: Any) -> bool:
        """Whether neighbours in memory are terms of the sum."""
        return list(load.indices)[-1].same_as(self.product.terms.loop_var)

    def _factor(self, load: Any, count: int, name: str) -> Any:
        """What a thread has of a factor: some terms of each of its places, or one."""
        shape = [count, self.step] if self._along_terms(load) else [count]
        return buffer_var(shape, dtype_of(load), f"{load.source.name}_{name}", "local")

    def _begins(self, warp: Any, lane: Any) -> tuple[Any, Any]:
        """The first row and the first column of a thread."""
        thread = warp * WARP + lane
        return thread // self.across * self.shape[0], thread % self.across * self.shape[1]

    def over_sums(self, nest: Nest) -> Any:
        """A step for each row and column, for the sums that a thread has."""
        loops = [x.loop_var for x in nest.loops]
        accesses = accesses_of(nest.body, self.product.result)
        indices = list(accesses[0].indices) if accesses else []
        if len(loops) != 2 or indices != loops:
            raise ScheduleError(
                f"{WHO}: argument 'steps': expected loops over rows and columns of the sums around "
                f"block '{nest.name}', got {[v.name for v in loops]} around {indices}"
            )

        def code(warp: Any, lane: Any) -> Any:
            begins = self._begins(warp, lane)

            def one(*at: Any) -> Any:
                places = {
                    v: as_dtype(b + i, dtype_of(v))
                    for v, b, i in zip(loops, begins, at, strict=True)
                }
                return substitute(self._held(nest.body, [*at]), places)

            return unrolled(self.shape, one)

        return code

    def _held(self, body: Any, at: list[Any]) -> Any:
        """A statement with an element of a thread's sums for that of the tile."""
        old, new = self.product.result, self.sums

        def load(node: Any) -> Any:
            return tirx.BufferLoad(new, at) if node.source.same_as(old) else node

        def store(node: Any) -> Any:
            return tirx.BufferStore(new, node.value, at) if node.buffer.same_as(old) else node

        return map_expr(body, [(ir.TensorLoad, load), (tirx.BufferStore, store)])

    def multiply(self) -> Any:
        """The product."""
        product, (rows, columns) = self.product, self.shape
        wide = str(self.sums.ty.dtype)

        def code(warp: Any, lane: Any) -> Any:
            row, column = self._begins(warp, lane)

            sides = [
                (product.left, self.left, product.rows, row, rows),
                (product.right, self.right, product.columns, column, columns),
            ]

            def loaded(side: Any, k: Any, n: Any, i: Any) -> Any:
                """Neighbours of a factor: terms from n on of place i, or all places of term n."""
                load, held, loop, begin, count = side
                many = self.step if self._along_terms(load) else count

                def one(e: Any) -> Any:
                    place, term = (i, e) if self._along_terms(load) else (e, n)
                    at = {loop: begin + place, product.terms: k * self.step + term}
                    index = [i, e] if self._along_terms(load) else [e]
                    return tirx.BufferStore(held, _element(load, at), index)

                return in_vector(many, element_bytes(held), one)

            def add(i: Any, j: Any, n: Any) -> Any:
                left, right = (
                    tirx.BufferLoad(held, [place, n] if len(held.ty.shape) == 2 else [place])
                    for held, place in ((self.left, i), (self.right, j))
                )
                total = tirx.BufferLoad(self.sums, [i, j])
                value = total + cast(left, wide) * cast(right, wide)
                return tirx.BufferStore(self.sums, value, [i, j])

            def of_term(k: Any, n: Any) -> Any:
                loads = [loaded(x, k, n, 0) for x in sides if not self._along_terms(x[0])]
                return as_one([*loads, unrolled(self.shape, lambda i, j: add(i, j, n))])

            def of_places(k: Any, side: Any) -> Any:
                return unrolled([side[4]], lambda i: loaded(side, k, 0, i))

            k = tirx.Var("k", "int32")
            parts = [
                *(of_places(k, x) for x in sides if self._along_terms(x[0])),
                unrolled([self.step], lambda n: of_term(k, n)),
            ]
            return loop_over(k, self.terms // self.step, as_one(parts))

        return code


def _element(load: Any, places: dict[Any, Any]) -> Any:
    at = {x.loop_var: as_dtype(p, dtype_of(x.loop_var)) for x, p in places.items()}
    return substitute(load, at)


def _read(nest: Nest) -> _Product:
    nest.extents(WHO)
    found = reduction_of(nest.body)
    loads: list[Any] = []
    if found is not None and not found.conditions and isinstance(found.term, tirx.Mul):
        loads = [f.value if isinstance(f, tirx.Cast) else f for f in (found.term.a, found.term.b)]
    good = len(loads) == 2 and all(
        isinstance(x, ir.TensorLoad) and x.source.ty.storage_scope.startswith("shared")
        for x in loads
    )
    if found is None or not good or len(nest.loops) != 3:
        _refuse(nest)
    by_var = {x.loop_var: x for x in nest.loops}
    places: list[Any] = [by_var.get(i) for i in found.store.indices]
    others = [x for x in nest.loops if x not in places]
    if None in places or len(places) != 2 or len(others) != 1:
        _refuse(nest)
    (rows, columns), (terms,) = places, others
    over = [{x.loop_var for x in pair} for pair in ((rows, terms), (terms, columns))]
    for left, right in (loads, loads[::-1]):
        if [set(left.indices), set(right.indices)] == over:
            return _Product(found.store.buffer, left, right, rows, columns, terms)
    _refuse(nest)


def _refuse(nest: Nest) -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'reduce': expected X[i, j] = X[i, j] + A[i, k] * B[k, j] of A and B in "
        f"shared memory, in loops over i, j and k, got {nest.body} in block '{nest.name}'"
    )
