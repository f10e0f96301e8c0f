"""Rows that are gathered and summed before they are multiplied with a matrix, in tiles (GPU).

Sums over stored elements and over features come apart: sum over j and k of a[j] x[j, k] w[k, l] is
a product of the sums over j with w. What is stored in the middle is a tile in shared memory, and
never more. Before, where `l0` and `rt` are divided among blocks of threads, which add atomically::

    for l0, rt in T.grid(...):
      for it, l1, k0, k1, jb in T.grid(32, 64, (feat_in + 15) // 16, 16, 4):
        with T.sblock("rgms0"):
            if I[vrt, vit] >= 0 and J[vrt, vit, vjb] >= 0 and k < feat_in and l < feat:
                atomicAdd(Y[I[vrt, vit], l], A[vrt, vit, vjb] * X[J[..], k] * W[R[vrt], k, l])

After `inner_sums(func, "rgms0", outer=2, dtype="float16")`::

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

Each condition goes where all that it says is known, and leaves a zero or nothing there: rows and
columns that are padding are not written, elements that are padding are not in the sum, and terms
beyond the last feature are zeros on both sides. So no number meets padding. An infinity of W meets
the inner sum, not each of its terms: where these would cancel, or one is zero, the result is
infinite, and not NaN.

The rows that are summed may as well be those of the result's second last axis, and the sum of the
product along what gathers them, as in a gradient, `dW[R[rt], k, l] += A[..] * X[J[..], k] * G[I[rt,
it], l]`: `gathered_ws[it, k]` and `G_ws[it, l]` then. Tiles in the middle keep the order in memory
of what they are copied from.
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
from sparsetir.sparse_ir.expressions import as_dtype, cast, dtype_of, free_vars, is_one, uncast
from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.reduction import under
from sparsetir.sparse_ir.statements import loop_over

WHO = "inner_sums"


class _Product(NamedTuple):
    """A sum over products as a block has it.

    added : to which element, and on which conditions a term counts
    rows, columns : the loops along its rows and its last axis
    steps, terms : the outer and the innermost loop along the sum of the product
    elements : loops along the inner sum, of what is gathered alone
    gathered : factors of the inner sum
    matrix : the other factor, which is loaded
    """

    added: AtomicProduct
    rows: Any
    columns: Any
    steps: Any
    terms: Any
    elements: list[Any]
    gathered: list[Any]
    matrix: Any

    @property
    def order(self) -> list[Any]:
        """The loops over the inner sums, the one along the last axis of what is gathered last."""
        loads = [x for x in map(uncast, self.gathered) if isinstance(x, ir.TensorLoad)]
        turned = any(self.rows.loop_var in free_vars(x.indices[-1]) for x in loads)
        return [self.terms, self.rows] if turned else [self.rows, self.terms]


def inner_sums(func: tirx.PrimFunc, block: str, *, outer: int, dtype: str) -> tirx.PrimFunc:
    """A stage-II function whose block multiplies tiles of inner sums with tiles of a matrix.

    block : that adds products to an element atomically, in loops
    outer : how many of these, the outermost, a tile is for one visit of
    dtype : of the inner sums where they are factors; they are summed in that of the result

    Raises ScheduleError for blocks of another shape.
    """
    nest, around = tile_nest(WHO, func, block, outer)
    body = within(around, _Tile(_read(nest), block, dtype).body())
    return replaced(func, find_nest(WHO, func, block), body)


class _Tile:
    """The statements for one visit of the outer loops."""

    def __init__(self, product: _Product, block: str, dtype: str) -> None:
        self.product, self.block, self.dtype = product, block, dtype
        p = product
        place = p.added.place
        self.wide = dtype_of(place)
        source = p.matrix.source
        self.sums = tile_buffer([p.rows, p.columns], self.wide, f"{place.source.name}_ws", "local")
        self.inner = tile_buffer(p.order, dtype, "gathered_ws", "shared")
        name = f"{source.name}_ws"
        self.matrix = tile_buffer([p.terms, p.columns], dtype_of(p.matrix), name, "shared")

    def body(self) -> Any:
        p = self.product
        zero = tirx.BufferStore(self.sums, tirx.const(0, self.wide), at(p.rows, p.columns))
        sums = tirx.BufferLoad(self.sums, at(p.rows, p.columns))
        left = tirx.BufferLoad(self.inner, at(*p.order))
        right = tirx.BufferLoad(self.matrix, at(p.terms, p.columns))
        term = cast(left, self.wide) * cast(right, self.wide)
        add = tirx.BufferStore(self.sums, sums + term, at(p.rows, p.columns))
        visit = block_of(
            f"{self.block}_visit",
            tirx.SeqStmt(
                [
                    self._nest("gather", p.order, self._gather()),
                    self._nest("matrix", [p.terms, p.columns], self._matrix()),
                    self._nest("product", [p.rows, p.columns, p.terms], add),
                ]
            ),
        )
        written = under(self._known(p.rows, p.columns), p.added.add(sums))
        parts = [
            self._nest("start", [p.rows, p.columns], zero),
            loop_over(p.steps.loop_var, p.steps.extent, visit),
            self._nest("write", [p.rows, p.columns], written),
        ]
        buffers = [self.sums, self.inner, self.matrix]
        return block_of(f"{self.block}_tile", tirx.SeqStmt(parts), buffers)

    def _gather(self) -> Any:
        """The inner sum; a copy where there is one element, that is a factor as it is."""
        p = self.product
        place = at(*p.order)
        known = self._known(p.rows, p.steps, p.terms, *p.elements)
        elements = [x for x in p.elements if not is_one(x.extent)]
        alone = {
            x.loop_var: as_dtype(0, dtype_of(x.loop_var)) for x in p.elements if is_one(x.extent)
        }
        (first, *_) = p.gathered
        plain = uncast(first)
        if not elements and len(p.gathered) == 1 and dtype_of(plain) == self.dtype:
            zero = tirx.const(0, self.dtype)
            value = tirx.if_then_else(tirx.all(*known), plain, zero) if known else plain
            return substitute(tirx.BufferStore(self.inner, value, place), alone)
        term = first
        for factor in p.gathered[1:]:
            term = term * factor
        begin = tirx.BufferStore(self.inner, tirx.const(0, self.dtype), place)
        total = cast(tirx.BufferLoad(self.inner, place), self.wide) + term
        add: Any = under(known, tirx.BufferStore(self.inner, cast(total, self.dtype), place))
        for loop in reversed(elements):
            add = loop_over(loop.loop_var, loop.extent, add)
        return substitute(tirx.SeqStmt([begin, add]), alone)

    def _matrix(self) -> Any:
        p = self.product
        known, value = self._known(p.steps, p.terms, p.columns), p.matrix
        if known:
            value = tirx.if_then_else(tirx.all(*known), value, tirx.const(0, dtype_of(value)))
        return tirx.BufferStore(self.matrix, value, at(p.terms, p.columns))

    def _known(self, *loops: Any) -> list[Any]:
        """The conditions that these loops, and those around all, tell."""
        p = self.product
        inside = [p.rows, p.columns, p.steps, p.terms, *p.elements]
        return known_by(p.added.conditions, [*loops], inside)

    def _nest(self, step: str, loops: list[Any], body: Any) -> Any:
        return step_of(f"{self.block}_{step}", loops, body)


def _read(nest: Nest) -> _Product:
    added = atomic_product(nest.body)
    if added is None:
        _refuse(nest, "an element to be added to atomically")
    loops = {x.loop_var: x for x in nest.loops}
    *outer, last = added.place.indices
    columns = [loops[v] for v in free_vars(last) & set(loops)]
    rows = [loops[v] for v in set[Any]().union(*map(free_vars, outer)) & set(loops)]
    along = {x.loop_var for x in columns}
    over = [f for f in added.factors if free_vars(f) & along]
    gathered = [f for f in added.factors if not free_vars(f) & along]
    matrix = uncast(over[0]) if len(over) == 1 else None
    single = len(columns) == len(rows) == 1 and columns != rows
    if not single or not isinstance(matrix, ir.TensorLoad) or not gathered:
        _refuse(nest, "products of what is gathered for a row with a matrix over columns")
    summed = [x for x in nest.loops if x not in (*columns, *rows)]
    both = [x for x in summed if x.loop_var in free_vars(matrix)]
    elements = [x for x in summed if x not in both]
    constant = [*rows, *columns, *both[1:], *elements]
    fits = len(both) == 2 and all(isinstance(x.extent, tirx.IntImm) for x in constant)
    if not fits or rows[0].loop_var in free_vars(matrix):
        _refuse(
            nest,
            "a matrix over steps, terms and columns alone, in tiles of constant extents",
        )
    steps, terms = both
    product = _Product(added, rows[0], columns[0], steps, terms, elements, gathered, matrix)
    inner = {x.loop_var for x in [*rows, *both, *elements]}
    right = {x.loop_var for x in [*columns, *both]}
    written = {x.loop_var for x in [*rows, *columns]}
    for condition in added.conditions:
        used = free_vars(condition) & set(loops)
        if not any(used <= known for known in (inner, right, written)):
            _refuse(nest, "conditions of what is gathered, of the matrix or of the result alone")
    return product


def _refuse(nest: Nest, expected: str) -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'block': expected {expected}, got {nest.body} in block '{nest.name}'"
    )
