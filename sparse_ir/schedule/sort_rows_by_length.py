"""Rows sorted by length, so that trip counts of loops over them are predicted.

A row of a few elements takes less time than the branch misprediction at its end.
Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `sort_rows_by_length(i, j)`, where rows of equal length are consecutive, and the positions of
elements, and their columns, are stored in the order of the visits::

    I_sorted = T.dense_fixed(m)
    I_elements = T.dense_variable(I_sorted, (I_elements_count, I_elements_count), I_elements_ptr)
    with T.sp_iter([I_sorted, I_elements, K], "SRS", "spmm") as [i_sorted, i_element, k]:
        with T.init():
            C[I_order[i_sorted], k] = 0.0
        C[I_order[i_sorted], k] = C[..] + A[I_slots[i_sorted, i_element]] * B[
            J_slots[i_sorted, i_element], k]

Rows are sorted within windows, whose rows remain close to each other: lengths increase in one
window and decrease in the next. Arrays of values are unchanged: buffers over rows and columns lie
over positions. `pack("A", ..)` stores values in the order of the visits. (SELL-C-sigma's sorting,
:mod:`sparsetir.sparse_ir.schedule.sell_slices`, for rows that are visited one by one.)
"""

from __future__ import annotations

from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.recipes.slices import offsets_of_rows, positions_of_rows, rows_by_length
from sparsetir.sparse_ir.schedule.loops import SpIter
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import (
    VisitOrder,
    chosen_loops,
    elements_of_rows,
    load,
)

NAME = "sort_rows_by_length"


@primitive(reorders=True)
def sort_rows_by_length(
    func: SparseFunc, rows: SpIter, columns: SpIter, window: int = 4096
) -> tuple[SparseFunc, list[SpIter]]:
    """Visit rows in the order of their lengths, so that consecutive trip counts agree.

    Parameters
    ----------
    rows : SpIter
        A spatial loop over a dense axis.
    columns : SpIter
        A loop over the sparse_variable axis under it, a reduction; no other iteration visits it.
    window : int
        Rows that are sorted together.

    Returns
    -------
    list of SpIter
        The loops over rows and elements.
    """
    it, (row, column) = chosen_loops(NAME, func, rows, columns)
    VisitOrder(NAME, func, it, row).check_count("window", window, below=2**31)
    visits = elements_of_rows(NAME, func, it, row, column)
    indptr, name = visits.column.indptr, visits.row.name
    place = visits.dense("sorted", visits.row.length)
    order = visits.table(f"{name}_order", [place], rows_by_length, indptr=indptr, window=window)
    arrays = {"indptr": indptr, "rows": order}
    element = visits.ragged("elements", place, offsets_of_rows, **arrays)
    axes = [place, element]
    slots = visits.table(f"{name}_slots", axes, positions_of_rows, **arrays, offsets=element.indptr)
    columns_at = visits.columns_at("slots", axes, slots)
    loops = visits.loops(sorted=(place, "S"), element=(element, "R"))
    p, e = (loop.var for loop in loops)
    here = [load(order, p), load(columns_at, p, e)]
    return visits.by_positions(loops, [*loops, *visits.rest], load(slots, p, e), here)
