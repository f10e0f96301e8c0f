"""Panels of what a reduction gathers, in a kernel that serves every size (CPU).

Where rows are gathered often, a copy of some of their features, together and as much as the L2
cache holds, pays: see :mod:`sparsetir.schedules.templates.spmm`. Whether it does follows from sizes
that a plain program leaves open. Its kernel has both versions, and looks at the sizes::

    if nnz >= 28 * n and feat > 64 and feat // 32 % threads == 0:
        for k0 in T.parallel(feat // 32):               # of B, 32 features at a time
            B_ws[j, k] = B[j, k0 * 32 + k]
            for i in range(m): ...                      # C_ws[k] += A[i, j] * B_ws[j, k]
        ...                                             # the rest of the features, by rows
    else:
        for i in T.parallel(m): ...
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx

from sparsetir.schedules.default import default_schedule, vector_bits
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.templates.shapes import RowReduction, row_reduction
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, substitute
from sparsetir.sparse_ir.position_space import LAYOUTS, as_dtype
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.translate import free_vars

__all__ = ["PACK_DEGREE", "PACK_FEATURES", "panels_where_they_pay"]

# Non-zeros per row of B, and features, from which on a copy of it, or of a part, pays.
PACK_DEGREE = 28
PACK_FEATURES = 64
VECTORS = 2  # of a panel


def panels_where_they_pay(func: SparseFunc, rows: tirx.PrimFunc, target: Any) -> tirx.PrimFunc:
    """A scheduled function that gathers by panels where sizes say so.

    func : of stage I
    rows : the same of stage II, as the default schedule has it; returned as it is where the program
        has another shape
    """
    sch = Schedule(func)
    try:
        found = row_reduction(sch, "panels")
    except ScheduleError:
        return rows
    if found.gathered is None or found.heads or len(found.columns) != 1:
        return rows
    lanes = vector_bits(target) // tvm.DataType(found.dtype).bits
    tile = VECTORS * lanes
    sizes = _sizes(func, found)
    if isinstance(sizes[2], tirx.IntImm) and int(sizes[2]) <= PACK_FEATURES:
        return rows
    blocks = _panels(sch, found, sizes[2], lanes)
    stage_two = sch.lower()
    for block in blocks:
        in_vectors(stage_two, stage_two.get_sblock(block))
    panels = default_schedule(next(iter(stage_two.mod.functions.values())), target)
    nnz, n, feat = (_of(rows, size) for size in sizes)
    threads = tvm.get_global_func("runtime.NumThreads")()
    wide = as_dtype(feat, "int64")
    pays = tirx.all(
        nnz >= n * as_dtype(PACK_DEGREE, "int64"),
        wide > as_dtype(PACK_FEATURES, "int64"),
        tirx.floormod(tirx.floordiv(wide, as_dtype(tile, "int64")), as_dtype(threads, "int64"))
        == as_dtype(0, "int64"),
    )
    return _either(pays, panels, rows)


def _panels(sch: Schedule, found: RowReduction, feat: Any, lanes: int) -> list[str]:
    """Schedule a program for panels; the blocks that are to be in vectors."""
    tile = VECTORS * lanes
    features = found.features
    if not isinstance(feat, tirx.IntImm) or int(feat) % tile:
        features, _ = sch.peel(features, tile)
    panels, *vectors = sch.split(features, [None, VECTORS, lanes], tail="exact")
    sch.sparse_reorder(found.iteration, [panels, found.rows, *found.columns, *vectors])
    steps = sch.precompute(found.result, found.rows, vectors, hoist=True)
    assert found.gathered is not None and found.gathered_axis is not None
    whole = [found.gathered_axis, *vectors]
    copies = sch.precompute(found.gathered, panels, whole, scope="global")
    return [f"{step.name}0" for step in (*steps, *copies)]


def _sizes(func: SparseFunc, found: RowReduction) -> tuple[Any, Any, Any]:
    """Elements of the rows, rows that are gathered from, features."""
    axes = {axis.name: axis for axis in func.axes}
    columns = axes[found.columns[0].name]
    return columns.nnz, axes[str(found.gathered_axis)].length, axes[found.features.name].length


def _of(func: tirx.PrimFunc, size: Any) -> Any:
    """A size by the parameters of a lowered function."""
    named = {p.name: p for p in func.params}
    return as_dtype(substitute(size, {v: named[v.name] for v in free_vars(size)}), "int64")


def _either(condition: Any, yes: tirx.PrimFunc, no: tirx.PrimFunc) -> tirx.PrimFunc:
    """One function that does as one of two of the same parameters."""
    same = dict(zip(yes.params, no.params, strict=True))
    parts = [
        s_tir.SBlockRealize([], True, _named(func.body.block, name))
        for func, name in ((yes.with_body(substitute(yes.body, same)), "panels"), (no, "rows"))
    ]
    body = tirx.IfThenElse(condition, *parts)
    root = s_tir.SBlock([], [], [], "root", body)
    layouts = {**dict(yes.attrs[LAYOUTS].items()), **dict(no.attrs[LAYOUTS].items())}
    return no.with_body(s_tir.SBlockRealize([], True, root)).with_attr(LAYOUTS, layouts)


def _named(block: Any, name: str) -> Any:
    return s_tir.SBlock(
        block.iter_vars, block.reads, block.writes, name, block.body, block.init,
        alloc_buffers=block.alloc_buffers, annotations=block.annotations,
    )  # fmt: skip
