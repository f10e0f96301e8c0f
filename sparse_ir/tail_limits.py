"""What is known of coordinates where accesses are made: the conditions of tails around them."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import SparseIteration, nodes_of
from sparsetir.sparse_ir.reduction import is_tail

__all__ = ["limits_of"]


def limits_of(tree: Any, accesses: list[list[Any]]) -> list[tuple[Any, int]]:
    """(sum of coordinates, number that it is less than) wherever all of these accesses are made.

    accesses : lists of indices of loads and stores in `tree`
    """
    found: list[tuple[Any, Any]] = []  # indices of an access, the conditions that it is under

    def visit(node: Any, limits: list[Any]) -> None:
        if isinstance(node, tirx.IfThenElse):
            collect(node.condition, limits)
            here = [node.condition] if _limit(node.condition) else []
            visit(node.then_case, [*limits, *here])
            if node.else_case is not None:
                visit(node.else_case, limits)
        elif isinstance(node, SparseIteration):
            for part in (node.init, node.body):
                if part is not None:
                    visit(part, limits)
        elif isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                visit(part, limits)
        elif isinstance(node, tirx.For | tirx.While):
            visit(node.body, limits)
        else:
            collect(node, limits)

    def collect(tree: Any, limits: list[Any]) -> None:
        accesses = nodes_of((tirx.BufferStore, ir.TensorLoad), tree)
        found.extend((list(node.indices), limits) for node in accesses)

    visit(tree, [])
    under = [limits for index in accesses for at, limits in found if _same_nodes(at, index)]
    if len(under) < len(accesses):
        return []
    every = [
        c
        for c in under[0]
        if all(any(tvm_ffi.structural_equal(c, o) for o in other) for other in under)
    ]
    return [(c.args[0].a, int(c.args[0].b)) for c in every]


def _limit(condition: Any) -> bool:
    """Whether a condition is that of a tail with a constant length."""
    if not is_tail(condition) or not isinstance(condition.args[0], tirx.LT):
        return False
    return isinstance(condition.args[0].b, tirx.IntImm)


def _same_nodes(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x.same_as(y) for x, y in zip(a, b, strict=True))
