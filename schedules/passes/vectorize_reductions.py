"""Innermost reductions to one element as vectors of partial results (CPU).

A reduction to one element waits in each step for the step before, and a division in its term is
done for one nonzero at a time. The loop may be over what a row stores, or over dense features for
each element of any storage, at the top or in a nest. Before::

    for j in range(J_indptr[vi + 1] - J_indptr[vi]):
        with T.sblock("f1"):
            with T.init():
                O[vi] = 0.0
            O[vi] = O[vi] + X[vi, vj] / D[vi]

After, for 8 lanes::

    O[vi] = 0.0
    if J_indptr[vi + 1] - J_indptr[vi] >= 8:
        acc[0:8] = 0.0
        for j_0 in range((J_indptr[vi + 1] - J_indptr[vi]) // 8):
            acc[0:8] = acc[0:8] + X[vi, j_0 * 8 : j_0 * 8 + 8] / D[vi]
        acc[0:8] = acc[0:8] + T.Select(.., X[vi, J_indptr[vi + 1] - J_indptr[vi] - 8 + ..], 0.0)
        acc[0:4] = acc[0:4] + acc[4:8] ...
        O[vi] = O[vi] + acc[0]
    else:
        for j_1 in range(J_indptr[vi + 1] - J_indptr[vi]): ...

The last vector begins earlier, and adds what the others left. Conditions that do not depend on the
loop, as of a slot that is padding, stand around all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.nests import is_along, wide_indices
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.reduction import Reduction, reduction_of, under
from sparsetir.sparse_ir.speculation import is_harmless
from sparsetir.sparse_ir.tir import (
    as_dtype,
    block_with,
    dtype_of,
    free_vars,
    is_one,
    loop_over,
    with_body,
)
from sparsetir.sparse_ir.traversal import map_expr

RAGGED_LANES = 8  # of ragged rows at most: in graphs most are shorter than longer vectors


def vectorize_reductions(func: tirx.PrimFunc, bits: int) -> tirx.PrimFunc:
    """Rewrite serial loops that reduce to one element, for vectors of `bits` bits.

    Sums, and extrema that say what becomes of NaN, of types of 32 and 64 bits.
    """

    def visit(loop: Any) -> Any:
        reduction = _innermost(loop)
        if reduction is None:
            return loop
        lanes = bits // tvm.DataType(dtype_of(reduction.term)).bits
        if nodes_of(ir.TensorLoad, loop.extent):
            lanes = min(RAGGED_LANES, lanes)
        few = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) < lanes
        return loop if lanes < 2 or few else _in_vectors(loop, reduction, lanes)

    return with_body(func, map_expr(func.body, [(tirx.For, visit)]))


def _innermost(loop: Any) -> Reduction | None:
    """The reduction to one element that a loop right around a block is; None of other loops."""
    realize = loop.body
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(realize, s_tir.SBlockRealize):
        return None
    block = realize.block
    if not is_one(realize.predicate) or block.alloc_buffers:
        return None
    own, others = _variables(loop)
    if len(own) != 1 or own[0].iter_type != tirx.IterVar.CommReduce:
        return None
    var = own[0].var
    if any(loop.loop_var in free_vars(value) for _, value in others):
        return None
    reduction = reduction_of(block.body)
    if reduction is None or reduction.operator == "product":
        return None
    bits = tvm.DataType(dtype_of(reduction.term)).bits
    value, dtype = reduction.store.value, dtype_of(reduction.store.value)
    ordered = isinstance(value, tirx.Max | tirx.Min) and "float" in dtype
    if bits not in (32, 64) or ordered or dtype_of(reduction.term) != dtype:
        return None
    # Conditions come to stand around the loop, which may have no visits.
    if not all(map(is_harmless, reduction.conditions)):
        return None
    moves = any(var in free_vars(i) for i in [*reduction.store.indices, *reduction.conditions])
    return None if moves or not _is_contiguous(reduction.term, var) else reduction


def _variables(loop: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The variables of the block in a loop that are the loop's; the others, with their values."""
    pairs = list(zip(loop.body.block.iter_vars, loop.body.iter_values, strict=True))
    own = [v for v, value in pairs if value.same_as(loop.loop_var)]
    return own, [(v, value) for v, value in pairs if not value.same_as(loop.loop_var)]


