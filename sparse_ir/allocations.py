"""Where the buffers live that a function allocates itself.

A buffer that one top-level iteration alone uses, each visit for itself, is allocated in that
iteration's block. Then the block neither reads nor writes it as far as others can tell, and TVM's
schedule can run the visits in parallel. Before::

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

A schedule that runs the visits on GPU threads gives such a buffer a scope of its own ("local");
where it does not, the buffer is put back outside of the kernel.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.sparse_ir.nodes import map_expr, nodes_of
from sparsetir.sparse_ir.races import FREE, RACES
from sparsetir.sparse_ir.statements import block_with
from sparsetir.sparse_ir.translate import free_vars

__all__ = ["allocate_in_visits", "allocate_outside_of_threads"]


def allocate_in_visits(body: tirx.Stmt, buffers: list[Any]) -> tuple[tirx.Stmt, list[Any]]:
    """Allocate what can be inside of the top-level nests of `body`; also the rest of `buffers`."""
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
    return (tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]), rest


def allocate_outside_of_threads(body: Any, buffers: Any) -> Any:
    """Allocate these of the blocks' buffers in the root block, if there are threads at all."""
    threads = any(n.kind == tirx.ForKind.THREAD_BINDING for n in nodes_of(tirx.For, body))
    moved = [v for n in nodes_of(s_tir.SBlock, body) for v in n.alloc_buffers if v in buffers]
    if not threads or not moved:
        return body

    def block(node: Any) -> Any:
        kept = [v for v in node.alloc_buffers if v not in buffers]
        return block_with(node, alloc_buffers=kept) if len(kept) < len(node.alloc_buffers) else node

    body = map_expr(body, [(s_tir.SBlock, block)])
    # An address keeps the allocation of a buffer on the host, also if one kernel alone uses it.
    addresses = [tirx.Evaluate(buffer_data(v)) for v in moved]
    root = block_with(
        body.block,
        alloc_buffers=[*body.block.alloc_buffers, *moved],
        body=tirx.SeqStmt([*addresses, body.block.body]),
    )
    return s_tir.SBlockRealize(body.iter_values, body.predicate, root, body.span)


def _visits_are_independent(stmt: tirx.Stmt) -> bool:
    """Whether no visit of a nest sees what another one has written."""
    count = 0
    while isinstance(stmt, tirx.For):
        stmt, count = stmt.body, count + 1
    if not isinstance(stmt, s_tir.SBlockRealize) or stmt.block.init is not None or not count:
        return False
    races = dict(stmt.block.annotations.get(RACES, {}))
    return len(races) == count and set(races.values()) == {FREE}


def _allocate(stmt: tirx.Stmt, buffers: list[Any]) -> tirx.Stmt:
    """A nest of loops with these buffers allocated in the block inside."""
    loops: list[Any] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    block = stmt.block
    reads, writes = (
        [r for r in rs if r.source not in buffers] for rs in (block.reads, block.writes)
    )
    allocs = [*block.alloc_buffers, *buffers]
    new = block_with(block, reads=reads, writes=writes, alloc_buffers=allocs)
    out: tirx.Stmt = s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, new, stmt.span)
    for loop in reversed(loops):
        out = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, out)
    return out
