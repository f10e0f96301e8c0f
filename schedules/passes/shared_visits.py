"""Merge consecutive iterations over the same rows into one visit of a row (CPU).

The results of an iteration for a row are still in cache when the next one uses them, and threads
start once. Before::

    for i, n in T.grid(m, n):
        with T.sblock("bias0"): ...                     # Z[vi, vn] = b[vn]
    for i in range(m):
        with T.sblock("dots0"): ...                     # Z[vi, J_indices[vi, vj]] = ...

After::

    for i in range(m):
        for n in range(n):
            with T.sblock("bias0"): ...
        with T.sblock("dots0"): ...

This is done if the outermost loops have equal extents and are free of races, and each access of a
buffer that both use, and one of them writes, is in the row of its visit. Fills of rows with one
value that come first stay apart: filling all memory at once is 1.1 to 5 times as fast.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx
from tvm.tirx.buffer import buffer_data
from tvm_ffi import structural_equal

from sparsetir.schedules.passes.flat_fills import is_fill
from sparsetir.schedules.passes.parallel_loops import is_free
from sparsetir.sparse_ir.nodes import accesses_of, nodes_of, stores_of, substitute
from sparsetir.sparse_ir.tir import as_one, block_with, free_vars, loop_with, nest_of, values_of


def shared_visits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Merge neighbouring top-level loops of a stage-II function over the same rows."""
    root = func.body.block
    if not isinstance(root.body, tirx.SeqStmt):
        return func
    sch = s_tir.Schedule(func)
    outermost = [sch.get_loops(block)[:1] for block in sch.get_child_blocks(sch.get_sblock("root"))]
    free = {sch.get(x).loop_var for loops in outermost for x in loops if is_free(sch, x)}
    parts: list[Any] = []
    for part in root.body.seq:
        last: Any = parts[-1] if parts else None
        if all(isinstance(x, tirx.For) and x.loop_var in free for x in (last, part)):
            again = loop_with(part, body=substitute(part.body, {part.loop_var: last.loop_var}))
            if _may_merge(last, again):
                parts[-1] = loop_with(last, body=as_one([*_parts(last.body), *_parts(again.body)]))
                continue
        parts.append(part)
    if len(parts) == len(root.body.seq):
        return func
    # An address keeps TVM from moving the allocation into the loops that use the buffer.
    addresses = [tirx.Evaluate(buffer_data(v)) for v in root.alloc_buffers]
    block = block_with(root, body=as_one([*addresses, *parts]))
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _parts(stmt: Any) -> list[Any]:
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]


def _may_merge(first: Any, second: Any) -> bool:
    """Whether two loops may be merged visit by visit, and access a common buffer.

    second : with its variable replaced by that of the first
    """
    loops = first, second
    nest, filled = nest_of(first)
    if len(nest) > 1 and isinstance(filled, s_tir.SBlockRealize) and is_fill(filled.block.body):
        return False
    if any(x.kind != tirx.ForKind.SERIAL or x.annotations for x in loops):
        return False
    if not all(
        structural_equal(*x) for x in ((first.min, second.min), (first.extent, second.extent))
    ):
        return False
    if any(isinstance(x.op, ir.Op) and "addr" in str(x.op.name) for x in nodes_of(ir.Call, *loops)):
        return False  # of an atomic, say
    names = {first.loop_var: first.loop_var}
    for realize in nodes_of(s_tir.SBlockRealize, *loops):
        names |= {v: names[x] for v, x in values_of(realize).items() if x in names}
    written = {x.buffer for x in stores_of(*loops)}
    shared = written & free_vars(first) & free_vars(second)
    return bool(shared) and all(
        _in_row(accesses_of(tirx.SeqStmt([*loops]), v), names) for v in shared
    )


def _in_row(accesses: list[Any], names: dict[Any, Any]) -> bool:
    """Whether one index of all accesses is the variable of a visit."""
    return any(
        all(i in names for i in at) for at in zip(*(x.indices for x in accesses), strict=True)
    )
