"""Tails of tiles, recorded by `split`, and the bounds of their starts.

`split` bounds the start of a tile, and records what the tile must not repeat::

    if T.tail(T.at_most(k0 * 64, feat - 64) + l, feat, k0 * 64):
        C[i, T.at_most(k0 * 64, feat - 64) + l] = ...

`T.tail(coordinate, length, start)` means `start <= coordinate < length`, and is the record of a
coordinate in a tile of an axis of that length. Without a start nothing is bounded, and coordinates
may exceed the axis; a tile that repeats the last coordinate starts at the coordinate itself. The
comparison that may fail becomes a predicate when positions are lowered. `T.at_most(a, b)` is the
minimum of a and b. A program's own predicate is `T.likely(p)` or p, and its own bound
`T.min(a, b)`, about which nothing is assumed.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import _ffi_api

from sparsetir.sparse_ir.nodes import SparseIteration, is_among
from sparsetir.sparse_ir.traversal import map_expr

TAIL, BOUND = "sparsetir.tail", "sparsetir.at_most"
LIKELY = "prim.likely"


def _register() -> None:
    known = set(map(str, _ffi_api.ListOpNames()))
    for name in {TAIL, BOUND} - known:  # once per process, even if this module is reloaded
        _ffi_api.RegisterOp(name, "of a tile")
        op = ir.Op.get(name)
        op.set_attr("TCallEffectKind", 1)  # a pure function
        op.set_attr("TScriptPrinterName", name.rpartition(".")[2])


_register()


def tail(coordinate: Any, length: Any, start: Any = None) -> Any:
    """The condition that a coordinate of a tile is in the axis, and not before the tile's start."""
    return tirx.call_intrin("bool", TAIL, coordinate, length, *([] if start is None else [start]))


def at_most(value: Any, bound: Any) -> Any:
    """The minimum of two integers of one type: the start of a tile, or a coordinate in it."""
    return tirx.call_intrin(value.ty.dtype, BOUND, value, bound)


def is_tail(condition: Any) -> bool:
    """Whether a condition is the tail of a tile."""
    return _is_call(condition, TAIL)


def is_bound(expr: Any) -> bool:
    """Whether an expression is the bound of a tile."""
    return _is_call(expr, BOUND)


def is_likely(condition: Any) -> bool:
    """Whether a condition is marked by `T.likely`, as TVM's passes mark theirs."""
    return _is_call(condition, LIKELY)


def conjuncts(condition: Any) -> list[Any]:
    """The conditions whose conjunction a condition is, without marks by `T.likely`."""
    if isinstance(condition, tirx.And):
        return [*conjuncts(condition.a), *conjuncts(condition.b)]
    return conjuncts(condition.args[0]) if is_likely(condition) else [condition]


def without_marks(tree: Any) -> Any:
    """A tree in which tails become predicates and bounds `T.min`, which TVM's passes know.

    A program's own `T.likely` is reduced to its predicate: TVM partitions loops by likely
    conditions, and expects that they change within the loop, which is only known of tiles.
    """

    def plain(node: Any) -> Any:
        if is_likely(node):
            return node.args[0]
        if is_tail(node):
            return tirx.likely(predicate_of(node))
        return tirx.Min(*node.args) if is_bound(node) else node

    return map_expr(tree, [(ir.Call, plain)])


def start_of(condition: Any) -> Any:
    """The start that a tail records: the coordinate if its tile repeats the last; or None."""
    return condition.args[2] if is_tail(condition) and len(condition.args) > 2 else None


def repeats(condition: Any) -> bool:
    """Whether a condition is the tail of a tile that repeats the last coordinate."""
    start = start_of(condition)
    return start is not None and tvm_ffi.structural_equal(condition.args[0], start)


def predicate_of(condition: Any) -> Any:
    """The comparison of a tail that may fail: a tile with a start ends within the axis."""
    coordinate, length, *start = condition.args
    return coordinate >= start[0] if start and not repeats(condition) else coordinate < length


def without_tail_shifts(tree: Any) -> Any:
    """A statement or iteration in which no tile begins earlier or repeats a coordinate.

    For dependence analysis. Where the condition of such a tile holds, its coordinate is in no other
    tile; nor is the coordinate without the shift, which is less than the length, too::

        if T.tail(k0 * 64 + l, feat, k0 * 64):
    """

    def branch(node: Any) -> Any:
        start = start_of(node.condition)
        return node if start is None else without_bounds(node, start)

    return map_expr(tree, [(tirx.IfThenElse, branch)])


def without_bounds(tree: Any, start: Any) -> Any:
    """A statement or expression in which a start of tiles, or a coordinate, has no bounds."""

    def plain(node: Any) -> Any:
        bounded = is_bound(node) and tvm_ffi.structural_equal(node.args[0], start)
        return node.args[0] if bounded else node

    return map_expr(tree, [(ir.Call, plain)])


def contains(many: list[Any], few: list[Any]) -> bool:
    """Whether each of some expressions is among `many`."""
    return all(is_among(f, many) for f in few)


def limits_of(accesses: list[list[Any]]) -> list[tuple[Any, int]]:
    """(sum of coordinates, exclusive bound) pairs that hold wherever any of some accesses is made.

    accesses : the conditions around each access
    """
    first, *others = ([*filter(is_tail, conditions)] for conditions in accesses)
    every = [c.args for c in first if all(is_among(c, other) for other in others)]
    return [(at, int(length)) for at, length, *_ in every if isinstance(length, tirx.IntImm)]


@functools.lru_cache(maxsize=4)
def with_conditions(tree: Any) -> list[tuple[Any, list[Any]]]:
    """The innermost statements and the conditions of a tree, each with the conditions around it."""
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
            loop = isinstance(node, tirx.For)
            heads = [node.min, node.extent, node.step] if loop else [node.condition]
            out.extend((head, conditions) for head in heads if head is not None)
            visit(node.body, conditions)
        elif node is not None:
            out.append((node, conditions))

    visit(tree, [])
    return out


def _is_call(expr: Any, name: str) -> bool:
    return isinstance(expr, ir.Call) and getattr(expr.op, "name", "") == name