def _is_contiguous(term: Any, var: Any) -> bool:
    """Whether a term reads along a variable, or gathers by what it reads along it."""
    loads = [x for x in nodes_of(ir.TensorLoad, term) if var in free_vars(x)]
    return bool(loads) and all(_goes_along(x, var) for x in loads)


def _goes_along(load: Any, var: Any) -> bool:
    if any(isinstance(i, ir.TensorLoad) for i in load.indices):
        return True
    *outer, last = wide_indices(load.source, load.indices)
    return is_along(last, var) and not any(var in free_vars(i) for i in outer)


def _in_vectors(loop: Any, reduction: Reduction, lanes: int) -> tirx.Stmt:
    block, extent, dtype = loop.body.block, loop.extent, dtype_of(loop.loop_var)
    (own,), others = _variables(loop)
    var = own.var
    store, name = reduction.store, loop.loop_var.name
    acc = buffer_var([lanes], store.buffer.ty.dtype, "acc")
    width, zero = as_dtype(lanes, dtype), as_dtype(0, dtype)
    whole = tirx.floordiv(extent, width)
    held = tirx.BufferLoad(store.buffer, store.indices)
    steps, fewer = tirx.Var(f"{name}_0", dtype), tirx.Var(f"{name}_1", dtype)

    def term(at: Any) -> Any:
        return substitute(reduction.term, {var: at})

    def each(count: int, value: Callable[[Any], Any]) -> tirx.Stmt:
        """Values of so many lanes."""
        lane = tirx.Var(f"{name}_lane", dtype)
        kind = tirx.ForKind.VECTORIZED
        return loop_over(lane, count, tirx.BufferStore(acc, value(lane), [lane]), kind)

    def of(lane: Any) -> Any:
        return tirx.BufferLoad(acc, [lane])

    combined = reduction.combine
    identity = reduction.identity(str(store.buffer.ty.dtype))
    parts = [each(lanes, lambda _: identity)]
    vectors = each(lanes, lambda lane: combined(of(lane), term(steps * width + lane)))
    parts.append(loop_over(steps, whole, vectors))
    new = whole * width - extent + width  # lanes of the last vector from here on

    def last(lane: Any) -> Any:
        return tirx.Select(lane >= new, term(extent - width + lane), identity)

    exact = isinstance(extent, tirx.IntImm) and int(extent) % lanes == 0
    if not exact:
        parts.append(each(lanes, lambda lane: combined(of(lane), last(lane))))
    half = lanes // 2
    while half:
        far = as_dtype(half, dtype)
        parts.append(each(half, lambda lane, far=far: combined(of(lane), of(lane + far))))
        half //= 2
    parts.append(tirx.BufferStore(store.buffer, combined(held, of(zero)), store.indices))
    each_one = tirx.BufferStore(store.buffer, combined(held, term(fewer)), store.indices)
    short = loop_over(fewer, extent, each_one)
    body = tirx.SeqStmt(parts)
    if not isinstance(extent, tirx.IntImm):
        body = tirx.IfThenElse(extent >= width, body, short)
    done, init = under(reduction.conditions, body), block.init
    if init is not None and not any(v.iter_type == tirx.IterVar.CommReduce for v, _ in others):
        done, init = tirx.SeqStmt([init, done]), None
    known = {r.source: r.source for r in [*block.reads, *block.writes]}
    made = block_with(block, iter_vars=[v for v, _ in others], body=done, alloc_buffers=[acc])
    made = block_with(made, init=init, reads=[], writes=[])
    reads, writes = s_tir.analysis.get_sblock_read_write_region(made, known)
    made = block_with(made, reads=reads, writes=writes)
    return s_tir.SBlockRealize([value for _, value in others], True, made)
