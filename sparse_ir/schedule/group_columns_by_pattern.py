"""Panels of rows whose columns are grouped by the set of rows that have them.

(Albakri and Cheshmi, "A Novel Compiler Transformation for Fast Sparse Matrix Multiplication in
GPUs", enumerate-and-sparse-coarsen, sections 3.2 and 3.3.) Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `group_columns_by_pattern(i, j, 4)`, where the columns of a panel that occur in the same
ones of its four rows are contiguous, an entry each::

    I_panels = T.dense_fixed((m + 3) // 4)
    I_patterns = T.sparse_fixed(I_panels, (15, 15), I_ids)
    I_entries = T.dense_variable(I_patterns, (nnz, nnz), I_entries_ptr)
    I_rows = T.dense_fixed(4)
    with T.sp_iter([I_panels, I_patterns, I_entries, I_rows, K], "SRRSS", "spmm") as [
        p, q, e, r, k
    ]:
        with T.init():
            C[p * 4 + r, k] = 0.0
        if (q + 1) // 2**r % 2 == 1:
            C[p * 4 + r, k] = C[p * 4 + r, k] + A[
                I_order[I_values[p, q] + e * (bits of q + 1) + (bits of q + 1 below r)]
            ] * B[J_at[p, q, e], k]

Pattern q is the set of rows whose bits are set in q + 1. If loops over patterns and rows are
unrolled, everything that depends on them is constant: each pattern has its own loop over entries,
in which a row of B is loaded once for all of the pattern's rows, and with
`precompute("C", p, [r, k])` the sums of a panel stay in registers over all patterns. `pack("A",
..)` stores values in that order.

With `by="count"` a pattern is specialised by its number of rows (section 3.5) only: there are size
variants of the code instead of 2**size - 1. A table holds the rows of each pattern, and the init is
an iteration of its own::

        if r < I_counts[q]:
            C[p * 4 + I_members[q, r], k] = C[p * 4 + I_members[q, r], k] + A[
                I_order[I_values[p, q] + e * I_counts[q] + r]
            ] * B[J_at[p, q, e], k]

Sums of a panel are then in registers for one pattern at a time: `precompute("C", q, [r, k])`.

The offsets of entries and values are computed parameters. Arrays of values are unchanged: buffers
over rows and columns lie over positions.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.recipes import patterns as recipes
from sparsetir.sparse_ir.recipes.general import constant
from sparsetir.sparse_ir.reduction import add_guards
from sparsetir.sparse_ir.schedule.loops import SpIter
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import (
    ElementOrder,
    VisitOrder,
    chosen_loops,
    elements_of_rows,
    load,
)
from sparsetir.sparse_ir.tir import as_dtype

NAME = "group_columns_by_pattern"
LARGEST = 8  # rows per panel: 255 patterns


@primitive(reorders=True)
def group_columns_by_pattern(
    func: SparseFunc, rows: SpIter, columns: SpIter, size: int, *, by: str = "pattern"
) -> tuple[SparseFunc, list[SpIter]]:
    """Visit panels of rows, and in each the columns of equal pattern together.

    Parameters
    ----------
    rows : SpIter
        A spatial loop over a dense axis.
    columns : SpIter
        A loop over the sparse_variable axis under it, a reduction, in a body `X[..] = X[..] + term`
        (or *, max, min); no other iteration visits this axis.
    size : int
        Rows per panel, 2 to 8; there are 2**size - 1 patterns.
    by : {"pattern", "count"}
        Specialise code by the "pattern", or by the "count" of its rows.

    Returns
    -------
    list of SpIter
        The loops over panels, patterns, entries, and rows of a panel.
    """
    it, (row, column) = chosen_loops(NAME, func, rows, columns)
    plain = VisitOrder(NAME, func, it, row)
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= LARGEST:
        plain.refuse(f"argument 'size': expected 2 to {LARGEST} rows, got {size!r}")
    if by not in ("pattern", "count"):
        plain.refuse(f"argument 'by': expected 'pattern' or 'count', got {by!r}")
    order = elements_of_rows(NAME, func, it, row, column, unique=True, reduces="")
    return _by_pattern(order, size, by)


def _by_pattern(order: ElementOrder, size: int, by: str) -> tuple[SparseFunc, list[SpIter]]:
    idtype, name, column = order.idtype, order.row.name, order.column
    # The keyword of recipes for the order of patterns, which by default is by pattern.
    patterns: dict[str, Any] = {"rows": size} | ({} if by == "pattern" else {"by": by})
    count, n = as_dtype((1 << size) - 1, idtype), column.length
    panels = order.dense(
        "panels", order.number("panels_count", recipes.panel_count, m=order.row.length, rows=size)
    )
    arrays = {"indptr": column.indptr, "indices": column.indices}
    held = order.array("held", recipes.pattern_entries, **arrays, n=n, **patterns)
    pattern = order.counted("patterns", panels, count)
    entry = order.ragged(
        "entries", pattern, recipes.entry_ptr, entries=held, n=n, panels=panels.length, rows=size
    )
    over, ptr = [panels, pattern, entry], entry.indptr
    # Numbers of (column, pattern) pairs, which may exceed the type of the others.
    order.bound(f"{name}_held", over, held, "int64")
    values = order.table(f"{name}_values", over[:2], recipes.value_ptr, ptr=ptr, **patterns)
    at = order.table(f"{column.name}_at", over, recipes.entry_columns, entries=held, n=n)
    elements = order.table(
        f"{name}_order", [order.positions], recipes.pattern_order, **arrays, entries=held, ptr=ptr,
        n=n, **patterns,
    )  # fmt: skip
    order.number("step", constant, value=1)
    row = order.dense("rows", size)
    kind = "R" if by == "pattern" else "S"  # a table holds the rows
    new = order.loops(panel=(panels, "S"), pattern=(pattern, kind), entry=(entry, "R"),
                       row=(row, "S"))  # fmt: skip
    p, q, e, r = (loop.var for loop in new)
    if by == "pattern":
        each, below, mine, member = _rows_of(size, q, r, idtype)
    else:
        kinds = order.dense("kinds", count)
        counts = order.table(f"{name}_counts", [kinds], recipes.pattern_counts, rows=size)
        members = order.table(f"{name}_members", [kinds, row], recipes.pattern_rows, rows=size)
        each = load(counts, q)
        below, mine, member = r, r < each, load(members, q, r)
    position = load(elements, load(values, p, q) + e * each + below)
    here = [p * row.length + member, load(at, p, q, e)]
    fields: dict[str, Any] = {"body": add_guards([mine], order.it.body)}
    if by == "count" and order.it.init is not None:  # not every pattern has each row
        fields |= {"before": order.split_init(), "init": None}
    func, handles = order.by_positions(new, [*new, *order.rest], position, here, **fields)
    return with_fact(func, "inside", buffer=elements.name, axis=order.positions.name), handles


def _rows_of(size: int, q: Any, r: Any, idtype: str) -> tuple[Any, Any, Any, Any]:
    """For row r and pattern q: rows of the pattern, those before r, whether r is one, the row."""
    zero, one, two = (as_dtype(number, idtype) for number in range(3))
    mask = q + one
    bits = [tirx.floormod(tirx.floordiv(mask, as_dtype(1 << b, idtype)), two) for b in range(size)]
    below: Any = zero
    for b in range(size - 1):
        below = below + tirx.Select(r > as_dtype(b, idtype), bits[b], zero)
    mine = tirx.floormod(tirx.shift_right(mask, r), two)
    return sum(bits[1:], bits[0]), below, tirx.EQ(mine, one), r
