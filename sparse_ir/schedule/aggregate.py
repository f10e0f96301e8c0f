"""Aggregate gathered rows before multiplying them, a tile of rows at a time (SparseTIR, 4.4).

Factors of a sum of products that do not depend on the gathered elements are factored out of the
sum, and a tile of such sums is multiplied as a whole. Before, with tiles of rows from `ranges`::

    with T.sp_iter([R, I_ranges, I_tiles, T.part(I, I_part), J, K, L], "RSSSRRS", "rgms") as [...]:
        with T.init():
            Y[i, l] = 0.0
        Y[i, l] = Y[i, l] + A[r, i, j] * X[j, k] * W[r, k, l]

After `aggregate("Y", tiles, i, [j])`::

    G = T.alloc_sparse_buffer((I_places, K), "float32", scope="local")
    P = T.alloc_sparse_buffer((I_places, L), "float32", scope="local")
    with T.sp_iter([M, L], "SS", "rgms_init") as [m, l]:
        Y[m, l] = 0.0
    with T.sp_iter([R, I_ranges, I_tiles], "SSS", "rgms") as [r, i_range, i_tile]:
        with T.sp_iter([I_places, K], "SS", "rgms_start") as [p, k]:
            G[p, k] = 0.0
        with T.sp_iter([T.part(I, I_part), J, K], "SRS", "rgms_sums") as [i, j, k]:
            G[I_place[r, i], k] = G[I_place[r, i], k] + A[r, i, j] * X[j, k]
        with T.sp_iter([I_places, K, L], "SRS", "rgms_product") as [p, k, l]:
            with T.init():
                P[p, l] = 0.0
            P[p, l] = P[p, l] + G[p, k] * W[r, k, l]
        with T.sp_iter([T.part(I, I_part), L], "SS", "rgms_write") as [i, l]:
            Y[i, l] = Y[i, l] + P[I_place[r, i], l]

A spatial loop that sums vary over, such as one over blocks of features with a matrix each, stays in
all steps. The product is over all places of a tile, even if it holds fewer rows. Summation order
changes, and infinite factors may give NaN where they did not before. If `dtype` differs from the
result's, which visits of the loops around update, the whole result is accumulated in it and written
at the end, by `rgms_round`.

If the other factors vary over the rows, too, or over axes below them, each row multiplies its sums
by them and updates the result at once. For a sum over rows, such as the gradient
`W[r, k, l] = W[r, k, l] + A[r, i, j] * X[j, k] * G[i, l]`, after `aggregate("W", tiles, i, [j])`::

    with T.sp_iter([R], "S", "rgms") as [r]:
        with T.sp_iter([K, L], "SS", "rgms_init") as [k, l]:
            W[r, k, l] = 0.0
        with T.sp_iter([I_tiles], "R", "rgms_tiles") as [i_tile]:
            ...  # rgms_start and rgms_sums, as above
            with T.sp_iter([T.part(I, I_part), K, L], "RSS", "rgms_product") as [i, k, l]:
                W[r, k, l] = W[r, k, l] + G_sums[I_place[r, i], k] * G[i, l]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    declared,
    nodes_of,
    stores_of,
)
from sparsetir.sparse_ir.recipes.ranges import places_in_tiles
from sparsetir.sparse_ir.recipes.registry import facts_of
from sparsetir.sparse_ir.reduction import factors_of, reduction_of, widened
from sparsetir.sparse_ir.schedule.loops import Loop, SparseIterationRef, SpIter, changed, loops_of
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder, chosen_loops, load
from sparsetir.sparse_ir.schedule.workspaces import over_fresh_vars, workspace
from sparsetir.sparse_ir.tir import dtype_of, free_vars

NAME = "aggregate"


@primitive(reorders=True)
def aggregate(
    func: SparseFunc, buffer: str, at: SpIter, rows: SpIter, columns: Sequence[SpIter], *,
    dtype: str | None = None,
) -> tuple[SparseFunc, list[SparseIterationRef]]:  # fmt: skip
    """Sum the operands gathered by the rows of a tile, then multiply the tile of sums as a whole.

    Parameters
    ----------
    buffer : str
        Name of the result, which is a sum of products.
    at : SpIter
        The innermost of the loops around each tile.
    rows : SpIter
        Inside `at`, the rows of a tile, as created by `split` by positions and `ranges`.
    columns : sequence of SpIter
        Reductions inside `at` over which some factors vary; these factors vary over no loop that
        belongs to the other factors alone.
    dtype : str, optional
        The type of the sums; that of the buffer by default.

    Returns
    -------
    list of SparseIterationRef
        Start, sums, product, write; if factors vary over rows instead init, start, sums, product.
    """
    it, (last, mine, *summed) = chosen_loops(NAME, func, at, rows, *columns)
    loops = loops_of(it)
    outer = [loop.axes for loop in loops].index(last.axes) + 1
    made = _Aggregate(func, it, buffer, loops[:outer], loops[outer:], mine, summed)
    return made.run(dtype)


class _Aggregate(VisitOrder):
    def __init__(
        self, func: SparseFunc, it: SparseIteration, result: str, outer: list[Loop],
        inner: list[Loop], rows: Loop, columns: list[Loop],
    ) -> None:  # fmt: skip
        super().__init__(NAME, func, it, rows)
        self.outer, self.rows, self.columns = outer, rows, columns
        names = [x.name for x in inner]
        for loop in [rows, *columns]:
            if loop.name not in names:
                self.refuse(f"expected loops inside of the place of the sums, {names}, got "
                            f"'{loop.name}'; sparse_reorder can bring it there")  # fmt: skip
        if not columns or any(x.kinds != "R" for x in columns):
            self.refuse(
                "argument 'columns': expected one or more reduction loops, got "
                f"{[x.name for x in columns]}"
            )
        self.size = self._size()
        reduction = reduction_of(it.body)
        plain = reduction is not None and reduction.operator == "sum" and not reduction.conditions
        if not plain or len(stores_of(it.body)) != 1:
            self.refuse("expected a body of the form X[..] = X[..] + term, without conditions")
        assert reduction is not None
        self.store, self.term = reduction.store, reduction.term
        target = declared(func).buffer_of(self.store.buffer)
        if target is None or target.name != result:
            self.refuse(
                f"argument 'buffer': expected '{self.store.buffer.name}', which the iteration "
                f"writes, got {result!r}"
            )
        self.result = target
        self._divide(inner)

    def _size(self) -> int:
        """The number of rows of a tile."""
        node = self.rows.node
        if isinstance(node, PartAxis) and isinstance(node.axis, Axis):
            how = computed_parameters(self.func).get(str(node.by.indptr.name), {})
            tiles = facts_of(how.get("recipe")).tiles
            if tiles is not None and tiles.unless not in how:
                return int(how[tiles.size])
        return self.refuse(
            "argument 'rows': expected a loop over the rows of a tile of a number of them, "
            f"as split by positions and ranges make it, got '{self.rows.name}'"
        )

    def _divide(self, inner: list[Loop]) -> None:
        """Divide factors (summed before or not) and loops (of the sums, the product, or both)."""
        over = {v for x in self.columns for v in x.vars}
        factors = factors_of(self.term)
        first = [f for f in factors if free_vars(f) & over]
        then = [f for f in factors if not free_vars(f) & over]
        moving = {v for f in first for v in free_vars(f)}
        still = {v for f in then for v in free_vars(f)}
        written = {v for i in self.store.indices for v in free_vars(i)}
        if not first or not then:
            self.refuse("expected factors that vary over the columns, and others that do not")
        chosen = [x.axes for x in (self.rows, *self.columns)]
        rest = [x for x in inner if x.axes not in chosen]
        # Whether other factors vary over rows, or over axes below them.
        self.own = self.rows.var in still or any(getattr(x.node, "parent", None) for x in rest)
        self.shared = [x for x in rest if x.var in moving]
        self.alone = [x for x in rest if x.var not in moving]
        for loop in self.shared if self.own else rest:
            dense = isinstance(loop.node, Axis) and loop.node.kind == "dense_fixed"
            if not dense or not isinstance(loop.node.length, tirx.IntImm):
                self.refuse(
                    f"expected other loops of constant extent inside, got '{loop.name}'; bound or "
                    "split it first"
                )
            summed = loop in self.shared
            if self.own:
                continue
            if summed and loop.kinds == "S" and loop.var in written:
                self.alone.append(loop)  # both sums and products have an element for each
            elif loop.kinds != ("R" if summed else "S"):
                what = "a reduction, as sums vary over it" if summed else "spatial"
                self.refuse(f"expected '{loop.name}' to be {what}")
        self.alone = [x for x in rest if x in self.alone]
        self.rest = rest
        self.first, self.then = _product(first), _product(then)

    def run(self, dtype: str | None) -> tuple[SparseFunc, list[SparseIterationRef]]:
        """The rewritten function and its handles."""
        it, func, target = self.it, self.func, self.result
        total = dtype or target.dtype
        before: list[Any] = []
        if it.init is not None and not self.own:
            before = self.split_init()
        (at,) = self.loops(place=(self.dense("places", self.size), "S"))
        place = self._places()
        sums = workspace(func, f"{target.name}_sums", [at, *self.shared], total, "local")
        path = [load(place, *self._path())]
        shared, alone = ([x.var for x in xs] for xs in (self.shared, self.alone))
        own_alone = [x for x in self.alone if x not in self.shared]
        zero = tirx.const(0, total)
        steps = [
            self._step("start", [at, *self.shared], "S", sums, [at.var, *shared], zero),
            self._sum("sums", [self.rows, *self.columns, *self.shared], sums.var,
                      [*path, *shared], widened(self.first, total, _nothing)),
        ]  # fmt: skip
        self.buffers.append(sums)
        if self.own:
            return self._with_own_factors(steps, tirx.BufferLoad(sums.var, [*path, *shared]))
        product = workspace(func, f"{target.name}_product", [at, *self.alone], total, "local")
        to = self._wide(total) if total != target.dtype else target.var
        steps += [
            self._sum("product", [at, *self.shared, *own_alone], product.var,
                      [at.var, *alone],
                      tirx.BufferLoad(sums.var, [at.var, *shared])
                      * widened(self.then, total, _nothing), zero),
            self._sum("write", [self.rows, *self.alone], to, list(self.store.indices),
                      tirx.BufferLoad(product.var, [*path, *alone])),
        ]  # fmt: skip
        after: list[Any] = []
        self.buffers.append(product)
        if total != target.dtype:
            wide = SparseBuffer(var=to, axes=target.axes, handle=None)
            self.buffers.append(wide)
            before, after = self._rounded(before, wide)
        # The outer loops become spatial: their visits scatter, to rows that depend on them.
        around = [Loop(x.node, x.vars, "S" * len(x.kinds)) for x in self.outer]
        main = changed(it, around, init=None, body=tirx.SeqStmt(steps))
        out = self.replaced(*before, main, *after)
        return out, [SparseIterationRef(x.name) for x in steps]

    def _with_own_factors(self, sums: list[Any], to: Any) -> tuple[SparseFunc, list[Any]]:
        """The function whose rows multiply their sums by factors that vary over rows.

        sums : the steps before; to : the element of the sums
        """
        it, spatial = self.it, list(takewhile(lambda x: x.kinds == "S", self.outer))
        if self.result.dtype != dtype_of(to):
            self.refuse(f"argument 'dtype': expected {self.result.dtype}, that of the result")
        loops = [self.rows, *self.rest]
        term = to * widened(self.then, dtype_of(to), _nothing)
        at = list(self.store.indices)
        steps = [*sums, self._sum("product", loops, self.result.var, at, term)]
        refs = [SparseIterationRef(x.name) for x in steps]
        if it.init is None or not spatial:
            before = [] if it.init is None else self.split_init()
            main = changed(it, self.outer, init=None, body=tirx.SeqStmt(steps))
            return self.replaced(*before, main), refs
        last = self.outer[len(spatial) :]
        over = [x for x in [*last, *loops] if x.kinds == "S"]
        if last:
            around = changed(it, last, name=fresh_name(self.func, f"{it.name}_tiles"), init=None,
                             body=tirx.SeqStmt(steps), annotations={})  # fmt: skip
            steps = [over_fresh_vars(around)]
        begin = self._iteration("init", over, it.init, None)
        main = changed(it, spatial, init=None, body=tirx.SeqStmt([begin, *steps]))
        return self.replaced(main), [SparseIterationRef(begin.name), *refs]

    # -- the steps ----------------------------------------------------------------------------

    def _step(
        self, what: str, loops: list[Loop], kinds: str, buffer: SparseBuffer, at: list[Any],
        value: Any,
    ) -> SparseIteration:  # fmt: skip
        over = [Loop(x.node, x.vars, kinds) for x in loops]
        body = tirx.BufferStore(buffer.var, value, at)
        return self._iteration(what, over, body, None)

    def _sum(
        self, what: str, loops: list[Loop], to: Any, at: list[Any], term: Any, init: Any = None
    ) -> SparseIteration:
        """An iteration that adds terms to elements of a buffer."""
        indexed = {v for i in at for v in free_vars(i)}
        over = [Loop(x.node, x.vars, "S" if x.var in indexed else "R") for x in loops]
        body = tirx.BufferStore(to, tirx.BufferLoad(to, at) + term, at)
        return self._iteration(
            what, over, body, None if init is None else tirx.BufferStore(to, init, at)
        )

    def _iteration(self, what: str, loops: list[Loop], body: Any, init: Any) -> SparseIteration:
        name = fresh_name(self.func, f"{self.it.name}_{what}")
        step = changed(self.it, loops, name=name, init=init, body=body, annotations={})
        return over_fresh_vars(step)

    def _wide(self, dtype: str) -> Any:
        name = fresh_name(self.func, f"{self.result.name}_total")
        return buffer_var(list(self.result.var.ty.shape), dtype, name)

    def _rounded(self, before: list[Any], wide: SparseBuffer) -> tuple[list[Any], list[Any]]:
        """The init of the accumulator, and the iteration that writes the result from it."""
        if not before:
            self.refuse("argument 'dtype': expected an init for sums in another type than that of "
                        f"'{self.result.name}'")  # fmt: skip
        (first,) = before
        (store,) = nodes_of(tirx.BufferStore, first.body)
        at, total = list(store.indices), str(wide.var.ty.dtype)
        start = tirx.BufferStore(wide.var, widened(store.value, total, _nothing), at)
        value = tirx.Cast(self.result.dtype, tirx.BufferLoad(wide.var, at))
        last = over_fresh_vars(
            changed(first, name=fresh_name(self.func, f"{self.it.name}_round"),
                    body=tirx.BufferStore(self.result.var, value, at))
        )  # fmt: skip
        return [changed(first, body=start)], [last]

    def _places(self) -> SparseBuffer:
        """The number of each row in its tile: a computed buffer over rows."""
        node = self.rows.node
        handle = self.array("place", places_in_tiles, starts=node.by.indptr, size=self.size)
        return self.bound(f"{self.rows.name}_places_of", node.axis.ancestors(), handle)

    def _path(self) -> list[Any]:
        """The coordinates of a row and its ancestors."""
        known = {a.name: v for a, v, _ in self.it.axis_of()}
        return [known[a.name] for a in self.rows.node.axis.ancestors()]


def _product(factors: list[Any]) -> Any:
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product


def _nothing(_: Any) -> Any:
    return None
