"""Placement of the buffers that a function allocates itself.

A buffer used by one top-level iteration alone, with no dependence between its visits, is allocated
in that iteration's block. The block's regions then omit it, so that TVM's schedule can run the
visits in parallel. Before::

    TOP = T.sblock_alloc_buffer((m,))
    for i in range(m):
        with T.sblock("softmax0"):
            T.reads(A[vi, 0:n], TOP[vi])
            T.writes(TOP[vi], OUT[vi, 0:n])

After::

    for i in range(m):
        with T.sblock("softmax0"):
            T.reads(A[vi, 0:n])
            T.writes(OUT[vi, 0:n])
            TOP = T.sblock_alloc_buffer((m,))

If each visit accesses its own elements, as with `TOP` above, and their number is not constant, the
buffer moves back outside the loops once they are scheduled: an allocation per visit takes longer
than most rows.

A schedule that runs the visits on GPU threads sets such a buffer's scope ("local"); if it does
not, the buffer moves outside the kernel. If visits share elements of it, it gets one copy per
thread. Before::

    for i in T.thread_binding(m, thread="blockIdx.x"):
        with T.sblock("sums0"):
            W = T.sblock_alloc_buffer((feat,))
            ... W[vk]

After::

    W = T.sblock_alloc_buffer((m * feat,))
    for i in T.thread_binding(m, thread="blockIdx.x"):
        with T.sblock("sums0"):
            ... W[i * feat + vk]
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.sparse_ir.nodes import accesses_of, nodes_of
from sparsetir.sparse_ir.races import FREE, RACES, facts_of
from sparsetir.sparse_ir.tir import (
    as_dtype,
    as_one,
    block_with,
    free_vars,
    loop_with,
    nest_of,
    values_of,
)
from sparsetir.sparse_ir.traversal import map_expr


class Threads(NamedTuple):
    """The number of threads and the index of one, both int64."""

    count: Any
    number: Any


def allocate_in_visits(body: tirx.Stmt, buffers: list[Any]) -> tuple[tirx.Stmt, list[Any]]:
    """Move allocations into the top-level nests of `body`; also return the remaining `buffers`."""
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    used = [free_vars(p) for p in parts]
    rest: list[Any] = []
    inside: dict[int, list[Any]] = {}
    for var in buffers:
        users = [n for n, names in enumerate(used) if var in names]
        if len(users) == 1 and _visits_are_independent(parts[users[0]]):
            inside.setdefault(users[0], []).append(var)
        else:
            rest.append(var)
    parts = [_allocate(p, inside[n]) if n in inside else p for n, p in enumerate(parts)]
    return as_one(parts), rest


def allocate_outside_of_threads(body: Any, buffers: Any) -> tuple[Any, dict[Any, Threads]]:
    """Allocate the blocks' buffers in the root block: all on GPUs, else those where each visit
    accesses its own elements.

    Also return, by buffer, the threads that need a copy each; the caller enlarges the buffer.
    """
    threads = any(n.kind == tirx.ForKind.THREAD_BINDING for n in nodes_of(tirx.For, body))
    inside = nodes_of(s_tir.SBlock, body.block.body, nested=threads)
    moved = {
        v: n
        for n in inside
        for v in n.alloc_buffers
        if v in buffers and (threads or not _has_constant_size(v) and _visits_are_disjoint(n, v))
    }
    if not moved:
        return body, {}
    shared = {
        v: _threads_around(body, n) for v, n in moved.items() if threads and _visits_share(n, v)
    }

    def block(node: Any) -> Any:
        kept = [v for v in node.alloc_buffers if v not in moved]
        return block_with(node, alloc_buffers=kept) if len(kept) < len(node.alloc_buffers) else node

    root = body.block
    # An address keeps TVM from moving the allocation into the loops that use the buffer.
    addresses = [tirx.Evaluate(buffer_data(v)) for v in moved]
    root = block_with(
        root,
        alloc_buffers=[*root.alloc_buffers, *moved],
        body=as_one([*addresses, map_expr(root.body, [(s_tir.SBlock, block)])]),
    )
    return s_tir.SBlockRealize(body.iter_values, body.predicate, root, body.span), shared


def _threads_around(body: Any, block: Any) -> Threads:
    """The threads of the loops over blocks and threads around a block."""
    count, number = as_dtype(1, "int64"), as_dtype(0, "int64")
    for loop in nodes_of(tirx.For, body):
        bound = loop.kind == tirx.ForKind.THREAD_BINDING
        if bound and any(n.same_as(block) for n in nodes_of(s_tir.SBlock, loop)):
            size = as_dtype(loop.extent, "int64")
            count, number = count * size, number * size + as_dtype(loop.loop_var, "int64")
    return Threads(count, number)


def _visits_share(block: Any, buffer: Any) -> bool:
    """Whether visits of a block share elements of a buffer: no index depends on a coordinate."""
    visit = {v.var for v in block.iter_vars}
    for nested in nodes_of(s_tir.SBlockRealize, block.body):
        for var, value in values_of(nested).items():
            if free_vars(value) & visit:
                visit.add(var)
    accesses = accesses_of(block.body, buffer)
    return any(not any(free_vars(i) & visit for i in a.indices) for a in accesses)


def _visits_are_disjoint(block: Any, buffer: Any) -> bool:
    """Whether each visit of a block accesses its own elements of a buffer: every access is
    indexed by all of the block's variables."""
    names: dict[Any, Any] = {v.var: v.var for v in block.iter_vars}
    for nested in nodes_of(s_tir.SBlockRealize, block.body):
        names |= {var: names[value] for var, value in values_of(nested).items() if value in names}
    visit = {v.var for v in block.iter_vars}
    accesses = accesses_of(block.body, buffer)
    return bool(visit) and all(visit <= {names.get(i) for i in a.indices} for a in accesses)


def _has_constant_size(buffer: Any) -> bool:
    return all(isinstance(n, tirx.IntImm) for n in buffer.ty.shape)


def _visits_are_independent(stmt: tirx.Stmt) -> bool:
    """Whether no visit of a nest reads what another one has written."""
    loops, stmt = nest_of(stmt)
    if not isinstance(stmt, s_tir.SBlockRealize) or stmt.block.init is not None or not loops:
        return False
    facts = facts_of(stmt.block) if RACES in stmt.block.annotations else {}
    return len(facts) == len(loops) and set(facts.values()) == {FREE}


def _allocate(stmt: tirx.Stmt, buffers: list[Any]) -> tirx.Stmt:
    """A nest of loops with these buffers allocated in the block inside."""
    loops, stmt = nest_of(stmt)
    block = stmt.block
    reads, writes = (
        [r for r in rs if r.source not in buffers] for rs in (block.reads, block.writes)
    )
    allocs = [*block.alloc_buffers, *buffers]
    new = block_with(block, reads=reads, writes=writes, alloc_buffers=allocs)
    out: tirx.Stmt = s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, new, stmt.span)
    for loop in reversed(loops):
        out = loop_with(loop, body=out)
    return out
