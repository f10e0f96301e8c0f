"""Visit the elements of each row in steps of a constant number, side by side.

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `strip_mine_rows(j, 32)`, where each row has as many steps as it needs, and `T.Select` masks
the last step past the end of the row::

    J_steps = T.dense_variable(I, (J_steps_count, J_steps_count), J_steps_ptr)
    J_lanes = T.dense_fixed(32)
    with T.sp_iter([I, J_steps, J_lanes, K], "SRRS", "spmm") as [i, j_step, j_lane, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = ... + T.Select(J_ptr[i] + j_step * 32 + j_lane <= J_last[i], ..., 0.0)

where an element is at T.min(J_ptr[i] + j_step * 32 + j_lane, J_last[i]), so that loads need no
guards.

`split` by positions makes tiles of the same elements, with a shorter last one. Here all have a
constant length, which lanes need: with `precompute(.., lanes=[lane])` each has its own accumulator,
and on a GPU they are threads that load neighbouring elements. Arrays of values are unchanged:
buffers over rows and columns lie over positions.
"""

from __future__ import annotations

from tvm import tirx

from sparsetir.sparse_ir.nodes import Axis, SparseFunc
from sparsetir.sparse_ir.recipes.positions import row_lasts, tile_ptr
from sparsetir.sparse_ir.reduction import add_guards, masked
from sparsetir.sparse_ir.schedule.loops import SpIter, loops_of
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.visit_order import ElementOrder, VisitOrder, chosen_loops, load

NAME = "strip_mine_rows"


@primitive(reorders=True)
def strip_mine_rows(
    func: SparseFunc, columns: SpIter, lanes: int
) -> tuple[SparseFunc, list[SpIter]]:
    """Visit the elements of each row in steps of a constant number, side by side.

    Parameters
    ----------
    columns : SpIter
        A loop over the sparse_variable axis under a dense one, a reduction whose terms may be
        skipped (a sum, a product, a maximum or a minimum); no other iteration visits this axis.
    lanes : int
        Elements per step.

    Returns
    -------
    list of SpIter
        The loops over steps and lanes.
    """
    it, (loop,) = chosen_loops(NAME, func, columns)
    plain, column = VisitOrder(NAME, func, it, loop), loop.node
    plain.check_count("lanes", lanes, below=2**15)
    row = column.parent if isinstance(column, Axis) else None
    rows = [x for x in loops_of(it) if row is not None and x.axes == (row.name,) and x.kinds == "S"]
    fits = isinstance(column, Axis) and column.kind == "sparse_variable" and loop.kinds == "R"
    if not fits or not rows or not isinstance(row, Axis) or row.kind != "dense_fixed":
        plain.refuse(
            "expected a reduction over a sparse_variable axis under a dense one that is visited as "
            f"well, got '{loop.name}'"
        )
    reduction = plain.reduced(", which can be without a term")
    plain.check_alone()
    order = ElementOrder(NAME, func, it, loop, [row, column], [rows[0].var, loop.var])
    indptr = column.indptr
    step = order.ragged("steps", row, tile_ptr, indptr=indptr, size=lanes, within=0)
    lane = order.dense("lanes", lanes)
    offsets = order.offsets(column, "bounds")
    at = order.bound(f"{column.name}_at", [order.positions], column.indices)
    lasts = order.table(f"{column.name}_last", [row], row_lasts, indptr=indptr)
    new = order.loops(step=(step, "R"), lane=(lane, "R"))
    s, v = (x.var for x in new)
    last = load(lasts, rows[0].var)
    beyond = load(offsets, rows[0].var) + s * lane.length + v
    position = tirx.min(beyond, last)
    body = add_guards(reduction.conditions, masked(reduction, beyond <= last))
    here = [rows[0].var, load(at, position)]
    return order.by_positions(new, order.around(new, loop), position, here, body=body)
