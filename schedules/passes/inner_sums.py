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
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import tvm_ffi
from tvm import ir, tirx

from sparsetir.schedules.passes.nests import (
    Nest,
    block_of,
    find_nest,
    is_choice,
    is_zero,
    replaced,
)
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import buffer_var, map_expr, nodes_of, substitute
from sparsetir.sparse_ir.position_space import as_dtype, dtype_of
from sparsetir.sparse_ir.reduction import factors_of, taken_apart, under
from sparsetir.sparse_ir.statements import loop_over, loop_with
from sparsetir.sparse_ir.translate import free_vars

__all__ = ["inner_sums"]

WHO = "inner_sums"
ATOMIC_ADD = "atomicAdd"


class _Product(NamedTuple):
    """A sum over products as a block has it.

    place : the element that is added to
    rows, columns : the loops along its rows and its last axis
    steps, terms : the outer and the innermost loop along the sum of the product
    elements : loops along the inner sum, of what is gathered alone
    gathered : factors of the inner sum
    matrix : the other factor, which is loaded
    conditions : that a term counts
    """

    place: Any
    rows: Any
    columns: Any
    steps: Any
    terms: Any
    elements: list[Any]
    gathered: list[Any]
    matrix: Any
    conditions: list[Any]


def inner_sums(func: tirx.PrimFunc, block: str, *, outer: int, dtype: str) -> tirx.PrimFunc:
    """A stage-II function whose block multiplies tiles of inner sums with tiles of a matrix.

    block : that adds products to an element atomically, in loops
    outer : how many of these, the outermost, a tile is for one visit of
    dtype : of the inner sums where they are factors; they are summed in that of the result

    Raises ScheduleError for blocks of another shape.
    """
    nest = find_nest(WHO, func, block)
    around = nest.loops[:outer]
    single = {x.loop_var: as_dtype(0, dtype_of(x.loop_var)) for x in around if _is_one(x)}
    nest = Nest(nest.name, nest.loops[outer:], substitute(nest.body, single))
    body = _Tile(_read(nest), block, dtype).body()
    for loop in reversed([x for x in around if not _is_one(x)]):
        body = loop_with(loop, body=body)
    return replaced(func, find_nest(WHO, func, block), body)


class _Tile:
    """The statements for one visit of the outer loops."""

    def __init__(self, product: _Product, block: str, dtype: str) -> None:
        self.product, self.block, self.dtype = product, block, dtype
        p = product
        self.wide = dtype_of(p.place)
        size = {x.loop_var: int(x.extent) for x in (p.rows, p.columns, p.terms)}
        rows, columns, terms = size.values()
        source = p.matrix.source
        self.sums = buffer_var([rows, columns], self.wide, f"{p.place.source.name}_ws", "local")
        self.inner = buffer_var([rows, terms], dtype, "gathered_ws", "shared")
        self.matrix = buffer_var(
            [terms, columns], dtype_of(p.matrix), f"{source.name}_ws", "shared"
        )

    def body(self) -> Any:
        p = self.product
        zero = tirx.BufferStore(self.sums, tirx.const(0, self.wide), _at(p.rows, p.columns))
        sums = tirx.BufferLoad(self.sums, _at(p.rows, p.columns))
        left = tirx.BufferLoad(self.inner, _at(p.rows, p.terms))
        right = tirx.BufferLoad(self.matrix, _at(p.terms, p.columns))
        term = _cast(left, self.wide) * _cast(right, self.wide)
        add = tirx.BufferStore(self.sums, sums + term, _at(p.rows, p.columns))
        visit = block_of(
            f"{self.block}_visit",
            tirx.SeqStmt(
                [
                    self._nest("gather", [p.rows, p.terms], self._gather()),
                    self._nest("matrix", [p.terms, p.columns], self._matrix()),
                    self._nest("product", [p.rows, p.columns, p.terms], add),
                ]
            ),
        )
        write = tirx.call_extern(self.wide, ATOMIC_ADD, tirx.address_of(p.place), sums)
        written = under(self._known(p.rows, p.columns), tirx.Evaluate(write))
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
        at = _at(p.rows, p.terms)
        known = self._known(p.rows, p.steps, p.terms, *p.elements)
        elements = [x for x in p.elements if not _is_one(x)]
        alone = {x.loop_var: as_dtype(0, dtype_of(x.loop_var)) for x in p.elements if _is_one(x)}
        (first, *_) = p.gathered
        plain = _uncast(first)
        if not elements and len(p.gathered) == 1 and dtype_of(plain) == self.dtype:
            zero = tirx.const(0, self.dtype)
            value = tirx.if_then_else(tirx.all(*known), plain, zero) if known else plain
            return substitute(tirx.BufferStore(self.inner, value, at), alone)
        term = first
        for factor in p.gathered[1:]:
            term = term * factor
        begin = tirx.BufferStore(self.inner, tirx.const(0, self.dtype), at)
        total = _cast(tirx.BufferLoad(self.inner, at), self.wide) + term
        add: Any = under(known, tirx.BufferStore(self.inner, _cast(total, self.dtype), at))
        for loop in reversed(elements):
            add = loop_over(loop.loop_var, loop.extent, add)
        return substitute(tirx.SeqStmt([begin, add]), alone)

    def _matrix(self) -> Any:
        p = self.product
        known, value = self._known(p.steps, p.terms, p.columns), p.matrix
        if known:
            value = tirx.if_then_else(tirx.all(*known), value, tirx.const(0, dtype_of(value)))
        return tirx.BufferStore(self.matrix, value, _at(p.terms, p.columns))

    def _known(self, *loops: Any) -> list[Any]:
        """The conditions that these loops, and those around all, tell."""
        others = {x.loop_var for x in self._loops()} - {x.loop_var for x in loops}
        return [c for c in self.product.conditions if not free_vars(c) & others]

    def _loops(self) -> list[Any]:
        p = self.product
        return [p.rows, p.columns, p.steps, p.terms, *p.elements]

    def _nest(self, step: str, loops: list[Any], body: Any) -> Any:
        """A block in loops of its own variables."""
        inside = nodes_of(tirx.For, body)
        fresh = {x.loop_var: _fresh(x.loop_var) for x in [*loops, *inside]}
        body = block_of(f"{self.block}_{step}", substitute(body, fresh))
        for loop in reversed(loops):
            body = loop_over(fresh[loop.loop_var], loop.extent, body)
        return body


