"""The levels of a pattern in another order: a matrix by columns, a tensor with another mode first.

The axes of a pattern are nested, so that the first one is visited first. Before, with the visits of
a row scattering to rows of B::

    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "RSS", "add") as [i, j, k]:
        B[j, k] = B[j, k] + A[i, j] * C[i, k]

After `with_levels(func, [("J", "I")])`, the same for the transposed matrix, whose arrays take the
parameters of the original; a dense dimension over rows remains one, I_, and so does a loop over
rows alone::

    J = T.dense_fixed(n)
    I = T.sparse_variable(J, (m, nnz), (indptr, indices))
    I_ = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (J, I), "float32")
    C = T.match_sparse_buffer(c, (I_, K), "float32")
    with T.sp_iter([J, I, K], "SRS", "add") as [j, i, k]:
        B[j, k] = B[j, k] + A[j, i] * C[i, k]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tvm_ffi

from sparsetir.sparse_ir.names import numbered
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    attached_axes,
    axis_with,
    buffer_var,
    declared,
    flat_axes,
    iteration_with,
    nodes_of,
    sparse_iterations,
)
from sparsetir.sparse_ir.parallel import constant_length
from sparsetir.sparse_ir.promises import assumed
from sparsetir.sparse_ir.traversal import access_rules, map_expr
from sparsetir.sparse_ir.updates import refused


def wanted_orders(it: SparseIteration, kinds: str) -> dict[str, tuple[str, ...]]:
    """The level order that an iteration needs for each of its patterns, given other kinds.

    Spatial levels come before reductions. Reductions that are already around spatial levels, such
    as the relations of a sum over relations, stay, and so do those of one coordinate. A pattern
    whose levels are all of one kind may have any order, and is omitted.
    """
    old = {axis.name: kind for axis, _, kind in it.axis_of()}
    new = dict(zip(old, kinds, strict=True))
    orders: dict[str, tuple[str, ...]] = {}
    for root, levels in _patterns(it.axes).items():
        if len({new[a.name] for a in levels}) < 2:
            continue
        stay, rest = [], list(levels)

        def stays(first: Axis, below: Sequence[Axis]) -> bool:
            around = old[first.name] == "R" and any(old[a.name] == "S" for a in below)
            return new[first.name] == "S" or around or constant_length(first) == 1

        while rest and stays(rest[0], rest):
            stay.append(rest.pop(0))
        rest.sort(key=lambda axis: new[axis.name] == "R")
        orders[root] = tuple(a.name for a in [*stay, *rest])
    return orders


def with_levels(func: SparseFunc, orders: Iterable[tuple[str, ...]]) -> SparseFunc:
    """A program that visits and stores patterns with their levels in another order.

    Arrays of a level keep their parameters: those of a transposed matrix are its `indptr` and
    `indices`. Values over a pattern are in its new order.

    Raises ValueError for axes that are not a chain of a dense_fixed and sparse_variable ones.
    """
    for order in orders:
        func = _with_levels(func, order)
    return func


def visited_in_order(it: SparseIteration, fused: bool) -> SparseIteration:
    """An iteration in which each pattern of spatial axes is one fused loop, if `fused`.

    If the first loop is a reduction, with no spatial loop of its pattern below it, it moves to the
    end, with the other reductions, unless axes depend on it.
    """
    kind_of = {axis.name: (var, kind) for axis, var, kind in it.axis_of()}
    nodes = list(it.axes)
    for levels in _patterns(nodes).values() if fused else ():
        names = [a.name for a in levels]
        spatial = all(kind_of[n][1] == "S" for n in names)
        plain = sum(isinstance(n, Axis) and n.name in names for n in nodes) == len(levels) > 1
        plain = plain and not any(a.is_merged for a in levels)
        if spatial and plain and _is_chain(levels):
            first = [n.name for n in nodes].index(names[0])
            nodes[first] = FusedAxis(axes=levels)
            nodes = [n for n in nodes if n.name not in names]
    first = flat_axes(nodes[:1])[0]
    under = [a for a in flat_axes(nodes) if a.root.name == first.root.name]
    others = attached_axes(nodes) or any(isinstance(n, PartAxis) for n in nodes)
    if not others and all(kind_of[a.name][1] == "R" for a in under):
        nodes = _spatial_first(nodes, {n: kind for n, (_, kind) in kind_of.items()})
    flat = [kind_of[a.name] for a in flat_axes(nodes)]
    kinds = "".join(kind for _, kind in flat)
    return iteration_with(it, axes=nodes, vars=[v for v, _ in flat], kinds=kinds)


def _spatial_first(nodes: Sequence[Any], kind_of: Mapping[str, str]) -> list[Any]:
    """The loops of an iteration, spatial ones first where their parents are visited before."""
    rest, out = list(nodes), list[Any]()
    while rest:
        left = {a.name for node in rest for a in flat_axes([node])}
        spatial = [
            node
            for node, axes in ((n, flat_axes([n])) for n in rest)
            if kind_of[axes[0].name] == "S"
            and not left & {a.name for a in axes[0].ancestors()} - {a.name for a in axes}
        ]
        node = (spatial or rest)[0]
        rest.remove(node)
        out.append(node)
    return out


def _patterns(nodes: Sequence[Any]) -> dict[str, list[Axis]]:
    """The visited axes, by the root of their tree."""
    levels: dict[str, list[Axis]] = {}
    for axis in flat_axes(nodes):
        levels.setdefault(axis.root.name, []).append(axis)
    return levels


def _is_chain(levels: Sequence[Axis]) -> bool:
    """Whether each axis is the child of the one before it, and the first has no parent."""
    return levels[0].parent is None and all(
        below.parent is not None and below.parent.name == above.name
        for above, below in zip(levels, levels[1:], strict=False)
    )


def _with_levels(func: SparseFunc, order: tuple[str, ...]) -> SparseFunc:
    axes = declared(func).axes
    levels = [a for n, a in axes.items() if n in order]
    if [a.name for a in levels] == [*order]:
        return func
    problem = _problem(func, levels)
    if problem:
        raise refused(
            func,
            f"the gradient needs the pattern of {[a.name for a in levels]} in the order "
            f"{[*order]}, but {problem}; expected a dense_fixed axis with sparse_variable ones in "
            "a chain under it, or transpose=False, which takes the pattern as it is",
        )
    chain: list[Axis] = []
    for at, name in zip(levels, order, strict=True):
        parent = chain[-1] if chain else None
        chain.append(axis_with(at, name=name, length=axes[name].length, parent=parent))
    root = levels[0]
    rows = Axis(numbered(f"{root.name}_", axes), "dense_fixed", root.length, idtype=root.idtype)
    dense = None if order[0] == root.name else _dense_twin(func, chain[0])
    buffers, places = [], {}
    for old in func.buffers:
        over, order_of = _stored_over(func, old, levels, chain, rows)
        over = [chain[0] if dense is not None and a.name == dense.name else a for a in over]
        shape = [a.length for a in over] or list(old.var.ty.shape)
        var = buffer_var(shape, old.dtype, old.name)
        buffers.append(SparseBuffer(var, None if old.axes is None else over, old.handle))
        places[old.var] = var, order_of

    def access(buffer: Any, indices: Any) -> tuple[Any, list[Any]]:
        var, order_of = places[buffer]
        return var, [indices[n] for n in order_of]

    moved = dict(zip([a.name for a in levels], chain, strict=True))

    def visit(it: SparseIteration) -> SparseIteration:
        flat = {axis.name: (var, kind) for axis, var, kind in it.axis_of()}
        if root.name in flat and not {*moved} - {root.name} & {*flat}:
            flat[rows.name] = flat[root.name]
            nodes = [rows if n.name == root.name else n for n in it.axes]
        else:
            nodes = [moved.get(n.name, n) for n in it.axes]
        pairs = [flat[a.name] for a in flat_axes(nodes)]
        return iteration_with(
            it, axes=nodes, vars=[v for v, _ in pairs], kinds="".join(k for _, k in pairs)
        )

    body = map_expr(func.body, [*access_rules(access), (SparseIteration, visit)])
    used = {a.name for b in buffers for a in b.axes or ()}
    used |= {n.name for it in nodes_of(SparseIteration, body) for n in it.axes}
    kept: list[Axis] = []
    for axis in func.axes:
        if axis.name == root.name:
            kept += [*chain, *([rows] if rows.name in used else [])]
        elif axis.name not in moved and not (dense is not None and axis.name == dense.name):
            kept.append(axis)
    return func.replace(axes=kept, buffers=buffers, body=body)


def _problem(func: SparseFunc, levels: Sequence[Axis]) -> str:
    """Return why the levels cannot have another order, or ""."""
    names = {a.name for a in levels}
    if not _is_chain(levels) or levels[0].kind != "dense_fixed":
        return "they are no chain"
    for axis in levels[1:]:
        if axis.kind != "sparse_variable":
            return f"'{axis.name}' is {axis.kind}"
        if not axis.unique and len(levels) > 2:
            return f"'{axis.name}' may store a coordinate twice"
        if axis.idtype != levels[0].idtype:
            return f"'{axis.name}' is of {axis.idtype}, '{levels[0].name}' of {levels[0].idtype}"
    for axis in func.axes:
        if axis.name not in names and axis.parent is not None and axis.parent.name in names:
            return f"'{axis.name}' is below '{axis.parent.name}'"
    for it in sparse_iterations(func):
        here = [n for n in it.axes if names & {a.name for a in flat_axes([n])}]
        rows_alone = [n.name for n in here] == [levels[0].name]
        whole = len(here) in (0, len(levels)) or rows_alone
        if not whole or any(not isinstance(n, Axis) for n in here):
            return f"'{it.name}' visits them in another way"
        for node in attached_axes(it.axes):
            if node.to.name in names:
                return f"'{node.name}' is attached to '{node.to.name}'"
    return ""


def _stored_over(
    func: SparseFunc,
    buffer: SparseBuffer,
    levels: Sequence[Axis],
    chain: Sequence[Axis],
    rows: Axis,
) -> tuple[list[Axis], list[int]]:
    """A buffer's axes for another level order, and the former dimension of each."""
    over = list(buffer.axes or ())
    names = [a.name for a in levels]
    at = [n for n, a in enumerate(over) if a.name in names]
    order = list(range(len(buffer.var.ty.shape)))
    new = [a.name for a in chain[: len(at)]]
    if {over[n].name for n in at} == set(new):
        place = {over[n].name: n for n in at}
        for n, axis in zip(at, chain, strict=False):
            over[n], order[n] = axis, place[axis.name]
    elif len(at) == 1:
        over[at[0]] = rows
    elif at:
        raise refused(
            func,
            f"'{buffer.name}' has values over the levels {[over[n].name for n in at]} of the "
            f"pattern {names}, which the gradient needs in the order {[a.name for a in chain]}; "
            f"expected values over all of them or over '{names[0]}' alone, or transpose=False, "
            "which takes the pattern as it is",
        )
    return over, order


def _dense_twin(func: SparseFunc, root: Axis) -> Axis | None:
    """A dense axis as long as a new root, which replaces it in all buffers."""
    known = {a.name for it in sparse_iterations(func) for a in flat_axes(it.axes)}
    known |= {fact["axis"] for fact in assumed(func)}
    for buffer in func.buffers:
        names = {a.name for a in buffer.axes or ()}
        known |= names if root.name in names else set()
    return next((a for a in func.axes if a.name not in known and _as_long(a, root)), None)


def _as_long(a: Axis, b: Axis) -> bool:
    kinds = a.kind, a.idtype
    return kinds == (b.kind, b.idtype) and tvm_ffi.structural_equal(a.length, b.length)
