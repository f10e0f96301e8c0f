"""Atomically added sums of products, rewritten as products of tiles (GPU).

Sums over stored elements and over features are separated: sum over j and k of a[j] x[j, k] w[k, l]
is a product of the sums over j with w. The intermediate is a tile in shared memory, never more.
Before, where `l0` and `rt` are divided among thread blocks, which add atomically::

    for l0, rt in T.grid(...):
      for it, l1, k0, k1, jb in T.grid(32, 64, (feat_in + 15) // 16, 16, 4):
        with T.sblock("rgms0"):
            if I[vrt, vit] >= 0 and J[vrt, vit, vjb] >= 0 and k < feat_in and l < feat:
                atomicAdd(Y[I[vrt, vit], l], A[vrt, vit, vjb] * X[J[..], k] * W[R[vrt], k, l])

After `sum_then_matmul(func, "rgms0", outer=2, dtype="float16")`::

    for l0, rt in T.grid(...):
        with T.sblock("rgms0_tile"):
            for it, l1 in T.grid(32, 64):
                with T.sblock("rgms0_start"): Y_ws[it, l1] = 0.0
            for k0 in range((feat_in + 15) // 16):
                with T.sblock("rgms0_visit"):
                    for it, k1 in T.grid(32, 16):
                        with T.sblock("rgms0_gather"):
                            G[it, k1] = sum over jb of A[rt, it, jb] * X[J[rt, it, jb], k]
                    for k1, l1 in T.grid(16, 64):
                        with T.sblock("rgms0_matrix"): W_ws[k1, l1] = W[R[rt], k, l]
                    for it, l1, k1 in T.grid(32, 64, 16):
                        with T.sblock("rgms0_product"): Y_ws[it, l1] += G[it, k1] * W_ws[k1, l1]
            for it, l1 in T.grid(32, 64):
                with T.sblock("rgms0_write"):
                    if I[rt, it] >= 0 and l < feat: atomicAdd(Y[I[rt, it], l], Y_ws[it, l1])

Each condition moves to where all its variables are known, and leaves a zero, or no write, there:
padded rows and columns are not written, padded elements are not in the sum, and terms beyond the
last feature are zeros on both sides. So no number is combined with padding. An infinity in W
multiplies the inner sum, not each of its terms: where these would cancel, or one is zero, the
result is infinite, and not NaN.

The rows that are summed may also be those of the result's second-to-last axis, with the sum of the
product over what gathers them, as in a gradient, `dW[R[rt], k, l] += A[..] * X[J[..], k] * G[I[rt,
it], l]`: the intermediates are then `gathered_ws[it, k]` and `G_ws[it, l]`. Intermediate tiles keep
the memory order of their source.

In the other order, the operand shared by all elements of a row is a product of tiles, and each
element's sum uses its result. Before::

      for it, jb, k1, l0, l1 in T.grid(32, 4, 64, (feat + 15) // 16, 16):
        with T.sblock("rgms0"):
            if I[vrt, vit] >= 0 and J[vrt, vit, vjb] >= 0 and k < feat_in and l < feat:
                atomicAdd(DA[E[vrt, vit, vjb]], X[J[..], k] * (W[R[vrt], k, l] * G[I[..], l]))

After `matmul_then_dot(func, "rgms0", outer=2)`, with the same steps up to the product::

                        ...  # G_ws[it, l1], W_ws[k1, l1], sums[it, k1] += G_ws[..] * W_ws[..]
            for it, k1 in T.grid(32, 64):
                with T.sblock("rgms0_write"): products[it, k1] = sums[it, k1]
            for it, jb, k1 in T.grid(32, 4, 64):
                with T.sblock("rgms0_dots"):
                    if ...: atomicAdd(DA[E[rt, it, jb]], X[J[rt, it, jb], k] * products[it, k1])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.passes.nests import Nest, block_of, find_nest, guarded, replaced
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, distinct, nodes_of, substitute
from sparsetir.sparse_ir.reduction import add_guards, factors_of, split_guards
from sparsetir.sparse_ir.tile_marks import conjuncts
from sparsetir.sparse_ir.tir import (
    as_dtype,
    cast,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    loop_with,
    uncast,
)

ATOMIC_ADD = "atomicAdd"
Refuse = Callable[[str], NoReturn]  # raises; takes what is expected


class AtomicProduct(NamedTuple):
    """A block that adds a product to an element.

    place : the element
    factors : without the conditions that make them zero
    conditions : conditions of the addition, and of nonzero factors, each once
    """

    place: Any
    factors: list[Any]
    conditions: list[Any]

    def add(self, value: Any) -> Any:
        """The statement that adds another value."""
        dtype = dtype_of(self.place)
        call = tirx.call_extern(dtype, ATOMIC_ADD, tirx.address_of(self.place), value)
        return tirx.Evaluate(call)


def atomic_product(body: Any) -> AtomicProduct | None:
    """The atomic product in the body of a block, or None."""
    conditions, added = split_guards(body)
    call: Any = added.value if isinstance(added, tirx.Evaluate) else None
    if getattr(getattr(call, "op", None), "name", "") != "tirx.call_extern" or (
        str(getattr(call.args[0], "value", "")) != ATOMIC_ADD
    ):
        return None
    guards = [c for condition in conditions for c in conjuncts(condition)]
    factors = []
    for factor in factors_of(call.args[2]):
        plain, more = _without_choice(factor)
        factors.append(plain)
        guards += more
    return AtomicProduct(call.args[1].args[0], factors, distinct(guards))


def _without_choice(factor: Any) -> tuple[Any, list[Any]]:
    """A factor, and the conditions without which it is zero."""
    if isinstance(factor, tirx.Cast):
        value, dropped = _without_choice(factor.value)
        return cast(value, dtype_of(factor)), dropped
    condition, value = guarded(factor)
    if condition is None:
        return factor, []
    plain, dropped = _without_choice(value)
    return plain, [*conjuncts(condition), *dropped]


def sum_then_matmul(func: tirx.PrimFunc, block: str, *, outer: int, dtype: str) -> tirx.PrimFunc:
    """A stage-II function whose block multiplies tiles of inner sums with tiles of a matrix.

    block : block that adds products to an element atomically, in loops
    outer : number of outermost loops around a tile
    dtype : type of the inner sums as factors; they are accumulated in the result's type

    Raises ScheduleError for blocks of another form.
    """
    tile = _Tile("sum_then_matmul", func, block, outer, _sums_first)
    p = tile.product
    sums = _buffer(p.places, tile.wide, f"{p.added.place.source.name}_ws", "local")
    left = _buffer(p.by_row, dtype, "gathered_ws", "shared")
    written = add_guards(tile.known(p.places), p.added.add(_load(sums, p.places)))
    return tile.made(left, [sums], [tile.step("write", p.places, written)])


def matmul_then_dot(func: tirx.PrimFunc, block: str, *, outer: int) -> tirx.PrimFunc:
    """A stage-II function whose block multiplies products of tiles with rows of elements.

    block : block that adds products to an element atomically, in loops
    outer : number of outermost loops around a tile

    Raises ScheduleError for blocks of another form.
    """
    tile = _Tile("matmul_then_dot", func, block, outer, _products_first)
    p, (factor,) = tile.product, tile.product.left
    sums = _buffer(p.places, tile.wide, "products_ws", "local")
    held = _buffer(p.places, tile.wide, "products", "shared")
    left = _buffer(p.by_row, dtype_of(factor), f"{factor.source.name}_ws", "shared")
    term = _load(held, p.places)
    for other in p.others:
        term = cast(other, tile.wide) * term
    each = [p.rows, *p.elements, p.columns]
    ends = [
        tile.step("write", p.places, _store(held, p.places, _load(sums, p.places))),
        tile.step("dots", each, add_guards(tile.known(each), p.added.add(term))),
    ]
    return tile.made(left, [sums, held], ends)


class _Product(NamedTuple):
    """A product of tiles in a sum of products, as loops.

    added : the element that is updated, and the conditions of a term
    rows, columns : the loops over the sums of a tile
    steps, terms : the outer and the inner loop over the terms of a sum
    left, matrix : factors over rows and terms, and the one, a load, over columns and terms
    inner : the loops of inner sums, of the left factors
    elements, others : the loops over a row's updated elements, and the factors over these
    """

    added: AtomicProduct
    rows: Any
    columns: Any
    steps: Any
    terms: Any
    left: list[Any]
    matrix: Any
    inner: list[Any]
    elements: list[Any]
    others: list[Any]

    @property
    def places(self) -> list[Any]:
        return [self.rows, self.columns]

    @property
    def by_row(self) -> list[Any]:
        """The loops over the left factors, with that along their last axis last."""
        return _in_memory(self.left, self.terms, self.rows)

    @property
    def by_column(self) -> list[Any]:
        return _in_memory([self.matrix], self.terms, self.columns)


Reader = Callable[[Nest, AtomicProduct, Refuse], _Product]


class _Tile:
    """The statements for one visit of the outer loops.

    read : (nest, the addition, a function that refuses) -> the product
    """

    def __init__(
        self, caller: str, func: tirx.PrimFunc, block: str, outer: int, read: Reader
    ) -> None:
        self.func, self.block, self.nest = func, block, find_nest(caller, func, block)
        around = self.nest.loops[:outer]
        single = {x.loop_var: as_dtype(0, dtype_of(x.loop_var)) for x in around if is_one(x.extent)}
        inside = Nest(block, self.nest.loops[outer:], substitute(self.nest.body, single))

        def refuse(expected: str) -> NoReturn:
            raise ScheduleError(
                f"{caller}: argument 'block': expected {expected}, got {inside.body} in block "
                f"'{block}'"
            )

        added = atomic_product(inside.body)
        if added is None:
            refuse("an element to be added to atomically")
        self.around = [x for x in around if not is_one(x.extent)]
        self.product = read(inside, added, refuse)
        self.inside, self.wide = _vars(inside.loops), dtype_of(added.place)

    def made(self, left: Any, others: list[Any], ends: list[Any]) -> tirx.PrimFunc:
        """The function with the tile.

        left : a buffer of the left factors; others : buffers of sums and values derived from them
        ends : the steps after the product
        """
        p, sums, steps = self.product, others[0], self.product.steps
        name = f"{p.matrix.source.name}_ws"
        matrix = _buffer(p.by_column, dtype_of(p.matrix), name, "shared")
        term = cast(_load(left, p.by_row), self.wide) * cast(_load(matrix, p.by_column), self.wide)
        added = _store(sums, p.places, _load(sums, p.places) + term)
        copied = _store(matrix, p.by_column, self._or_masked(p.matrix, [steps, *p.by_column]))
        visit = [
            self.step("gather", p.by_row, self._gathered(left)),
            self.step("matrix", p.by_column, copied),
            self.step("product", [*p.places, p.terms], added),
        ]
        zero = _store(sums, p.places, tirx.const(0, self.wide))
        of_visit = block_of(f"{self.block}_visit", tirx.SeqStmt(visit))
        parts = [
            self.step("start", p.places, zero),
            loop_over(steps.loop_var, steps.extent, of_visit),
            *ends,
        ]
        body = block_of(f"{self.block}_tile", tirx.SeqStmt(parts), [*others, left, matrix])
        for loop in reversed(self.around):
            body = loop_with(loop, body=body)
        return replaced(self.func, self.nest, body)

    def _gathered(self, left: Any) -> Any:
        """The inner sum; a copy if there is one element without a factor."""
        p, dtype = self.product, dtype_of(left)
        loops = [p.rows, p.steps, p.terms, *p.inner]
        several = [x for x in p.inner if not is_one(x.extent)]
        alone = {x.loop_var: as_dtype(0, dtype_of(x.loop_var)) for x in p.inner if is_one(x.extent)}
        plain = uncast(p.left[0])
        if not several and len(p.left) == 1 and dtype_of(plain) == dtype:
            return substitute(_store(left, p.by_row, self._or_masked(plain, loops)), alone)
        term = p.left[0]
        for factor in p.left[1:]:
            term = term * factor
        total = cast(_load(left, p.by_row), self.wide) + term
        guards = self.known(loops)
        add: Any = add_guards(guards, _store(left, p.by_row, cast(total, dtype)))
        for loop in reversed(several):
            add = loop_over(loop.loop_var, loop.extent, add)
        begin = _store(left, p.by_row, tirx.const(0, dtype))
        return substitute(tirx.SeqStmt([begin, add]), alone)

    def _or_masked(self, value: Any, loops: list[Any]) -> Any:
        """A value, or zero where the conditions on these loops do not hold."""
        guards = self.known(loops)
        zero = tirx.const(0, dtype_of(value))
        return tirx.if_then_else(tirx.all(*guards), value, zero) if guards else value

    def known(self, loops: list[Any]) -> list[Any]:
        """The conditions that only depend on these loops, and on the outer ones."""
        others = self.inside - _vars(loops)
        return [c for c in self.product.added.conditions if not free_vars(c) & others]

    def step(self, name: str, loops: list[Any], body: Any) -> Any:
        """A block with fresh loop variables."""
        renamed = _vars([*loops, *nodes_of(tirx.For, body)])
        fresh = {v: tirx.Var(v.name, dtype_of(v)) for v in renamed}
        body = block_of(f"{self.block}_{name}", substitute(body, fresh))
        for loop in reversed(loops):
            body = loop_over(fresh[loop.loop_var], loop.extent, body)
        return body


def _vars(loops: list[Any]) -> set[Any]:
    return {x.loop_var for x in loops}


def _buffer(loops: list[Any], dtype: str, name: str, scope: str) -> Any:
    """A buffer over loops of constant extents."""
    return buffer_var([int(x.extent) for x in loops], dtype, name, scope)


def _load(buffer: Any, loops: list[Any]) -> Any:
    return tirx.BufferLoad(buffer, [x.loop_var for x in loops])


def _store(buffer: Any, loops: list[Any], value: Any) -> Any:
    return tirx.BufferStore(buffer, value, [x.loop_var for x in loops])


def _in_memory(factors: list[Any], terms: Any, other: Any) -> list[Any]:
    """The loops over factors, with that along their last axis last."""
    loads = [x for x in map(uncast, factors) if isinstance(x, ir.TensorLoad)]
    turned = any(other.loop_var in free_vars(x.indices[-1]) for x in loads)
    return [terms, other] if turned else [other, terms]


def _sums_first(nest: Nest, added: AtomicProduct, refuse: Refuse) -> _Product:
    """The case in which gathered rows are summed before the multiplication."""
    loop_vars = _vars(nest.loops)
    *outer, last = added.place.indices
    columns, rows = free_vars(last) & loop_vars, _free_vars(outer) & loop_vars
    over = [f for f in added.factors if free_vars(f) & columns]
    left = [f for f in added.factors if not free_vars(f) & columns]
    matrix = uncast(over[0]) if len(over) == 1 else None
    single = len(columns) == len(rows) == 1 and columns != rows
    if not single or not isinstance(matrix, ir.TensorLoad) or not left:
        refuse("products of what is gathered for a row with a matrix over columns")
    along = free_vars(matrix) & loop_vars - columns
    inner = loop_vars - along - rows - columns
    loops = _tile_loops(nest, rows, columns, along, inner)
    if loops is None:
        refuse("a matrix over steps, terms and columns alone, in tiles of constant extents")
    if not _separable(added, loop_vars, rows | along | inner, columns | along, rows | columns):
        refuse("conditions of what is gathered, of the matrix or of the result alone")
    row, column, steps, terms, *rest = loops
    return _Product(added, row, column, steps, terms, left, matrix, rest, [], [])


def _products_first(nest: Nest, added: AtomicProduct, refuse: Refuse) -> _Product:
    """The case in which rows are multiplied with a matrix before the factors of elements."""
    loop_vars = _vars(nest.loops)
    placed = _free_vars(added.place.indices) & loop_vars
    used = [(uncast(f), free_vars(f) & loop_vars) for f in added.factors]
    # The matrix does not depend on the elements.
    matrices = [x for x in used if not x[1] & placed]
    if len(matrices) != 1 or not isinstance(matrices[0][0], ir.TensorLoad) or len(placed) != 2:
        refuse("products with a matrix for rows of two loops")
    ((matrix, of_matrix),) = matrices
    of_rows = [x for x in used if len(x[1] & placed) == 1 and x[1] & of_matrix]
    if len(of_rows) != 1 or not isinstance(of_rows[0][0], ir.TensorLoad):
        refuse("one factor of rows alone beside the matrix")
    ((left, of_left),) = of_rows
    along, rows, elements = of_left - placed, of_left & placed, placed - of_left
    columns = of_matrix - along
    loops = _tile_loops(nest, rows, columns, along, elements)
    if loops is None:
        refuse("rows, elements, columns, steps and terms, in tiles of constant extents")
    if not _separable(added, loop_vars, rows | along, columns | along, rows | elements | columns):
        refuse("conditions of one factor, or of an element, alone")
    kept = [f.same_as(left) or f.same_as(matrix) for f, _ in used]
    others = [f for f, taken in zip(added.factors, kept, strict=True) if not taken]
    if not others or _free_vars(others) & along:
        refuse("a factor of each element")
    row, column, steps, terms, *rest = loops
    return _Product(added, row, column, steps, terms, [left], matrix, [], rest, others)


def _tile_loops(
    nest: Nest, rows: set[Any], columns: set[Any], along: set[Any], others: set[Any]
) -> list[Any] | None:
    """The loops along rows, columns, steps, terms, and others; None if they do not form a tile.

    All but the one along steps have constant extents.
    """
    parts = [[x for x in nest.loops if x.loop_var in p] for p in (rows, columns, along, others)]
    ordered = [x for part in parts for x in part]
    constant = all(isinstance(x.extent, tirx.IntImm) for n, x in enumerate(ordered) if n != 2)
    tile = [len(part) for part in parts[:3]] == [1, 1, 2] and len(ordered) == len(nest.loops)
    return ordered if tile and constant else None


def _separable(added: AtomicProduct, loops: set[Any], *known_sets: set[Any]) -> bool:
    """Whether each condition only depends on one of some sets of loops."""
    return all(any(free_vars(c) & loops <= k for k in known_sets) for c in added.conditions)


def _free_vars(exprs: Any) -> set[Any]:
    return set[Any]().union(*map(free_vars, exprs))