def _read(nest: Nest) -> _Product:
    conditions, added = taken_apart(nest.body)
    call: Any = added.value if isinstance(added, tirx.Evaluate) else None
    if getattr(getattr(call, "op", None), "name", "") != "tirx.call_extern" or (
        str(getattr(call.args[0], "value", "")) != ATOMIC_ADD
    ):
        _refuse(nest, "an element to be added to atomically")
    place, loops = call.args[1].args[0], {x.loop_var: x for x in nest.loops}
    found = [c for condition in conditions for c in _each(condition)]
    factors = []
    for factor in factors_of(call.args[2]):
        plain, more = _without_choice(factor)
        factors.append(plain)
        found += more
    *outer, last = place.indices
    columns = [loops[v] for v in free_vars(last) & set(loops)]
    rows = [loops[v] for v in set[Any]().union(*map(free_vars, outer)) & set(loops)]
    along = {x.loop_var for x in columns}
    over = [f for f in factors if free_vars(f) & along]
    gathered = [f for f in factors if not free_vars(f) & along]
    matrix = _uncast(over[0]) if len(over) == 1 else None
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
    product = _Product(
        place, rows[0], columns[0], steps, terms, elements, gathered, matrix, _different(found)
    )
    inner = {x.loop_var for x in [*rows, *both, *elements]}
    right = {x.loop_var for x in [*columns, *both]}
    written = {x.loop_var for x in [*rows, *columns]}
    for condition in product.conditions:
        used = free_vars(condition) & set(loops)
        if not any(used <= known for known in (inner, right, written)):
            _refuse(nest, "conditions of what is gathered, of the matrix or of the result alone")
    return product


def _each(condition: Any) -> list[Any]:
    if isinstance(condition, tirx.And):
        return [*_each(condition.a), *_each(condition.b)]
    if isinstance(condition, ir.Call) and getattr(condition.op, "name", "").endswith(".likely"):
        return _each(condition.args[0])
    return [condition]


def _different(conditions: list[Any]) -> list[Any]:
    out: list[Any] = []
    for condition in conditions:
        if not any(tvm_ffi.structural_equal(condition, other) for other in out):
            out.append(condition)
    return out


def _without_choice(factor: Any) -> tuple[Any, list[Any]]:
    """A factor, and the conditions without which it is zero."""
    found: list[Any] = []

    def visit(call: Any) -> Any:
        if not is_choice(call) or not is_zero(call.args[2]):
            return call
        found.extend(_each(call.args[0]))
        return call.args[1]

    return map_expr(factor, [(ir.Call, visit)]), found


def _at(*loops: Any) -> list[Any]:
    return [x.loop_var for x in loops]


def _fresh(var: Any) -> Any:
    return tirx.Var(var.name, dtype_of(var))


def _is_one(loop: Any) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1


def _uncast(expr: Any) -> Any:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _cast(expr: Any, dtype: str) -> Any:
    return expr if dtype_of(expr) == dtype else tirx.Cast(dtype, expr)


def _refuse(nest: Nest, expected: str) -> NoReturn:
    raise ScheduleError(
        f"{WHO}: argument 'block': expected {expected}, got {nest.body} in block '{nest.name}'"
    )
