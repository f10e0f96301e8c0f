"""Placement of a reduction's init: inside the reduction block, or in separate loops before it.

The init runs for every coordinate of the spatial axes, before all updates. Inside the block it
only runs for the coordinates that the loops visit; these are the same if each spatial axis is
dense, or is an axis of the written buffer (its other coordinates are absent there), and does not
depend on a reduction. All parts of an axis together visit all of it
(:class:`sparsetir.PartAxis`).

Inside the block the init also runs between updates, at the start of each visit of the loops around
the reduction; that is harmless if no other visit accesses the elements that it initialises. It is
not if a spatial axis is missing from the indices of the store, such as O in ::

    with T.sp_iter([O, I, J], "SSR", "sums") as [o, i, j]:
        with T.init():
            C[i] = 0.0
        C[i] = C[i] + A[i, j]
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    declared,
    flat_axes,
    iteration_with,
    stores_of,
    variables_of,
    visited_node,
)
from sparsetir.sparse_ir.parallel import (
    constant_length,
    has_own_place,
    has_own_positions,
    written_accesses,
)


def init_runs_in_place(it: SparseIteration, func: SparseFunc) -> bool:
    """Whether the init may be placed in the reduction block."""
    if "R" not in it.kinds or any(a.is_merged for a in flat_axes(it.axes)):
        return False
    kind_of = {axis.name: kind for axis, _, kind in it.axis_of()}
    attached = {a.name for a in map(visited_node, it.axes) if isinstance(a, AttachedAxis)}
    cut = {n.name for n in it.axes if isinstance(n, PartAxis) and _parts_are_reduced(n, kind_of)}
    if any("S" in kind_of[a.name] for a in flat_axes([n for n in it.axes if n.name in cut])):
        return False
    for node in map(visited_node, it.axes):
        if isinstance(node, FusedAxis) and len({kind_of[a.name] for a in node.axes}) > 1:
            return False
    stores = stores_of(it.init)
    written = {s.buffer for s in stores}
    initialised = {b: each for b, each in written_accesses(it).items() if b in written}
    for axis, var, kind in it.axis_of():
        if kind != "S":
            continue
        depends = [a.name for a in axis.ancestors()[:-1]]
        if axis.name in attached or any(kind_of.get(a) == "R" for a in depends):
            return False
        if axis.kind == "dense_fixed":
            continue
        own = axis.unique or has_own_positions(it, axis, initialised, func)
        if not own or not all(_indexes(s, var, axis, func) for s in stores):
            return False
    if not _visits_set_own_elements(it):
        return False
    # A dense axis fused with a sparse one is only visited where that one stores an element: the
    # loop above has excluded that, since the sparse one must index every store.
    return True


def _parts_are_reduced(node: PartAxis, kind_of: dict[str, str]) -> bool:
    """Whether the iteration reduces over the parts of an axis."""
    return any(kind_of.get(a.name) == "R" for a in node.by.ancestors()[:-1])


def _visits_set_own_elements(it: SparseIteration) -> bool:
    """Whether each element that the init stores is accessed for one spatial coordinate only."""
    initialised = {s.buffer for s in stores_of(it.init)}
    accesses = [each for b, each in written_accesses(it).items() if b in initialised]
    return all(
        has_own_place(it, var, each)
        for axis, var, kind in it.axis_of()
        if kind == "S" and constant_length(axis) != 1
        for each in accesses
    )


def separate_init(it: SparseIteration, func: SparseFunc, visited: Any) -> list[SparseIteration]:
    """The init as a separate iteration, over the coordinates of the spatial axes.

    A second one is added if an axis may store a coordinate several times: a search finds one
    element per coordinate, and the second iteration visits each of them.

    visited : names of the axes that enclosing iterations visit
    """
    spatial = {var: axis for axis, var, kind in it.axis_of() if kind == "S"}
    used = {var for var in variables_of(it.init) if var in spatial}
    axes = _axes_of_the_store(it, func, spatial, used, visited)
    name = fresh_name(func, f"{it.name}_init")
    if axes is not None:
        return [_init_over(it, name, list(axes.values()), "S" * len(axes), list(axes))]
    axes = {var: _all_of(axis, func, visited) for var, axis in spatial.items() if var in used}
    iterations = [_init_over(it, name, list(axes.values()), "S" * len(axes), list(axes))]
    if not all(spatial[var].unique for var in axes):
        count = 1 + max(n for n, var in enumerate(it.vars) if var in used)
        nodes, seen = [], 0
        for node in it.axes:
            if seen < count:
                nodes.append(node)
                seen += len(flat_axes([node]))
        name = fresh_name(func, name, [name])
        iterations.append(_init_over(it, name, nodes, it.kinds[:seen], list(it.vars)[:seen]))
    return iterations


def _init_over(
    it: SparseIteration, name: str, axes: list[Any], kinds: str, variables: list[Any]
) -> SparseIteration:
    fields = {"axes": axes, "kinds": kinds, "name": name, "vars": variables}
    return iteration_with(it, **fields, init=None, body=it.init, annotations={})


def _all_of(axis: Axis, func: SparseFunc, visited: Any) -> Axis:
    """A dense axis over all coordinates of another one.

    An axis of the function if there is such a one that no enclosing iteration visits.
    """
    name = f"{axis.name}_all"
    known = next((a for a in func.axes if a.name == name and name not in visited), None)
    like = {"kind": "dense_fixed", "length": axis.length, "idtype": axis.idtype}
    if known is not None and tvm_ffi.structural_equal(known, Axis(name=name, **like)):
        return known
    return Axis(name=fresh_name(func, name), **like)


def _axes_of_the_store(
    it: SparseIteration, func: SparseFunc, spatial: dict[Any, Axis], used: set[Any], visited: Any
) -> dict[Any, Axis] | None:
    """The written buffer's own axes, if its indices are plain spatial coordinates.

    Then the buffer's stored elements are visited directly, without a search.
    """
    stores = stores_of(it.init)
    if len(stores) != 1 or it.init is not stores[0] and not it.init.same_as(stores[0]):
        return None
    buf = declared(func).buffer_of(stores[0].buffer)
    if buf is None or buf.axes is None:
        return None
    out: dict[Any, Axis] = {}
    names = set(visited)
    for axis, index in zip(buf.axes, stores[0].indices, strict=True):
        var = next((v for v in spatial if isinstance(index, ir.Var) and v.same_as(index)), None)
        if var is None:
            at_one = axis.kind == "dense_fixed" and not used & set(variables_of(index))
            if axis.name not in visited and not at_one:
                return None
            continue
        if var in out or axis.idtype != spatial[var].idtype:
            return None
        if not tvm_ffi.structural_equal(axis.length, spatial[var].length):
            return None  # the init only runs for the coordinates of the iteration's axis
        if axis.parent is not None and axis.parent.name not in names:
            return None
        out[var] = axis
        names.add(axis.name)
    return out if set(out) == used else None


def _indexes(store: Any, var: Any, axis: Axis, func: SparseFunc) -> bool:
    """Whether `var`, as an index of the written buffer, belongs to the axis that it iterates."""
    buf = declared(func).buffer_of(store.buffer)
    if buf is None or buf.axes is None:
        return False
    return any(
        a.name == axis.name and isinstance(i, ir.Var) and i.same_as(var)
        for a, i in zip(buf.axes, store.indices, strict=True)
    )
