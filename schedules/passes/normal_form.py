"""The normal form of programs for the default schedule: one nest, rows outermost (CPU, stage I).

Before, for stored diagonals, which neither threads nor registers suit::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([O, JD, IR, K], "RRSS", "spmm_dia") as [o, jd, ir, k]:
        C[ir, k] = C[ir, k] + A[o, jd, ir] * B[ir + shift - jd, k]

After::

    with T.sp_iter([IR, O, JD, K], "SRRS", "spmm_dia") as [ir, o, jd, k]:
        with T.init():
            C[ir, k] = 0.0
        C[ir, k] = C[ir, k] + A[o, jd, ir] * B[ir + shift - jd, k]

If only stored elements of rows are visited, and no row is used as an index, elements are visited by
position, in vectors that span rows::

    with T.sp_iter([I, J], "RR", "norm") as [i, j]:
        S[()] = S[()] + A[i, j] * A[i, j]

    with T.sp_iter([I_J], "R", "norm") as [ij]:
        S[()] = S[()] + A[ij] * A[ij]

So are fibres that are summed, as rows of a matrix::

    with T.sp_iter([I, J, K], "SSR", "ttv") as [i, j, k]:
        Z[i, j] = Z[i, j] + A[i, j, k] * X[k]

    with T.sp_iter([I_J, I_J_K], "SR", "ttv") as [ij, k]:
        Z[ij] = Z[ij] + A[ij, k] * X[k]

A value that is set everywhere right before a sum becomes its init. If no spatial loop is outside
the reductions, those over dense axes move there. The order of summation of each element does not
change: reductions keep their order, and a loop only moves if each element is written by one of its
visits. The loop along contiguous elements of the result stays, and so do the rows of a block, which
share gathered operands, unless the result is narrower than its terms: registers hold the sum of a
row over all its blocks, which is rounded once.
"""

from __future__ import annotations

from tvm import ir

from sparsetir.schedules.passes.flat_features import flat_features
from sparsetir.schedules.passes.fused_rows import fused_rows
from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.legal import reorderable
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    flat_axes,
    loads_of,
    nodes_of,
    sparse_iterations,
    stores_of,
    variables_of,
)
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.races import FREE, Fact, races_of
from sparsetir.sparse_ir.reduction import reduction_of, split_guards
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.init_elimination import with_init_before
from sparsetir.sparse_ir.schedule.loops import Loop, changed, find_iteration, loops_of, replaced
from sparsetir.sparse_ir.tir import dtype_of

ROWS_OF_BLOCKS = 64  # constant loops of at most this many visits stay
FEATURES_OF_HEADS = 8  # LLVM's own code for fewer, of a constant number, is as fast


def normal_form(func: SparseFunc) -> SparseFunc:
    """Visit features in several axes as one, give reductions their inits, move spatial loops out of
    reductions that begin a nest, and visit elements by position if their rows are not used."""
    func = fused_rows(flat_features(func))
    for name in [it.name for it in sparse_iterations(func)]:
        func = _by_positions(func, name)
        it = next((it for it in sparse_iterations(func) if it.name == name), None)
        if it is None or "R" not in it.kinds or reorderable(func, it) is not None:
            continue
        reduction = reduction_of(it.body)
        if reduction is None:
            continue
        func, it = with_init_before(func, it) or (func, it)
        order = _order(it, rounds=dtype_of(reduction.term) != dtype_of(reduction.store.value))
        if order != loops_of(it):
            func = replaced("normal_form", func, it, changed(it, order))
    return func


def _by_positions(func: SparseFunc, name: str) -> SparseFunc:
    """Visit the elements of an iteration by position, or the rows of a reduction that are under
    other sparse axes, if coordinates above are not used."""
    loops = loops_of(find_iteration(func, name))
    rows = next((n for n, loop in enumerate(loops) if "R" in loop.kinds), 0)
    for count in (len(loops), rows):
        nodes = [loop.node for loop in loops[:count]]
        chain = [x for x in nodes if isinstance(x, Axis)]
        linked = zip(chain, chain[1:], strict=False)
        if len(nodes) < 2 or chain != nodes or any(
            x.kind != "sparse_variable" or x.parent is None or x.parent.name != above.name
            for above, x in linked
        ):  # fmt: skip
            continue
        sch = Schedule(func)
        it = sch.get_sparse_iteration(name)
        try:
            sch.positions(sch.sparse_fuse(it, sch.get_sp_iters(it)[:count]))
        except ScheduleError:  # e.g. for an axis that another iteration visits, too
            continue
        made = {*computed_parameters(sch.func)} - {*computed_parameters(func)}
        at = [b.var for b in sch.func.buffers if b.handle is not None and b.handle.name in made]
        body = find_iteration(sch.func, name).body
        # Rows with a coordinate may be pieces of one, whose sum is rounded once.
        placed = [x.indices for x in stores_of(body)] if count == rows else []
        if not any(loads_of(body, row) for row in at) and not nodes_of(ir.TensorLoad, *placed):
            return sch.func
    return func


def _order(it: SparseIteration, rounds: bool) -> list[Loop]:
    """The loops of an iteration in their new order; unchanged if none moves.

    rounds : whether the result is narrower than its terms
    """
    loops, (_, store) = loops_of(it), split_guards(it.body)
    begin = next(n for n, loop in enumerate(loops) if "R" in loop.kinds)
    rows = any(constant_length(axis) != 1 for axis in flat_axes(it.axes[:begin]))
    last = store.indices[-1] if store.indices else None
    innermost = loops[-1] if isinstance(last, ir.Var) and loops[-1].vars == [last] else None

    def moves(loop: Loop, race: Fact) -> bool:
        if loop.kinds != "S" or race != FREE or not isinstance(loop.node, Axis):
            return False
        if loop.node.kind != "dense_fixed" or isinstance(last, ir.Var) and loop.var.same_as(last):
            return False
        if rounds or not rows and not _is_row_of_block(loop.node):
            return True
        return rows and innermost is not None and _is_head(it, loop, innermost)

    races = races_of(it, set())[begin:]
    moved = [x for x, race in zip(loops[begin:], races, strict=True) if moves(x, race)]
    rest = [loop for loop in loops[begin:] if loop not in moved]
    return [*loops[:begin], *moved, *rest] if "S" in rest[-1].kinds else loops


def _is_head(it: SparseIteration, loop: Loop, features: Loop) -> bool:
    """Whether each visit of a loop has rows of features of its own, and these are not few."""
    result = split_guards(it.body)[1].buffer
    loads = [x for x in nodes_of(ir.TensorLoad, it.body) if not x.source.same_as(result)]
    rows = [x.indices for x in loads if features.var in variables_of(*x.indices)]
    apart = all(x[-1].same_as(features.var) and loop.var in variables_of(*x[:-1]) for x in rows)
    length = constant_length(features.node)
    return bool(rows) and apart and (length is None or length >= FEATURES_OF_HEADS)


def _is_row_of_block(axis: Axis) -> bool:
    return 1 < (constant_length(axis) or 0) <= ROWS_OF_BLOCKS
