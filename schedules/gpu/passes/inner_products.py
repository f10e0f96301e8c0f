"""Products with a matrix that are multiplied with many rows, one for each element (GPU).

The other order of :mod:`sparsetir.schedules.gpu.passes.inner_sums`: what all elements of a row
share is a product of tiles, and each element's sum is one with that. Before, where `k0` and `rt`
are divided among blocks of threads, which add atomically::

    for k0, rt in T.grid(...):
      for it, jb, k1, l0, l1 in T.grid(32, 4, 64, (feat + 15) // 16, 16):
        with T.sblock("rgms0"):
            if I[vrt, vit] >= 0 and J[vrt, vit, vjb] >= 0 and k < feat_in and l < feat:
                atomicAdd(DA[E[vrt, vit, vjb]], X[J[..], k] * (W[R[vrt], k, l] * G[I[..], l]))

After `inner_products(func, "rgms0", outer=2)`::

    for k0, rt in T.grid(...):
        with T.sblock("rgms0_tile"):
            for it, k1 in T.grid(32, 64):
                with T.sblock("rgms0_start"): W_ws[it, k1] = 0.0
            for l0 in range((feat + 15) // 16):
                with T.sblock("rgms0_visit"):
                    for it, l1 in T.grid(32, 16):
                        with T.sblock("rgms0_gather"): G_ws[it, l1] = G[I[rt, it], l]
                    for k1, l1 in T.grid(64, 16):
                        with T.sblock("rgms0_matrix"): W_ws_1[k1, l1] = W[R[rt], k, l]
                    for it, k1, l1 in T.grid(32, 64, 16):
                        with T.sblock("rgms0_product"): sums[it, k1] += G_ws[it, l1] * W_ws[k1, l1]
            for it, k1 in T.grid(32, 64):
                with T.sblock("rgms0_write"): products[it, k1] = sums[it, k1]
            for it, jb, k1 in T.grid(32, 4, 64):
                with T.sblock("rgms0_dots"):
                    if ...: atomicAdd(DA[E[rt, it, jb]], X[J[rt, it, jb], k] * products[it, k1])

Conditions go where all that they say is known: copies have zeros where one does not hold, and what
is no element is not read. So padding meets no number.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.atomic_products import (
    AtomicProduct,
    at,
    atomic_product,
    known_by,
    step_of,
    tile_buffer,
    tile_nest,
    within,
)
from sparsetir.schedules.passes.nests import Nest, block_of, find_nest, replaced
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.expressions import cast, dtype_of, free_vars, uncast
from sparsetir.sparse_ir.reduction import under
from sparsetir.sparse_ir.statements import loop_over

WHO = "inner_products"


class _Product(NamedTuple):
    """A sum over products as a block has it.

    added : to which element, and on which conditions a term counts
    rows, elements : the loops along the elements that are added to, and the first of them
    columns : the loop along the sum of each element
    steps, terms : the outer and the innermost loop along the sum of the product
    left, matrix : factors of the product, over rows and terms, and over columns and terms
    others : factors of each element
    """

    added: AtomicProduct
    rows: Any
    elements: Any
    columns: Any
    steps: Any
    terms: Any
    left: Any
    matrix: Any
    others: list[Any]


def inner_products(func: tirx.PrimFunc, block: str, *, outer: int) -> tirx.PrimFunc:
    """A stage-II function whose block multiplies products of tiles with rows of elements.

    block : that adds products to an element atomically, in loops
    outer : how many of these, the outermost, a tile is for one visit of

    Raises ScheduleError for blocks of another shape.
    """
    nest, around = tile_nest(WHO, func, block, outer)
    body = within(around, _tile(_read(nest), block))
    return replaced(func, find_nest(WHO, func, block), body)


def _tile(p: _Product, block: str) -> Any:
    """The statement for one visit of the outer loops."""
    wide = dtype_of(p.added.place)
    inside = [p.rows, p.elements, p.columns, p.steps, p.terms]
    by_row, by_column = [p.rows, p.columns], [p.columns, p.terms]
    sums = tile_buffer(by_row, wide, "products_ws", "local")
    held = tile_buffer(by_row, wide, "products", "shared")
    left = tile_buffer([p.rows, p.terms], dtype_of(p.left), f"{p.left.source.name}_ws", "shared")
    matrix = tile_buffer(by_column, dtype_of(p.matrix), f"{p.matrix.source.name}_ws", "shared")

    def known(*loops: Any) -> list[Any]:
        return known_by(p.added.conditions, [*loops], inside)

    def copied(buffer: Any, load: Any, *loops: Any) -> Any:
        conditions, value = known(p.steps, *loops), load
        if conditions:
            zero = tirx.const(0, dtype_of(load))
            value = tirx.if_then_else(tirx.all(*conditions), load, zero)
        return tirx.BufferStore(buffer, value, at(*loops))

    def step(name: str, loops: list[Any], body: Any) -> Any:
        return step_of(f"{block}_{name}", loops, body)

    of_left = tirx.BufferLoad(left, at(p.rows, p.terms))
    of_matrix = tirx.BufferLoad(matrix, at(*by_column))
    total = tirx.BufferLoad(sums, at(*by_row))
    added = total + cast(of_left, wide) * cast(of_matrix, wide)
    visit = block_of(
        f"{block}_visit",
        tirx.SeqStmt(
            [
                step("gather", [p.rows, p.terms], copied(left, p.left, p.rows, p.terms)),
                step("matrix", by_column, copied(matrix, p.matrix, *by_column)),
                step("product", [*by_row, p.terms], tirx.BufferStore(sums, added, at(*by_row))),
            ]
        ),
    )
    term: Any = tirx.BufferLoad(held, at(*by_row))
    for factor in p.others:
        term = cast(factor, wide) * term
    of_elements = [p.rows, p.elements, p.columns]
    zero = tirx.BufferStore(sums, tirx.const(0, wide), at(*by_row))
    parts = [
        step("start", by_row, zero),
        loop_over(p.steps.loop_var, p.steps.extent, visit),
        step("write", by_row, tirx.BufferStore(held, total, at(*by_row))),
        step("dots", of_elements, under(known(*of_elements), p.added.add(term))),
    ]
    return block_of(f"{block}_tile", tirx.SeqStmt(parts), [sums, held, left, matrix])


def _read(nest: Nest) -> _Product:
    added = atomic_product(nest.body)
    if added is None:
        _refuse(nest, "an element to be added to atomically")
    by_var = {x.loop_var: x for x in nest.loops}
    placed = set[Any]().union(*map(free_vars, added.place.indices)) & set(by_var)
    summed = set(by_var) - placed
    used = [free_vars(f) & set(by_var) for f in added.factors]
    # The matrix is the same for all elements.
    found = [n for n, variables in enumerate(used) if not variables & placed]
    loads = [uncast(f) for f in added.factors]
    if len(found) != 1 or not isinstance(loads[found[0]], ir.TensorLoad) or len(placed) != 2:
        _refuse(nest, "products with a matrix for rows of two loops")
    (number,) = found
    over = {v for n, u in enumerate(used) if n != number for v in u & summed & used[number]}
    sides = [n for n, u in enumerate(used) if n != number and len(u & placed) == 1 and u & over]
    if len(sides) != 1 or not isinstance(loads[sides[0]], ir.TensorLoad):
        _refuse(nest, "one factor of rows alone beside the matrix")
    along = used[sides[0]] & summed
    rest = used[number] - along
    loops = [x for x in nest.loops if x.loop_var in along]
    rows = [x for x in nest.loops if x.loop_var in used[sides[0]] & placed]
    elements = [x for x in nest.loops if x.loop_var in placed and x not in rows]
    columns = [x for x in nest.loops if x.loop_var in rest]
    constant = [*rows, *elements, *columns, *loops[1:]]
    fits = len(loops) == 2 and len(columns) == len(nest.loops) - 4 == 1
    if not fits or not all(isinstance(x.extent, tirx.IntImm) for x in constant):
        _refuse(nest, "rows, elements, columns, steps and terms, in tiles of constant extents")
    others = [f for n, f in enumerate(added.factors) if n not in (number, sides[0])]
    steps, terms = loops
    product = _Product(
        added,
        rows[0],
        elements[0],
        columns[0],
        steps,
        terms,
        loads[sides[0]],
        loads[number],
        others,
    )
    parts = [{*along, rows[0].loop_var}, {*along, columns[0].loop_var}]
    parts.append({x.loop_var for x in (*rows, *elements, *columns)})
    for condition in added.conditions:
        if not any(free_vars(condition) & set(by_var) <= known for known in parts):
            _refuse(nest, "conditions of one factor, or of an element, alone")
    if not others or any(free_vars(f) & along for f in others):
        _refuse(nest, "a factor of each element")
    return product


def _refuse(nest: Nest, expected: str) -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'block': expected {expected}, got {nest.body} in block '{nest.name}'"
    )
