"""Chunks of the nonzeros of all rows, with one search for rows per chunk (Senanayake, chapter 6).

Before::

    with T.sp_iter([T.fuse(I, J), K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `divide` of the fused loop into 16 parts, the loops are over chunks, over the pieces of rows
in a chunk, and over the elements of a piece::

    I_J_parts = T.dense_fixed(16)
    I_J_piece = T.sparse_variable(I_J_parts, (m, I_J_pieces), (I_J_ptr, I_J_rows))
    I_J_part = T.dense_variable(I_J_piece, (nnz, nnz), I_J_starts)
    with T.sp_iter(
        [I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS", "spmm"
    ) as [i_parts, i, j, k]:
        ...                                                       # as before

Each row, even an empty one, has an owner piece, which begins where the row begins. A cut within a
row begins another piece of it: so only the first piece of a chunk can belong to a row that another
chunk owns. `parallelize(i_parts, "cpu", race="temporary")` relies on that.
"""

from __future__ import annotations

from typing import Any

from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
)
from sparsetir.sparse_ir.recipes.positions import last_of, piece_ids, piece_ptr, piece_starts
from sparsetir.sparse_ir.recipes.registry import facts_of
from sparsetir.sparse_ir.schedule.loops import Loop
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder, is_path


def has_rows_to_carry(loop: Loop) -> bool:
    """Whether a loop is over the elements of all rows, with a reduction per row."""
    node = loop.node
    if not isinstance(node, FusedAxis) or loop.kinds != "SR" or not is_path(node):
        return False
    row, element = node.axes
    return row.kind == "dense_fixed" and element.is_variable


def chunk_loops(order: VisitOrder, count: Any, cost: int, size: int = 0) -> list[Loop]:
    """The loops over chunks, over the pieces of rows in one, and over the elements of a piece.

    count : the number of chunks
    cost, size : see :func:`sparsetir.sparse_ir.recipes.positions.piece_ptr`
    """
    row, element = order.visited
    chunks = order.dense("parts", count)
    how = {"indptr": element.indptr, "parts": count, "cost": cost, "size": size}
    ptr = order.array("ptr", piece_ptr, **how)
    rows = order.array("rows", piece_ids, **how)
    starts = order.array("starts", piece_starts, **how)
    piece = order.axis(
        "piece", kind="sparse_variable", length=row.length, parent=chunks,
        nnz=order.number("pieces", last_of, offsets=ptr), indptr=ptr, indices=rows,
    )  # fmt: skip
    part = order.part(piece, element.nnz, element.nnz, starts)
    var_row, var_element = order.old.vars
    attached = PartAxis(axis=AttachedAxis(axis=element, to=piece), by=part)
    inner = [Loop(piece, [var_row], "S"), Loop(attached, [var_element], "R")]
    return [*order.loops_over(parts=(chunks, "S")), *inner]


def pieces_under(func: SparseFunc, it: SparseIteration, chunks: Any) -> Axis | None:
    """The axis of the pieces in the chunks that a loop is over, if the iteration visits one."""
    computed = computed_parameters(func) if isinstance(chunks, Axis) else {}
    for axis, _, _ in it.axis_of():
        how = {} if axis.indptr is None else computed.get(str(axis.indptr.name), {})
        if facts_of(how.get("recipe")).pieces and axis.parent.name == chunks.name:
            return axis
    return None
