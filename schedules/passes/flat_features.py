"""Visit features in several dense axes, such as heads and their channels, as one axis (stage I).

Before, with vectors along the channels of one head::

    with T.sp_iter([I, J, H, K], "SRSS", "f") as [i, j, h, k]:
        C[i, h, k] = C[i, h, k] + A[i, j] * X[j, h, k]

After, where `H_K` has the product of both lengths::

    with T.sp_iter([I, J, H_K], "SRS", "f") as [i, j, h_k]:
        C[i, h_k] = C[i, h_k] + A[i, j] * X[j, h_k]

Both axes are next to each other wherever one is, in loops, buffers and indices, so no element has
another place in memory: callers give arrays of all dimensions as before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.annotations import THREADS
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    flat_axes,
    make_func,
    sparse_iterations,
    variables_of,
)
from sparsetir.sparse_ir.position_space import DECLARED
from sparsetir.sparse_ir.schedule.loops import Loop, changed, loops_of
from sparsetir.sparse_ir.tir import as_dtype, type_of_product
from sparsetir.sparse_ir.traversal import access_rules, map_expr


def flat_features(func: SparseFunc) -> SparseFunc:
    """A function whose iterations over a sparse axis have no two dense axes that could be one."""
    for it in sparse_iterations(func):
        if not any(axis.is_sparse for axis in flat_axes(it.axes)):
            continue
        for outer, inner in pairwise(loops_of(it)):
            pairs = [(outer.node, inner.node)]
            pairs += [(inner.node, outer.node)] if outer.kinds == "S" else []
            for pair in pairs:
                one = _as_one(func, *pair) if all(map(_is_dense, pair)) else None
                if one is not None:
                    return flat_features(one)
    return func


def _is_dense(node: Any) -> bool:
    return isinstance(node, Axis) and node.kind == "dense_fixed"


def _as_one(func: SparseFunc, high: Axis, low: Axis) -> SparseFunc | None:
    """The function with one axis for two, of which the second is contiguous; None if they are not
    next to each other everywhere."""
    pair = [high.name, low.name]
    if {*pair} & {axis.parent.name for axis in func.axes if axis.parent is not None}:
        return None
    sizes = high.length, low.length
    idtype = type_of_product(sizes, [high.idtype, low.idtype])
    length = as_dtype(high.length, idtype) * as_dtype(low.length, idtype)
    one = Axis(
        name=fresh_name(func, "_".join(pair)), kind="dense_fixed", length=length, idtype=idtype
    )
    buffers, places = [], {}
    for buffer in func.buffers:
        names = [axis.name for axis in buffer.axes or ()]
        if not {*names} & {*pair}:
            buffers.append(buffer)
            continue
        at = names.index(high.name) if high.name in names else -1
        if at < 0 or names[at : at + 2] != pair or len({*names}) < len(names):
            return None
        axes, shape = [*(buffer.axes or ())], [*buffer.var.ty.shape]
        axes[at : at + 2], shape[at : at + 2] = [one], [one.length]
        var = buffer_var(shape, buffer.dtype, buffer.name, buffer.var.ty.storage_scope)
        places[buffer.var] = at, var
        buffers.append(SparseBuffer(var=var, axes=axes, handle=buffer.handle))
    coordinates: dict[Any, tuple[Any, Any]] = {}  # of both axes and of the one, by the first
    new: dict[str, list[Loop]] = {}
    for it in sparse_iterations(func):
        loops = loops_of(it)
        numbers = [n for n, loop in enumerate(loops) if {*loop.axes} & {*pair}]
        if not numbers:
            continue
        first, last = numbers[0], numbers[-1]
        both = loops[first : last + 1]
        if (
            len(numbers) != 2 or len(both) != 2 or not all(_is_dense(x.node) for x in both)
            or both[0].kinds != both[1].kinds or {*map(str, it.annotations)} - {THREADS}
        ):  # fmt: skip
            return None
        outer, inner = sorted(both, key=lambda loop: pair.index(loop.name))
        if both[0].kinds == "R" and both[0] is not outer:
            return None  # another order of terms
        var = tirx.Var(one.name.lower(), one.idtype)
        coordinates[outer.vars[0]] = inner.vars[0], var
        new[it.name] = [*loops[:first], Loop(one, [var], outer.kinds), *loops[last + 1 :]]

    def place(buffer: Any, indices: Any) -> Any:
        at, var = places.get(buffer, (None, None))
        if at is None:
            return None
        low_index, index = coordinates.get(indices[at], (None, None))
        if low_index is None or not low_index.same_as(indices[at + 1]):
            return None
        return var, [*indices[:at], index, *indices[at + 2 :]]

    def iteration(it: Any) -> Any:
        return changed(it, new[it.name]) if it.name in new else it

    body = map_expr(func.body, [*access_rules(place), (SparseIteration, iteration)])
    replaced = {*coordinates, *(low for low, _ in coordinates.values()), *places}
    if replaced & {*variables_of(body)}:
        return None
    declared = {b.name: b for b in func.buffers if b.var in places and b.handle is not None}
    attrs = {**func.attrs, DECLARED: {**declared, **func.attrs.get(DECLARED, {})}}
    return make_func(
        func.name, list(func.params), [*func.axes, one], buffers, body, attrs, func.span
    )
