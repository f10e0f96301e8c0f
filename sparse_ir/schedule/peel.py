"""Split the coordinates that fill no whole tile off, as an iteration of their own.

Before::

    with T.sp_iter([E, K], "SR", "sddmm") as [e, k]:
        Out[e] = Out[e] + X[I_at[e], k] * Y[J_at[e], k]

After `peel(e, 8)`, where the first loop's extent is a multiple of 8, so that a split by 8 has no
tail::

    E_whole = T.dense_fixed(nnz // 8 * 8)
    E_rest = T.dense_fixed(nnz % 8)
    with T.sp_iter([E_whole, K], "SR", "sddmm") as [e, k]:
        Out[e] = Out[e] + X[I_at[e], k] * Y[J_at[e], k]
    with T.sp_iter([E_rest, K], "SR", "sddmm_rest") as [e_1, k_1]:
        Out[nnz // 8 * 8 + e_1] = ...

The first iteration keeps its name, and runs first. For a reduction only the first one has the init.
Conditions of shifted tiles (`split`) that always hold in the first one are dropped there.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.legal import writes_disjoint
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, SparseIteration, nodes_of, substitute
from sparsetir.sparse_ir.schedule.loops import (
    MOST,
    Change,
    Loop,
    SpIter,
    change_of,
    changed,
    handle_of,
    loops_of,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.steps import over_fresh_vars
from sparsetir.sparse_ir.tile_marks import is_bound, is_tail, predicate_of, without_marks
from sparsetir.sparse_ir.tir import as_dtype, size_text
from sparsetir.sparse_ir.traversal import map_expr

NAME = "peel"


@primitive(reorders=True)
def peel(func: SparseFunc, loop: SpIter, multiple: int) -> tuple[SparseFunc, tuple[SpIter, SpIter]]:
    """Split the coordinates that fill no whole tile off, as an iteration of their own.

    Parameters
    ----------
    loop : SpIter
        A loop over one dense_fixed axis without children, of an iteration without nested ones; a
        spatial one must be free of races if the iteration has an init.
    multiple : int
        The divisor of the first loop's length; the second loop is shorter than it.

    Returns
    -------
    (SpIter, SpIter)
        The loop over whole tiles, and the loop of the new iteration.
    """
    change = change_of(NAME, func, loop)
    it, (old,), (place,) = change.it, change.chosen, change.places
    if isinstance(multiple, bool) or not isinstance(multiple, int) or not 1 < multiple < MOST:
        change.refuse(
            f"argument 'multiple': expected an integer of 2 or more, below {MOST}, got {multiple!r}"
        )
    axis = _peelable(change, old)
    size = as_dtype(multiple, axis.idtype)
    length = as_dtype(axis.length, axis.idtype)
    analyzer = Analyzer()
    whole = analyzer.simplify(tirx.floordiv(length, size) * size)
    left = analyzer.simplify(tirx.floormod(length, size))
    if isinstance(left, tirx.IntImm) and not int(left):
        change.refuse(
            f"argument 'multiple': axis '{axis.name}' of {size_text(axis.length)} coordinates is a "
            f"multiple of {multiple}; there is nothing to peel"
        )
    both = [
        Axis(name=fresh_name(func, f"{axis.name}_{what}"), kind="dense_fixed", length=n,
             idtype=axis.idtype)
        for what, n in (("whole", whole), ("rest", left))
    ]  # fmt: skip
    first = changed(it, change.with_loops(Loop(both[0], old.vars, old.kinds)))
    # Both iterations would initialise the same elements.
    if it.init is not None and old.kinds == "S" and not writes_disjoint(func, it, place):
        change.refuse(
            f"loop '{old.name}' is not proven to write elements of its own, which the second init "
            "would reset"
        )
    for made_axis, var, _ in first.axis_of():
        length = as_dtype(made_axis.length, made_axis.idtype)
        analyzer.bind(var, ir.Range(as_dtype(0, made_axis.idtype), length))
    first = changed(first, body=_without_held(it.body, analyzer))
    later = {old.var: whole + old.var}
    init = None if it.init is None or old.kinds == "R" else substitute(it.init, later)
    second = changed(
        it, change.with_loops(Loop(both[1], old.vars, old.kinds)), name=change.name("rest"),
        init=init, body=substitute(it.body, later),
    )  # fmt: skip
    second = over_fresh_vars(second)
    out = change.put(tirx.SeqStmt([first, second]), axes=both)
    handles = [handle_of(x, loops_of(x)[place]) for x in (first, second)]
    return out, (handles[0], handles[1])


def _peelable(change: Change, loop: Loop) -> Axis:
    it, axis = change.it, change.dense_axis(loop)
    nested = nodes_of(SparseIteration, it.body)
    if nested:
        change.refuse(
            f"expected an iteration without nested ones, got '{nested[0].name}' inside; peel "
            "before what is inside is made, or there"
        )
    under = [a.name for node in it.axes for a in _parents(node) if a.name == axis.name]
    if under or it.annotations:
        why = "has annotations" if it.annotations else f"visits axes under '{axis.name}'"
        change.refuse(f"the iteration {why}, which peeling would lose")
    return axis


def _parents(node: Any) -> list[Axis]:
    """The parents of an entry of an iteration."""
    if isinstance(node, Axis):
        return node.ancestors()[:-1]
    inner = [getattr(node, "to", None), getattr(node, "by", None)]
    parents = [a for x in inner if x is not None for a in x.ancestors()]
    for part in getattr(node, "axes", None) or [getattr(node, "axis", None)]:
        parents += _parents(part) if isinstance(part, Axis) else []
    return parents


def _without_held(body: Any, analyzer: Any) -> Any:
    """A body without conditions of shifted tiles, if no tile of it begins earlier."""

    def smaller(node: Any) -> Any:
        held = is_bound(node) and analyzer.can_prove(node.args[0] <= without_marks(node.args[1]))
        return node.args[0] if held else node

    def branch(node: Any) -> Any:
        tail = node.else_case is None and is_tail(node.condition)
        held = tail and analyzer.can_prove(without_marks(predicate_of(node.condition)))
        return node.then_case if held else node

    body = map_expr(body, [(ir.Call, smaller)])
    return map_expr(body, [(tirx.IfThenElse, branch)])
