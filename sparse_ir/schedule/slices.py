"""Rows of about the same length side by side, one element of each at a time (SELL-C-sigma).

Rows of a few elements leave no time for a loop of their own: each ends where no processor foresees
it. Before::

    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            C[i] = 0.0
        C[i] = C[i] + A[i, j] * B[j]

After `slices(i, j, 16)`, rows sorted by length within windows lie side by side, a slice has as many
steps as its longest row has elements, and `T.Select` leaves out what is beyond a row::

    I_slices = T.dense_fixed(I_slices_count)
    I_steps = T.dense_variable(I_slices, (I_steps_count, I_steps_count), I_steps_ptr)
    I_lanes = T.dense_fixed(16)
    with T.sp_iter([I_slices, I_steps, I_lanes], "SRS", "spmv") as [i_slice, i_step, i_lane]:
        with T.init():
            C[I_rows[i_slice * 16 + i_lane]] = 0.0
        C[I_rows[i_slice * 16 + i_lane]] = C[...] + T.Select(
            i_step < I_lengths[i_slice * 16 + i_lane],
            A[I_slots[i_slice, i_step, i_lane]] * B[J_slots[i_slice, i_step, i_lane]], 0.0)

Long rows would differ too much to lie side by side. They are an iteration of their own, by vectors
of 16 elements of a row, of which the last ends with the row::

    with T.sp_iter([I_long, I_vectors, I_vector_lanes], "SRR", "spmv_long") as [p, u, v]:
        C[I_long_rows[p]] = C[..] + T.Select(
            T.min(I_starts[p] + u * 16, I_ends[p]) + v >= I_starts[p] + u * 16,
            A[T.min(I_starts[p] + u * 16, I_ends[p]) + v] * B[J_at[..]], 0.0)

So are the fewer than 16 rows that fill no slice, one element after the other: `"spmv_left"`. Values
are the arrays that they were: buffers over rows and columns lie over positions. What says where
rows are is computed. `packed` brings values into the order of the slots.

(Kreutzer, Hager, Wellein, Fehske and Bishop, "A unified sparse matrix data format for efficient
general sparse matrix-vector multiplication on modern processors with wide SIMD units", SIAM Journal
on Scientific Computing 36(5), 2014.)
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.expressions import as_dtype
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    substitute,
)
from sparsetir.sparse_ir.recipes import in_order
from sparsetir.sparse_ir.recipes import slices as recipes
from sparsetir.sparse_ir.recipes.positions import last_of
from sparsetir.sparse_ir.reduction import reduction_of, under, where
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.elements import Elements, other_loops, rows_and_columns
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    changed,
    handle_of,
    iteration_of,
    loops_of,
    place_of,
    refuse_order,
    replaced,
)
from sparsetir.sparse_ir.schedule.primitives import primitive

__all__ = ["slices"]

WHO = "slices"


@primitive
def slices(
    func: SparseFunc, rows: SpIter, columns: SpIter, lanes: int, *,
    longest: int | str = 256, window: int | str = 4096, filled: int | str = 90,
) -> tuple[SparseFunc, list[SpIter]]:  # fmt: skip
    """Lay rows of about the same length side by side, one element of each at a time.

    Parameters
    ----------
    rows : SpIter
        Over a dense axis, spatial.
    columns : SpIter
        Over the sparse_variable axis under it, a reduction that may end without some terms (a sum,
        a product, a maximum or a minimum); no other iteration visits it.
    lanes : int
        Rows of a slice, and elements of a vector of a long row.
    longest, window, filled : int or str
        Elements from which on a row is a long one; rows sorted together; percent of a slice's slots
        that long rows must fill. Numbers that are compiled in, or names of computed parameters,
        whose values are these defaults unless whoever makes a plan says otherwise.

    Returns
    -------
    list of SpIter
        Slices, steps, lanes; long rows, vectors, their lanes; other rows, elements.
    """
    it = iteration_of(WHO, func, rows)
    refuse_order(WHO, func, it)
    loops = loops_of(it)
    chosen = [loops[place_of(WHO, func, it, handle)] for handle in (rows, columns)]
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 0 < lanes < 2**15:
        Cut(WHO, func, it, chosen[0]).refuse(
            f"argument 'lanes': expected a positive integer, got {lanes!r}"
        )
    made = _Slices(func, it, chosen[0], chosen[1], lanes)
    numbers = {
        name: made.choice(name, value, default)
        for name, value, default in (
            ("longest", longest, 256), ("window", window, 4096), ("filled", filled, 90)
        )
    }  # fmt: skip
    return made.run(**numbers)


class _Slices(Elements):
    def __init__(
        self, func: SparseFunc, it: SparseIteration, rows: Loop, columns: Loop, lanes: int
    ) -> None:
        cut = Cut(WHO, func, it, rows)
        row, column = rows_and_columns(cut, rows, columns)
        reduction = reduction_of(it.body)
        if reduction is None:
            cut.refuse(
                "expected a body of the form X[..] = X[..] + term (or *, max, min), which can be "
                "without a term"
            )
        self.reduction: Any = reduction
        self.rest = other_loops(cut, it, rows, columns)
        super().__init__(WHO, func, it, rows, [row, column], [rows.var, columns.var])
        self.lanes = lanes

    def choice(self, name: str, value: int | str, default: int) -> Any:
        """A number as recipes take it: itself, or a computed parameter of that name."""
        if isinstance(value, str) and value.isidentifier():
            return self.named(self.number(value, {"recipe": "number", "value": default}, True))
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            self.refuse(f"argument '{name}': expected a positive integer or a name, got {value!r}")
        return value

    def run(self, longest: Any, window: Any, filled: Any) -> tuple[SparseFunc, list[SpIter]]:
        """The rewritten function and the handles."""
        which: dict[str, Any] = {"indptr": self.named(self.column.indptr), "lanes": self.lanes}
        lengths = {**which, "longest": longest}
        order = self.table(
            f"{self.row.name}_order", [self.row], recipes.row_order.__name__,
            **lengths, window=window, filled=filled,
        )  # fmt: skip
        self.order = self.named(order.handle)
        count = self._count(recipes.slice_count, "slices", **lengths, filled=filled)
        left = self._count(recipes.left_count, "left", **lengths)
        at = self.bound(f"{self.column.name}_at", [self.positions], self.column.indices)
        made = [
            self._slices(count),
            self._long(self._count(recipes.long_count, "long", **which, slices=count, left=left),
                       left, at),
            self._left(left),
        ]  # fmt: skip
        func = replaced(
            WHO, self.moved_function(), self.it, tirx.SeqStmt(made), axes=self.axes,
            buffers=self.buffers, params=self.params, trusted=False,
        )  # fmt: skip
        handles = [
            handle_of(it, loop)
            for it, number in zip(made, (3, 3, 2), strict=True)
            for loop in loops_of(it)[:number]
        ]
        return func, handles

    def _slices(self, count: str) -> SparseIteration:
        """One element of each row of a slice at a time."""
        indptr, lanes = self.named(self.column.indptr), self.lanes
        slice_, lane = self._dense("slices", count), self._dense("lanes", lanes)
        places = self.axis("places", kind="dense_fixed", length=slice_.length * lane.length)
        rows = self._table(
            "rows", [places], recipes.rows_of_slices, order=self.order, slices=count, lanes=lanes
        )
        lengths = self._table(
            "lengths", [places], recipes.lengths_of_rows, indptr=indptr, rows=self._of(rows)
        )
        step = self._ragged(
            "steps", slice_, recipes.slice_ptr, lengths=self._of(lengths), lanes=lanes
        )
        axes = [slice_, step, lane]
        slots = self._table(
            "slots", axes, recipes.slice_slots, indptr=indptr, rows=self._of(rows),
            lengths=self._of(lengths), ptr=self.named(step.indptr), lanes=lanes,
        )  # fmt: skip
        columns = self._columns("slots", axes, slots)
        s, w, v = self._vars("slice", "step", "lane")
        place = s * as_dtype(lanes, self.idtype) + v
        return self._iteration(
            self.it.name, [Loop(slice_, [s], "S"), Loop(step, [w], "R"), Loop(lane, [v], "S")],
            _at(rows, place), _at(columns, s, w, v), _at(slots, s, w, v), w < _at(lengths, place),
        )  # fmt: skip

    def _long(self, count: str, left: str, at: SparseBuffer) -> SparseIteration:
        """Vectors of the elements of long rows."""
        indptr, lanes = self.named(self.column.indptr), self.lanes
        long, lane = self._dense("long", count), self._dense("vector_lanes", lanes)
        rows = self._table(
            "long_rows", [long], recipes.long_rows, order=self.order, left=left, longs=count
        )
        given = {"indptr": indptr, "rows": self._of(rows), "lanes": lanes}
        vector = self._ragged("vectors", long, recipes.vector_ptr, **given)
        ends = self._table("ends", [long], recipes.last_vectors, **given)
        del given["lanes"]
        starts = self._table("starts", [long], recipes.row_starts, **given)
        p, u, v = self._vars("long", "vector", "lane")
        begin = _at(starts, p) + u * as_dtype(lanes, self.idtype)
        position = tirx.min(begin, _at(ends, p)) + v
        return self._iteration(
            self._name(f"{self.it.name}_long", []),
            [Loop(long, [p], "S"), Loop(vector, [u], "R"), Loop(lane, [v], "R")],
            _at(rows, p), _at(at, position), position, position >= begin,
        )  # fmt: skip

    def _left(self, count: str) -> SparseIteration:
        """The rows that fill no slice."""
        indptr = self.named(self.column.indptr)
        left = self._dense("left", count)
        rows = self._table("left_rows", [left], recipes.left_rows, order=self.order, left=count)
        given = {"indptr": indptr, "rows": self._of(rows)}
        element = self._ragged("left_elements", left, recipes.offsets_of_rows, **given)
        given["offsets"] = self.named(element.indptr)
        axes = [left, element]
        slots = self._table("left_slots", axes, recipes.positions_of_rows, **given)
        columns = self._columns("left_slots", axes, slots)
        q, x = self._vars("left", "element")
        return self._iteration(
            self._name(f"{self.it.name}_left", []),
            [Loop(left, [q], "S"), Loop(element, [x], "R")],
            _at(rows, q), _at(columns, q, x), _at(slots, q, x), None,
        )  # fmt: skip

    def _iteration(
        self, name: str, loops: list[Loop], row: Any, column: Any, position: Any, valid: Any
    ) -> SparseIteration:
        """The iteration over other loops, which visit the element at a position where it is valid.

        row, column : coordinates of the element
        """
        body, init = self.it.body, self.it.init
        if valid is not None:
            body = under(self.reduction.conditions, where(self.reduction, valid))
        body = self.rewritten(body, position, [row, column])
        init = None if init is None else self.rewritten(init, position, [row, column])
        fresh = {v: tirx.Var(v.name, v.ty.dtype) for x in self.rest for v in x.vars}
        rest = [Loop(x.node, [fresh[v] for v in x.vars], x.kinds) for x in self.rest]
        body, init = (None if x is None else substitute(x, fresh) for x in (body, init))
        return changed(self.it, [*loops, *rest], name=name, body=body, init=init)

    # -- declarations -------------------------------------------------------------------------

    def _count(self, recipe: Any, what: str, **how: Any) -> str:
        """A number of rows or slices, as recipes take it."""
        return self.named(self.number(f"{what}_count", {"recipe": recipe.__name__, **how}))

    def _dense(self, what: str, length: int | str) -> Axis:
        """A dense axis; its length as recipes take it."""
        if isinstance(length, str):
            size: Any = next(p for p in self.params if str(p.name) == length[1:])
        else:
            size = as_dtype(length, self.idtype)
        return self.axis(what, kind="dense_fixed", length=size)

    def _ragged(self, what: str, parent: Axis, recipe: Any, **how: Any) -> Axis:
        """A dense_variable axis under a dense one, with as many coordinates as there are."""
        ptr = self.array(f"{what}_ptr", {"recipe": recipe.__name__, **how})
        given = {"recipe": last_of.__name__, "offsets": self.named(ptr)}
        size = self.number(f"{what}_count", given)
        return self.axis(
            what, kind="dense_variable", length=size, parent=parent, nnz=size, indptr=ptr
        )

    def _table(self, what: str, axes: list[Axis], recipe: Any, **how: Any) -> SparseBuffer:
        return self.table(f"{self.row.name}_{what}", axes, recipe.__name__, **how)

    def _columns(self, what: str, axes: list[Axis], slots: SparseBuffer) -> SparseBuffer:
        """The column of the element in each slot."""
        return self.table(
            f"{self.column.name}_{what}", axes, in_order.__name__,
            values=self.named(self.column.indices), order=self._of(slots),
        )  # fmt: skip

    def _of(self, buffer: SparseBuffer) -> str:
        """What a buffer holds, as recipes take it."""
        return self.named(buffer.handle)

    def _vars(self, *names: str) -> list[Any]:
        row = self.over[0].name
        return [tirx.Var(f"{row}_{name}", self.idtype) for name in names]


def _at(buffer: SparseBuffer, *indices: Any) -> Any:
    return tirx.BufferLoad(buffer.var, list(indices))
