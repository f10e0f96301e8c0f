"""Restrict `likely` to conditions of tiles that TVM may partition loops by.

TVM partitions a loop by a condition marked as likely: the visits where it holds for all inner
visits, and the rest. It computes the end of the first part, and assumes that it is not before
the start of the loop. It is before, if inner tiles are longer than the loop they tile, and the loop
is short::

    for k0 in range((n + 1) // 2):
        for k1, k2 in T.grid(4, 2):              # tiles of 8, with 2 visited
            if T.likely(k1 * 2 + k2 <= 1):
                if T.likely(k0 * 2 + k1 * 2 + k2 <= n - 1):
                    C[k0 * 2 + k1 * 2 + k2] = ..

For n = 1 the second part would begin at k0 = -3. After::

                if k0 * 2 + k1 * 2 + k2 <= n - 1:
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.nodes import nodes_of, substitute
from sparsetir.sparse_ir.tile_marks import is_likely
from sparsetir.sparse_ir.tir import constant, free_vars, values_of, with_body
from sparsetir.sparse_ir.traversal import map_expr


def sound_tail_hints(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-III function in which only conditions that TVM partitions correctly are likely.

    A condition stays likely if at most one loop of it has a non-constant extent, the inner loops
    visit no more than one step of that one, and nothing else is added: the first visit of a
    remainder of `peel` may be beyond the end.
    """
    hints = [c for n in nodes_of(tirx.IfThenElse, func.body) for c in [n.condition] if is_likely(c)]
    if not hints:
        return func
    extents = {loop.loop_var: loop.extent for loop in nodes_of(tirx.For, func.body)}
    places: dict[Any, Any] = {}
    for realize in nodes_of(s_tir.SBlockRealize, func.body):
        for var, value in values_of(realize).items():
            places[var] = substitute(value, places)

    def branch(node: Any) -> Any:
        if not is_likely(node.condition):
            return node
        test = node.condition.args[0]
        if _is_sound(substitute(test, places), extents):
            return node
        return tirx.IfThenElse(test, node.then_case, node.else_case, node.span)

    return with_body(func, map_expr(func.body, [(tirx.IfThenElse, branch)]))


def _is_sound(test: Any, extents: dict[Any, Any]) -> bool:
    if not isinstance(test, tirx.LT | tirx.LE):
        return True
    sizes = {v: constant(extents[v]) for v in free_vars(test.a) if v in extents}
    open_ended = [v for v, size in sizes.items() if size is None]
    if not open_ended:
        return True  # TVM does not partition loops of constant extents

    def least(node: Any) -> Any:
        moving = [x for x in (node.a, node.b) if free_vars(x) & set(extents)]
        return moving[0] if len(moving) == 1 else node

    plain = map_expr(test.a, [(tirx.Cast, lambda node: node.value), (tirx.Min, least)])
    weights = affine(plain).weights(sizes)
    if weights is None:
        return False
    inside = sum(abs(weights.get(v, 0)) * (size - 1) for v, size in sizes.items() if size)
    return len(open_ended) == 1 and inside < abs(weights.get(open_ended[0], 0))
