"""Queries about statements and names, for rewrites."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import SparseBuffer, SparseIteration, nodes_of, stores_of


def are_exactly(indices: Any, variables: list[Any]) -> bool:
    """Whether the indices are exactly these variables, in this order."""
    return all(
        isinstance(i, ir.Var) and i.same_as(v) for i, v in zip(indices, variables, strict=True)
    )


def uses(node: Any, variables: list[Any]) -> bool:
    """Whether any of the variables occurs."""
    return not isinstance(node, int) and any(v in variables for v in nodes_of(ir.Var, node))


def stored_by(node: Any) -> list[Any]:
    """The buffers that a statement writes."""
    return [store.buffer for store in stores_of(node)]


def stores(node: Any, var: Any) -> bool:
    """Whether a statement writes the buffer."""
    return any(var.same_as(v) for v in stored_by(node))


def sets_all(stmt: Any, buf: SparseBuffer) -> bool:
    """Whether a statement sets every element of a buffer without reading it."""
    if not isinstance(stmt, SparseIteration) or buf.axes is None:
        return False
    setting = stmt.body if stmt.init is None else stmt.init
    if not isinstance(setting, tirx.BufferStore) or not setting.buffer.same_as(buf.var):
        return False
    if uses(setting.value, [buf.var]):
        return False
    over = {v: a for a, v, _ in stmt.axis_of()}
    if stmt.init is None and len(over) > len(buf.axes):
        return False  # another axis may be empty
    return all(
        isinstance(i, ir.Var) and i in over and over[i].name == a.name
        for i, a in zip(setting.indices, buf.axes, strict=True)
    )


def fresh_name(name: str, taken: set[str]) -> str:
    """The name with enough underscores to be unused; it is added to the names taken."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
