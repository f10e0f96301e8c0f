"""Which loops of an iteration may run in parallel.

A spatial loop is free of races when each of its coordinates writes elements of its own and reads,
of what the iteration writes, only those: every access to a written buffer has the coordinate
itself among its indices, in the same place.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    FusedAxis,
    SparseIteration,
    walk,
)

__all__ = ["parallel_units"]


def parallel_units(it: SparseIteration) -> list[int]:
    """Numbers of the iteration's loops (a fused axis counts as one) that may run in parallel."""
    stores: list[Any] = []
    loads: list[Any] = []
    private: set[Any] = set()

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferStore):
            stores.append(node)
        elif isinstance(node, ir.TensorLoad):
            loads.append(node)
        elif isinstance(node, tirx.AllocBuffer):
            private.add(node.buffer)

    walk(it.body, visit)
    if it.init is not None:
        walk(it.init, visit)
    written = {s.buffer for s in stores if s.buffer not in private}
    accesses = [(s.buffer, list(s.indices)) for s in stores if s.buffer in written]
    accesses += [(ld.source, list(ld.indices)) for ld in loads if ld.source in written]
    out: list[int] = []
    at = 0
    for number, node in enumerate(it.axes):
        axes = list(node.axes) if isinstance(node, FusedAxis) else [node]
        coords, kinds = it.vars[at : at + len(axes)], it.kinds[at : at + len(axes)]
        at += len(axes)
        plain = [a.axis if isinstance(a, AttachedAxis) else a for a in axes]
        if set(kinds) == {"S"} and all(a.unique for a in plain):
            if accesses and all(_own_place(v, accesses) for v in coords):
                out.append(number)
    return out


def _own_place(coord: Any, accesses: list[tuple[Any, list[Any]]]) -> bool:
    """Whether one dimension of each written buffer is always indexed by `coord` itself."""
    place: dict[Any, set[int]] = {}
    for buf, indices in accesses:
        here = {n for n, i in enumerate(indices) if isinstance(i, ir.Var) and i.same_as(coord)}
        place[buf] = place[buf] & here if buf in place else here
    return all(place.values())
