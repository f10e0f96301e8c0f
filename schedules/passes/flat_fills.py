"""Nests that fill contiguous memory with one value, as one loop, in one large part per thread.

One call of memset for all memory of a thread is up to five times as fast as one for each row, which
may be a single element. Before::

    for i in T.parallel(m):
        for j, k in T.grid(n, feat):
            C[(i * n + j) * feat + k] = 0.0

After `flat_fills(func, 2, 131072)`::

    if m * n * feat < 131072:
        for e in range(m * n * feat):
            C[e] = 0.0
    else:
        for part in T.parallel(2):
            for e in range(m * n * feat * (part + 1) // 2 - m * n * feat * part // 2):
                C[m * n * feat * part // 2 + e] = 0.0
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.nodes import nodes_of, substitute
from sparsetir.sparse_ir.tir import (
    as_dtype,
    constant,
    free_vars,
    is_one,
    loop_over,
    nest_of,
    values_of,
)
from sparsetir.sparse_ir.traversal import map_expr


def flat_fills(func: tirx.PrimFunc, threads: int, work: int) -> tirx.PrimFunc:
    """Flatten parallel nests around one store of a value that no loop changes.

    func : a stage-III function
    threads : the number of parts
    work : the least stores for which other threads are woken
    """

    def visit(loop: Any) -> Any:
        store = _fill(loop) if loop.kind == tirx.ForKind.PARALLEL else None
        if store is None:
            return loop
        count = prod((_int64(x.extent) for x in nest_of(loop)[0]), start=_int64(1))

        def fill(begin: Any, end: Any) -> Any:
            at = tirx.Var(f"{store.buffer.name}_at", "int64")
            return loop_over(
                at, end - begin, tirx.BufferStore(store.buffer, store.value, [begin + at])
            )

        known = constant(count)
        whole = fill(_int64(0), count)
        if threads == 1 or known is not None and known < work:
            return whole
        part = tirx.Var(f"{store.buffer.name}_part", "int64")
        begin, end = (tirx.floordiv(count * n, _int64(threads)) for n in (part, part + _int64(1)))
        parts = loop_over(part, threads, fill(begin, end), tirx.ForKind.PARALLEL)
        return parts if known is not None else tirx.IfThenElse(count < _int64(work), whole, parts)

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))


def is_fill(store: Any) -> bool:
    """Whether a statement is a store of a value that depends on no visit."""
    of_sizes = isinstance(store, tirx.BufferStore) and not nodes_of(ir.TensorLoad, store.value)
    return of_sizes and not free_vars(store.value)


def _fill(loop: Any) -> Any:
    """The store of a nest that fills memory from its buffer's beginning, in order; or None."""
    loops, realize = nest_of(loop)
    if not isinstance(realize, s_tir.SBlockRealize) or not is_one(realize.predicate):
        return None
    store, place = realize.block.body, _int64(0)
    if not is_fill(store) or len(store.indices) != 1 or realize.block.init is not None:
        return None
    variables, values = {x.loop_var for x in loops}, values_of(realize)
    if any(free_vars(x.extent) & variables for x in loops):
        return None
    for around in loops:
        place = place * _int64(around.extent) + _int64(around.loop_var)
    same = affine(substitute(store.indices[0], values)) == affine(place)
    return store if same and all(constant(x.min) == 0 for x in loops) else None


def _int64(value: Any) -> Any:
    return as_dtype(value, "int64")
