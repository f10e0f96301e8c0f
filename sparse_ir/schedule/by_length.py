"""Rows in the order of their lengths, so that loops over them end where processors expect it.

A row of a few elements takes less time than a processor loses where it has not foreseen the end of
the row. Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `by_length(i, j)`, where rows of one length follow each other, and what says where elements
are, and their columns, lie in the order of the visits::

    I_sorted = T.dense_fixed(m)
    I_elements = T.dense_variable(I_sorted, (I_elements_count, I_elements_count), I_elements_ptr)
    with T.sp_iter([I_sorted, I_elements, K], "SRS", "spmm") as [i_sorted, i_element, k]:
        with T.init():
            C[I_order[i_sorted], k] = 0.0
        C[I_order[i_sorted], k] = C[..] + A[I_slots[i_sorted, i_element]] * B[
            J_slots[i_sorted, i_element], k]

Rows are sorted within windows, whose rows stay close to each other: lengths go up in one window and
down in the next. Values are the arrays that they were: buffers over rows and columns lie over
positions. `pack("A", ..)` brings values into the order of the visits. (SELL-C-sigma's sorting,
:mod:`sparsetir.sparse_ir.schedule.slices`, for rows that are visited one by one.)
"""

from __future__ import annotations

from tvm import tirx

from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.recipes import in_order
from sparsetir.sparse_ir.recipes import slices as recipes
from sparsetir.sparse_ir.recipes.positions import last_of
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

__all__ = ["by_length"]

WHO = "by_length"


@primitive
def by_length(
    func: SparseFunc, rows: SpIter, columns: SpIter, window: int = 4096
) -> tuple[SparseFunc, list[SpIter]]:
    """Go through rows in the order of their lengths, as one loop ends like the one before.

    Parameters
    ----------
    rows : SpIter
        Over a dense axis, spatial.
    columns : SpIter
        Over the sparse_variable axis under it, a reduction; no other iteration visits it.
    window : int
        Rows that are sorted together.

    Returns
    -------
    list of SpIter
        Rows, elements.
    """
    it = iteration_of(WHO, func, rows)
    refuse_order(WHO, func, it)
    loops = loops_of(it)
    row, column = (loops[place_of(WHO, func, it, handle)] for handle in (rows, columns))
    cut = Cut(WHO, func, it, row)
    if isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 2**31:
        cut.refuse(f"argument 'window': expected a positive integer, got {window!r}")
    path = list(rows_and_columns(cut, row, column))
    rest = other_loops(cut, it, row, column)
    made = Elements(WHO, func, it, row, path, [row.var, column.var])
    return _sorted(made, rest, window)


def _sorted(made: Elements, rest: list[Loop], window: int) -> tuple[SparseFunc, list[SpIter]]:
    it, row, column = made.it, made.row, made.column
    indptr = made.named(column.indptr)
    place = made.axis("sorted", kind="dense_fixed", length=row.length)
    order = made.table(
        f"{row.name}_order", [place], recipes.rows_by_length.__name__, indptr=indptr, window=window
    )
    given = {"indptr": indptr, "rows": made.named(order.handle)}
    ptr = made.array("elements_ptr", {"recipe": recipes.offsets_of_rows.__name__, **given})
    how = {"recipe": last_of.__name__, "offsets": made.named(ptr)}
    count = made.number("elements_count", how)
    element = made.axis(
        "elements", kind="dense_variable", length=count, parent=place, nnz=count, indptr=ptr
    )
    axes = [place, element]
    slots = made.table(
        f"{row.name}_slots", axes, recipes.positions_of_rows.__name__, **given,
        offsets=made.named(ptr),
    )  # fmt: skip
    columns = made.table(
        f"{column.name}_slots", axes, in_order.__name__, values=made.named(column.indices),
        order=made.named(slots.handle),
    )  # fmt: skip
    p, e = (tirx.Var(f"{made.over[0].name}_{x}", made.idtype) for x in ("sorted", "element"))
    position = tirx.BufferLoad(slots.var, [p, e])
    here = [tirx.BufferLoad(order.var, [p]), tirx.BufferLoad(columns.var, [p, e])]
    body = made.rewritten(it.body, position, here)
    init = None if it.init is None else made.rewritten(it.init, position, here)
    loops = [Loop(place, [p], "S"), Loop(element, [e], "R")]
    iteration = changed(it, [*loops, *rest], body=body, init=init)
    func = replaced(
        WHO, made.moved_function(), it, iteration, axes=made.axes, buffers=made.buffers,
        params=made.params, trusted=False,
    )  # fmt: skip
    return func, [handle_of(iteration, loop) for loop in loops]
