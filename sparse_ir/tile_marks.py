"""Predicates and bounds of tiles, marked as created by a primitive.

`split` bounds the start of a tile, and guards what a tile must not repeat::

    if T.tail(T.at_most(k0 * 64, feat - 64) + l >= k0 * 64):
        C[i, T.at_most(k0 * 64, feat - 64) + l] = ...

`T.tail(p)` is p, and `T.at_most(a, b)` the minimum of a and b, to the interpreter and to kernels.
To analyses they identify the predicates of tiles: a program's own predicate is `T.likely(p)` or p,
and its own bound `T.min(a, b)`, about which nothing is assumed. They are separate operators until
positions are lowered. :func:`limits_of` gives the bounds on coordinates that they imply for
accesses.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import _ffi_api
from tvm.sym import Analyzer

from sparsetir.sparse_ir.nodes import SparseIteration, is_among, nodes_of
from sparsetir.sparse_ir.traversal import map_expr

TAIL, BOUND = "sparsetir.tail", "sparsetir.at_most"
LIKELY = "prim.likely"
EFFECTS = {TAIL: 0, BOUND: 1}  # TVM's numbers for an annotation of a value and a pure function


def _register() -> None:
    known = set(map(str, _ffi_api.ListOpNames()))
    for name in EFFECTS.keys() - known:  # once per process, even if this module is reloaded
        _ffi_api.RegisterOp(name, "of a tile")
        op = ir.Op.get(name)
        op.set_attr("TCallEffectKind", EFFECTS[name])
        op.set_attr("TScriptPrinterName", name.rpartition(".")[2])


_register()


def tail(condition: Any) -> Any:
    """The predicate of a tile, marked as such."""
    return tirx.call_intrin("bool", TAIL, condition)


def at_most(value: Any, bound: Any) -> Any:
    """The minimum of two integers of one type: the start of a tile, or a coordinate in it."""
    return tirx.call_intrin(value.ty.dtype, BOUND, value, bound)


def is_tail(condition: Any) -> bool:
    """Whether a condition is the predicate of a tile."""
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
    """A tree in which tails become `T.likely` and bounds `T.min`, which TVM's passes know.

    A program's own `T.likely` is reduced to its predicate: TVM partitions loops by likely
    conditions, and expects that they change within the loop, which is only known of tiles.
    """

    def plain(node: Any) -> Any:
        if is_likely(node):
            return node.args[0]
        if is_tail(node):
            return tirx.likely(node.args[0])
        return tirx.Min(*node.args) if is_bound(node) else node

    return map_expr(tree, [(ir.Call, plain)])


def start_of(condition: Any) -> Any:
    """The start of the tile of a predicate, or the coordinate if it repeats the last; or None."""
    test: Any = condition.args[0] if is_tail(condition) else None
    if isinstance(test, tirx.LE):
        return test.a
    return test.b if isinstance(test, tirx.GE) else None


def repeats(condition: Any) -> bool:
    """Whether a condition is the predicate of a tile that repeats the last coordinate."""
    return is_tail(condition) and isinstance(condition.args[0], tirx.LE)


def without_tail_shifts(tree: Any) -> Any:
    """A statement or iteration in which no tile begins earlier or repeats a coordinate.

    For dependence analysis. Where the predicate of such a tile holds, its coordinate is in no other
    tile; nor is the coordinate without the shift, which is less than the length::

        if T.tail(k0 * 64 + l < feat):
    """

    def branch(node: Any) -> Any:
        start = start_of(node.condition)
        if start is None:
            return node
        coordinate = node.condition.args[0].a
        if isinstance(node.condition.args[0], tirx.LE):
            plain = with_starts(node, [coordinate])
            below = tail(coordinate < Analyzer().simplify(node.condition.args[0].b + 1))
        else:
            length = _length(coordinate, start)
            plain = with_starts(node, [start])
            if length is None:
                return plain
            below = tail(with_starts(coordinate, [start]) < length)
        return tirx.IfThenElse(below, plain.then_case, plain.else_case, node.span)

    return map_expr(tree, [(tirx.IfThenElse, branch)])


def _length(coordinate: Any, start: Any) -> Any:
    """The length of the axis of a shifted tile; None if it cannot be derived."""
    bounds = [node.args for node in nodes_of(ir.Call, coordinate) if is_bound(node)]
    ends = [end for begin, end in bounds if tvm_ffi.structural_equal(begin, start)]
    tile = start.b if isinstance(start, tirx.Mul) and isinstance(start.b, tirx.IntImm) else 1
    return Analyzer().simplify(ends[0] + tile) if ends else None


def with_starts(stmt: Any, starts: list[Any]) -> Any:
    """A statement in which these starts, or coordinates, of tiles have no bounds."""

    def smaller(node: Any) -> Any:
        return node.args[0] if is_bound(node) and is_among(node.args[0], starts) else node

    return map_expr(stmt, [(ir.Call, smaller)]) if starts else stmt


def contains(many: list[Any], few: list[Any]) -> bool:
    """Whether each of some expressions is among `many`."""
    return all(is_among(f, many) for f in few)


def limits_of(accesses: list[list[Any]]) -> list[tuple[Any, int]]:
    """(sum of coordinates, exclusive bound) pairs that hold wherever any of some accesses is made.

    accesses : the conditions around each access
    """
    first, *others = ([*filter(_limit, conditions)] for conditions in accesses)
    every = [c for c in first if all(is_among(c, other) for other in others)]
    return [(c.args[0].a, int(c.args[0].b)) for c in every]


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


def _limit(condition: Any) -> bool:
    """Whether a condition is the predicate of a tail with a constant length."""
    if not is_tail(condition) or not isinstance(condition.args[0], tirx.LT):
        return False
    return isinstance(condition.args[0].b, tirx.IntImm)
