"""Rows of similar length side by side, one element of each at a time (SELL-C-sigma).

Rows of a few elements are too short for a loop of their own: their trip counts are mispredicted.
Before::

    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            C[i] = 0.0
        C[i] = C[i] + A[i, j] * B[j]

After `sell_slices(i, j, 16)`, rows sorted by length within windows are side by side, a slice has as
many steps as its longest row has elements, and `T.Select` masks steps past the end of a row::

    I_slices = T.dense_fixed(I_slices_count)
    I_steps = T.dense_variable(I_slices, (I_steps_count, I_steps_count), I_steps_ptr)
    I_lanes = T.dense_fixed(16)
    with T.sp_iter([I_slices, I_steps, I_lanes], "SRS", "spmv") as [i_slice, i_step, i_lane]:
        with T.init():
            C[I_rows[i_slice * 16 + i_lane]] = 0.0
        C[I_rows[i_slice * 16 + i_lane]] = C[...] + T.Select(
            i_step < I_lengths[i_slice * 16 + i_lane],
            A[I_slots[i_slice, i_step, i_lane]] * B[J_slots[i_slice, i_step, i_lane]], 0.0)

Long rows would differ too much in length. They have a separate iteration, in vectors of 16
elements of a row; the last vector ends with the row::

    with T.sp_iter([I_long, I_vectors, I_vector_lanes], "SRR", "spmv_long") as [p, u, v]:
        C[I_long_rows[p]] = C[..] + T.Select(
            T.min(I_starts[p] + u * 16, I_ends[p]) + v >= I_starts[p] + u * 16,
            A[T.min(I_starts[p] + u * 16, I_ends[p]) + v] * B[J_at[..]], 0.0)

So do the fewer than 16 rows that fill no slice, one element after the other: `"spmv_left"`. Arrays
of values are unchanged: buffers over rows and columns lie over positions. The arrays that describe
the slices are computed. `pack` stores values in the order of the slots.

With `diagonals=30`, 16 consecutive rows are a slice of diagonals if nonzeros fill 30 % of these:
columns are then consecutive, so that B is loaded and not gathered, and a mask says which rows have
a nonzero. Finite elements, stencils and bands consist of such slices::

    with T.sp_iter([I_bands, I_diagonals, I_band_lanes], "SRS", "spmv_diagonals") as [s, d, v]:
        C[I_band_rows[s] + v] = C[..] + T.Select(
            T.shift_right(I_masks[s, d], v) % 2 == 1,
            A[I_band_slots[s, d, v]] * B[J_first[s, d] + v], 0.0)

(Kreutzer, Hager, Wellein, Fehske and Bishop, "A unified sparse matrix data format for efficient
general sparse matrix-vector multiplication on modern processors with wide SIMD units", SIAM Journal
on Scientific Computing 36(5), 2014.)
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import Axis, SparseBuffer, SparseFunc, SparseIteration
from sparsetir.sparse_ir.recipes import diagonals as of_bands
from sparsetir.sparse_ir.recipes import slices as recipes
from sparsetir.sparse_ir.reduction import add_guards, masked
from sparsetir.sparse_ir.schedule.loops import Loop, SpIter, change_of, handle_of, loops_of
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.steps import over_fresh_vars
from sparsetir.sparse_ir.schedule.visit_order import ElementOrder, elements_of_rows, load
from sparsetir.sparse_ir.tir import as_dtype

NAME = "sell_slices"
MASKED = 32  # rows of a slice of diagonals, at most: bits of a mask


@primitive(reorders=True)
def sell_slices(
    func: SparseFunc, rows: SpIter, columns: SpIter, lanes: int, *,
    longest: int | str = 256, window: int | str = 4096, filled: int | str = 90,
    diagonals: int | None = None,
) -> tuple[SparseFunc, list[SpIter]]:  # fmt: skip
    """Process rows of similar length side by side, one element of each at a time.

    Parameters
    ----------
    rows : SpIter
        A spatial loop over a dense axis.
    columns : SpIter
        A loop over the sparse_variable axis under it, a reduction whose terms may be skipped (a
        sum, a product, a maximum or a minimum); no other iteration visits this axis.
    lanes : int
        Rows per slice, and elements per vector of a long row.
    longest, window, filled : int or str
        The least number of elements of a long row; rows sorted together; the percentage of
        a slice's slots that long rows must fill. Numbers that are compiled in, or names of computed
        parameters, which have these defaults unless the plan overrides them.
    diagonals : int, optional
        The percentage of slots that nonzeros must fill for a slice of diagonals, of at most 32
        rows; by default there are none.

    Returns
    -------
    list of SpIter
        The loops over slices, steps, lanes; long rows, vectors, their lanes; other rows, elements;
        with `diagonals` also those over slices, diagonals, lanes.
    """
    change = change_of(NAME, func, rows, columns)
    change.check_count("lanes", lanes, below=2**15)
    order = elements_of_rows(change, reduces=", which can be without a term")
    numbers: dict[str, Any] = {"longest": longest, "window": window, "filled": filled}
    defaults = {"longest": 256, "window": 4096, "filled": 90}
    for name, value in numbers.items():
        order.check_count(name, value, below=2**31, or_name=True)
        numbers[name] = order.choice(value, defaults[name])
    if diagonals is not None:
        order.check_count("diagonals", diagonals, below=101)
        order.check_count("lanes", lanes, below=MASKED + 1)
    return _Slices(order, lanes).run(**numbers, diagonals=diagonals)


class _Slices:
    def __init__(self, order: ElementOrder, lanes: int) -> None:
        self.order, self.lanes = order, lanes
        self.indptr, self.reduction = order.column.indptr, order.reduced()

    def run(
        self, longest: Any, window: Any, filled: Any, diagonals: int | None
    ) -> tuple[SparseFunc, list[SpIter]]:
        """The rewritten function and the handles."""
        order, which = self.order, {"indptr": self.indptr, "lanes": self.lanes}
        bands = []
        if diagonals is not None:
            band, which["taken"] = self._diagonals(diagonals)
            bands.append(band)
        lengths = {**which, "longest": longest}
        self.sorted = self._table(
            "order", [order.row], recipes.row_order, **lengths, window=window, filled=filled
        )
        count = order.number("slices_count", recipes.slice_count, **lengths, filled=filled)
        left = order.number("left_count", recipes.left_count, **lengths)
        at = order.bound(f"{order.column.name}_at", [order.positions], order.column.indices)
        slices = self._slices(count)
        long = order.number("long_count", recipes.long_count, **which, slices=count, left=left)
        rows = [slices, self._long(long, left, at), self._left(left)]
        handles = [
            handle_of(it, loop)
            for it, number in zip([*rows, *bands], (3, 3, 2, 3), strict=False)
            for loop in loops_of(it)[:number]
        ]
        return order.replaced(*bands, *rows), handles

    def _slices(self, count: Any) -> SparseIteration:
        """The iteration over slices, one element of each row at a time."""
        order, lanes = self.order, self.lanes
        slices, lane = order.dense("slices", count), order.dense("lanes", lanes)
        places = [order.dense("places", slices.length * lane.length)]
        rows = self._table(
            "rows", places, recipes.rows_of_slices, order=self.sorted, slices=count, lanes=lanes
        )
        arrays = {"indptr": self.indptr, "rows": rows}
        lengths = self._table("lengths", places, recipes.lengths_of_rows, **arrays)
        arrays["lengths"] = lengths
        step = order.ragged("steps", slices, recipes.slice_ptr, lengths=lengths, lanes=lanes)
        axes = [slices, step, lane]
        slots = self._table(
            "slots", axes, recipes.slice_slots, **arrays, ptr=step.indptr, lanes=lanes
        )
        columns = order.columns_at("slots", axes, slots)
        loops = order.loops_over(slice=(slices, "S"), step=(step, "R"), lane=(lane, "S"))
        s, w, v = (loop.var for loop in loops)
        place = s * lane.length + v
        return self._iteration(
            order.it.name, loops, load(rows, place), load(columns, s, w, v), load(slots, s, w, v),
            w < load(lengths, place),
        )  # fmt: skip

    def _long(self, count: Any, left: Any, at: SparseBuffer) -> SparseIteration:
        """The iteration over long rows, in vectors of their elements."""
        order, lanes = self.order, self.lanes
        long, lane = order.dense("long", count), order.dense("vector_lanes", lanes)
        rows = self._table(
            "long_rows", [long], recipes.long_rows, order=self.sorted, left=left, longs=count
        )
        arrays = {"indptr": self.indptr, "rows": rows}
        vector = order.ragged("vectors", long, recipes.vector_ptr, **arrays, lanes=lanes)
        ends = self._table("ends", [long], recipes.last_vectors, **arrays, lanes=lanes)
        starts = self._table("starts", [long], recipes.row_starts, **arrays)
        loops = order.loops_over(long=(long, "S"), vector=(vector, "R"), lane=(lane, "R"))
        p, u, v = (loop.var for loop in loops)
        begin = load(starts, p) + u * lane.length
        position = tirx.min(begin, load(ends, p)) + v
        name = fresh_name(order.func, f"{order.it.name}_long")
        return self._iteration(
            name, loops, load(rows, p), load(at, position), position, position >= begin
        )

    def _left(self, count: Any) -> SparseIteration:
        """The iteration over the rows that fill no slice."""
        order = self.order
        left = order.dense("left", count)
        rows = self._table("left_rows", [left], recipes.left_rows, order=self.sorted, left=count)
        arrays = {"indptr": self.indptr, "rows": rows}
        element = order.ragged("left_elements", left, recipes.offsets_of_rows, **arrays)
        axes = [left, element]
        slots = self._table(
            "left_slots", axes, recipes.positions_of_rows, **arrays, offsets=element.indptr
        )
        columns = order.columns_at("left_slots", axes, slots)
        loops = order.loops_over(left=(left, "S"), element=(element, "R"))
        q, x = (loop.var for loop in loops)
        name = fresh_name(order.func, f"{order.it.name}_left")
        return self._iteration(
            name, loops, load(rows, q), load(columns, q, x), load(slots, q, x), None
        )

    def _diagonals(self, percent: int) -> tuple[SparseIteration, SparseBuffer]:
        """The iteration over slices of diagonals, one diagonal at a time; and first rows."""
        order, column = self.order, self.order.column
        rows = {"indptr": self.indptr, "lanes": self.lanes}
        where = {**rows, "indices": column.indices, "n": column.length}
        held = order.array("held", of_bands.slice_diagonals, **where, dense=percent)
        first = order.array("band_rows", of_bands.first_rows, **rows, diagonals=held)
        bands = order.dense(
            "bands", order.number("bands_count", of_bands.diagonal_slice_count, rows=first)
        )
        lane = order.dense("band_lanes", self.lanes)
        which = {"indptr": self.indptr, "diagonals": held}
        diagonal = order.ragged(
            "diagonals", bands, of_bands.diagonal_ptr, **which, rows=first, lanes=self.lanes
        )
        axes = [bands, diagonal, lane]
        order.bound(f"{order.row.name}_held", axes, held)
        starts = order.bound(f"{order.row.name}_band_rows", [bands], first)
        masks = self._table("masks", axes[:2], of_bands.diagonal_masks, diagonals=held)
        slots = self._table("band_slots", axes, of_bands.diagonal_slots, **which)
        name = f"{column.name}_first"
        columns = order.table(name, axes[:2], of_bands.first_columns, **where, diagonals=held)
        loops = order.loops_over(band=(bands, "S"), diagonal=(diagonal, "R"), band_lane=(lane, "S"))
        s, d, v = (loop.var for loop in loops)
        bit = tirx.floormod(tirx.shift_right(load(masks, s, d), v), as_dtype(2, order.idtype))
        name = fresh_name(order.func, f"{order.it.name}_diagonals")
        row, at = load(starts, s) + v, load(columns, s, d) + v
        valid = tirx.EQ(bit, as_dtype(1, order.idtype))
        return self._iteration(name, loops, row, at, load(slots, s, d, v), valid), starts

    def _iteration(
        self, name: str, loops: list[Loop], row: Any, column: Any, position: Any, valid: Any
    ) -> SparseIteration:
        """The iteration with other loops, whose visits are of the element at `position` if `valid`.

        row, column : coordinates of the element
        """
        order, body = self.order, self.order.it.body
        if valid is not None:
            body = add_guards(self.reduction.conditions, masked(self.reduction, valid))
        return over_fresh_vars(
            order.visit([*loops, *order.rest], position, [row, column], name=name, body=body)
        )

    def _table(self, what: str, axes: list[Axis], recipe: Any, **how: Any) -> SparseBuffer:
        return self.order.table(f"{self.order.row.name}_{what}", axes, recipe, **how)
