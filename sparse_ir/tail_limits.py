"""What is known of coordinates where accesses are made: the conditions of tails around them."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import SparseIteration, nodes_of
from sparsetir.sparse_ir.tile_marks import is_tail


def limits_of(tree: Any, accesses: list[list[Any]]) -> list[tuple[Any, int]]:
    """(sum of coordinates, number that it is less than) wherever all of these accesses are made.

    accesses : lists of indices of loads and stores in `tree`
    """
    found = [
        (list(access.indices), [c for c in conditions if _limit(c)])
        for part, conditions in with_conditions(tree)
        for access in [*nodes_of(tirx.BufferStore, part), *nodes_of(ir.TensorLoad, part)]
    ]
    under = [limits for index in accesses for at, limits in found if _same_nodes(at, index)]
    if len(under) < len(accesses):
        return []
    every = [
        c
        for c in under[0]
        if all(any(tvm_ffi.structural_equal(c, o) for o in other) for other in under)
    ]
    return [(c.args[0].a, int(c.args[0].b)) for c in every]


def with_conditions(tree: Any) -> list[tuple[Any, list[Any]]]:
    """The innermost statements of a tree, and its conditions, each with those that it is under."""
    out: list[tuple[Any, list[Any]]] = []

    def visit(node: Any, conditions: list[Any]) -> None:
        if isinstance(node, tirx.IfThenElse):
            out.append((node.condition, conditions))
            visit(node.then_case, [*conditions, node.condition])
            visit(node.else_case, conditions)
        elif isinstance(node, SparseIteration):
            visit(node.init, conditions)
            visit(node.body, conditions)
        elif isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                visit(part, conditions)
        elif isinstance(node, tirx.For | tirx.While):
            visit(node.body, conditions)
        elif node is not None:
            out.append((node, conditions))

    visit(tree, [])
    return out


def _limit(condition: Any) -> bool:
    """Whether a condition is that of a tail with a constant length."""
    if not is_tail(condition) or not isinstance(condition.args[0], tirx.LT):
        return False
    return isinstance(condition.args[0].b, tirx.IntImm)


def _same_nodes(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x.same_as(y) for x, y in zip(a, b, strict=True))
