"""Ask for what is read in order some steps before it is needed (CPU).

Hardware sees such streams by itself, but looks no further than the end of a page, and asks for
little at a time. Before::

    for s in range(S_indptr[vg + 1] - S_indptr[vg]):
        for l in T.vectorized(16):
            with T.sblock("sum0"): ...                # acc[l] += A[vg, s, l] * ...

After `prefetch_streams(func, "sum0", ("A",), distance=32)`::

    for s in range(S_indptr[vg + 1] - S_indptr[vg]):
        prefetch(address of A[vg, s + 32, 0])
        for l in T.vectorized(16):
            with T.sblock("sum0"): ...

The address may be past the end of the buffer: to prefetch from there does nothing.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.prefetch import prefetch
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import map_expr, substitute, walk
from sparsetir.sparse_ir.position_space import as_dtype, dtype_of

__all__ = ["prefetch_streams"]


def prefetch_streams(
    func: tirx.PrimFunc, block: str, buffers: tuple[str, ...], distance: int
) -> tirx.PrimFunc:
    """Prefetch what a block reads of `buffers`; one of the last steps.

    func : a stage-II function; the one given is left as it is
    block : name of a block in two loops of their own, of which the inner one is a vector that reads
        at most a cache line of each buffer
    distance : how many iterations of the outer one ahead

    Raises ScheduleError where there is no such block, or it does not read one of the buffers.
    """
    outer = _nest(func, block)
    if outer is None:
        raise ScheduleError(
            f"prefetch_streams: argument 'block': no two loops around a block '{block}'"
        )
    s, l = outer.loop_var, outer.body.loop_var
    ahead = {s: s + as_dtype(distance, dtype_of(s)), l: as_dtype(0, dtype_of(l))}
    asks = [prefetch(_at(_load(outer.body.body, name), ahead)) for name in buffers]

    def visit(loop: Any) -> Any:
        if not loop.loop_var.same_as(s):
            return loop
        body = tirx.SeqStmt([*asks, loop.body])
        return tirx.For(s, loop.min, loop.extent, loop.kind, body, None, loop.annotations)

    return func.with_body(map_expr(func.body, [(tirx.For, visit)]))


def _nest(func: tirx.PrimFunc, block: str) -> Any:
    """The outer one of two loops with nothing but the block in them."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and isinstance(node.body, tirx.For):
            realize = node.body.body
            if isinstance(realize, s_tir.SBlockRealize) and realize.block.name_hint == block:
                found.append(node)

    walk(func.body, visit)
    return found[0] if found else None


def _load(realize: Any, name: str) -> Any:
    """The block's first load of a buffer, at the variables of its loops."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, ir.TensorLoad) and node.source.name == name:
            found.append(node)

    walk(realize.block.body, visit)
    if not found:
        raise ScheduleError(
            f"prefetch_streams: argument 'buffers': block '{realize.block.name_hint}' reads "
            f"no '{name}'"
        )
    at = {v.var: x for v, x in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
    return _at(found[0], at)


def _at(load: Any, variables: dict[Any, Any]) -> Any:
    return tirx.BufferLoad(load.source, [substitute(i, variables) for i in load.indices])
