"""An init that nothing needs, since what comes after it overwrites all that it sets.

Before::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0.0
    with T.sp_iter([I, K], "SS", "spmm") as [i, k]:
        C[i, k] = C_ws[..]

After, the second iteration alone.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    loads_of,
    map_expr,
    stores_of,
    substitute,
    walk,
)
from sparsetir.sparse_ir.reduction import taken_apart

__all__ = ["without_init"]


def without_init(
    func: SparseFunc, iteration: str, update: Any, axes: dict[Any, Axis]
) -> tuple[SparseFunc, Any] | None:
    """The function without the iteration that sets a result before another one overwrites it.

    iteration : name of the one that overwrites, which has no init
    update : the store there, with the conditions around it
    axes : by coordinate, the axis that it is known to take all coordinates of

    Also the value that is set, in terms of the coordinates of the update. None where nothing sets
    the result right before, or other elements of it than the update comes by.
    """
    conditions, store = taken_apart(update)
    init = _before(func.body, iteration, store.buffer)
    if init is None or init.init is not None:
        return None
    others, first = taken_apart(init.body)
    if not isinstance(first, tirx.BufferStore) or _reads_what_changes(func, first):
        return None
    mine = _variables([*store.indices, *conditions], axes)
    found = {v: axis for axis, v, _ in init.axis_of()}
    own = _variables([*first.indices, *others], found)
    if len(mine) != len(own) or set(own) != set(found):
        return None
    for a, b in zip(mine, own, strict=True):
        dense = axes[a].kind == found[b].kind == "dense_fixed"
        if not dense or not tvm_ffi.structural_equal(axes[a].length, found[b].length):
            return None
    renamed = dict(zip(own, mine, strict=True))
    have = [substitute(e, renamed) for e in [*first.indices, *others]]
    want = [*store.indices, *conditions]
    if len(have) != len(want) or not all(map(tvm_ffi.structural_equal, have, want)):
        return None
    return func.replace(body=_without(func.body, init.name)), substitute(first.value, renamed)


def _variables(exprs: list[Any], axes: dict[Any, Axis]) -> list[Any]:
    """The coordinates in some expressions, in the order in which they occur."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, ir.Var) and node in axes and node not in found:
            found.append(node)

    for expr in exprs:
        walk(expr, visit)
    return found


def _before(body: Any, iteration: str, buffer: Any) -> SparseIteration | None:
    """The last statement before an iteration, in its sequence, that accesses a buffer."""
    sequences: list[Any] = []
    walk(body, lambda n: sequences.append(n.seq) if isinstance(n, tirx.SeqStmt) else None)
    for seq in sequences:
        place = [n for n, s in enumerate(seq) if _is_named(s, iteration)]
        for stmt in reversed(list(seq)[: place[0]] if place else []):
            stored = any(s.buffer.same_as(buffer) for s in stores_of(stmt))
            if stored or loads_of(stmt, buffer):
                return stmt if isinstance(stmt, SparseIteration) else None
    return None


def _reads_what_changes(func: SparseFunc, store: Any) -> bool:
    written = [s.buffer for s in stores_of(func.body)]
    return any(loads_of(store.value, b) for b in written)


def _without(body: Any, name: str) -> Any:
    def visit(node: Any) -> Any:
        kept = [s for s in node.seq if not _is_named(s, name)]
        if len(kept) == 1:
            return kept[0]
        return node if len(kept) == len(node.seq) else tirx.SeqStmt(kept)

    return map_expr(body, [(tirx.SeqStmt, visit)])


def _is_named(stmt: Any, name: str) -> bool:
    return isinstance(stmt, SparseIteration) and stmt.name == name
