"""Loops of an iteration that may run in parallel.

A spatial loop is free of races if each of its coordinates writes its own elements and, of the
written buffers, reads only those: all accesses to a written buffer have, in the same dimension, the
coordinate itself as index, or a sum of multiples of it and other spatial coordinates that is
injective, as `io * 16 + ii` is for `ii` below 16, and `io * b + ii` for `ii` below the parameter
`b`.

Different parts of an axis (`T.part`) have different positions: if its coordinates access disjoint
elements, so do those of the axis that enumerates the parts.

Ranges of an axis's coordinates that are equal for all of its parents are parts as well, with
disjoint coordinates whatever the parent (:mod:`sparsetir.sparse_ir.schedule.ranges`).

A loop of one visit is free. An axis that may store a coordinate twice is free if the written buffer
lies over the axis itself and is accessed at the visit's own position.

Coordinates of a sparse axis are only distinct under one parent. Loops outside a level of loops are
loop-invariant in it, but a schedule may interchange the loops of one level, and a level may hold an
axis and its parent if all parents store equally many: then the parent's loop must be free, too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.affine import affine, expr_of, is_injective
from sparsetir.sparse_ir.annotations import RANGES
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseFunc,
    SparseIteration,
    declared,
    flat_axes,
    nodes_of,
    stores_of,
    substitute,
    variables_of,
    visited_node,
)
from sparsetir.sparse_ir.tile_marks import limits_of, with_conditions
from sparsetir.sparse_ir.tir import constant

# The coefficient of each coordinate of a sum: loop-invariant factors, times a number.
Coefficients = dict[Any, tuple[tuple[Any, ...], int]]


def parallel_units(
    it: SparseIteration, private: set[Any] | None = None, func: SparseFunc | None = None
) -> list[int]:
    """The indices of the loops of an iteration (a fused axis is one) that may run in parallel.

    private : buffers that are private to each visit
    func : the iteration's function, from which the axes of buffers are known
    """
    accesses = {b: each for b, each in written_accesses(it).items() if b not in (private or ())}
    out: list[int] = []
    free: dict[str, bool] = {}
    alike = [str(name) for name in it.annotations.get(RANGES, [])]
    for number, (entry, at, end) in enumerate(it.entries()):
        node, coords, kinds = visited_node(entry), it.vars[at:end], it.kinds[at:end]
        axes = list(node.axes) if isinstance(node, FusedAxis) else [node]
        plain = [a.axis if isinstance(a, AttachedAxis) else a for a in axes]
        is_free = set(kinds) == {"S"} and (
            all(map(is_one_visit, plain))
            or all(
                a.unique or (func is not None and has_own_positions(it, a, accesses, func))
                for a in plain
            )
            and all(a.name in alike or _differs_between_parents(a, free) for a in axes)
            and bool(accesses)
            and all(has_own_place(it, v, each) for v in coords for each in accesses.values())
        )
        free |= dict.fromkeys((a.name for a in plain), is_free)
        if is_free:
            out.append(number)
    return out


class Access(NamedTuple):
    """The indices of a load or store, and the conditions around it."""

    indices: list[Any]
    conditions: list[Any]


@functools.lru_cache(maxsize=4)
def written_accesses(it: SparseIteration) -> dict[Any, list[Access]]:
    """All loads and stores of each buffer that the iteration writes.

    Buffers allocated inside the iteration are left out: each visit has its own.
    """
    accesses: dict[Any, list[Access]] = {}
    skipped: set[Any] = set()
    for stmt, conditions in (*with_conditions(it.body), *with_conditions(it.init)):
        for node in nodes_of((tirx.BufferStore, ir.TensorLoad, tirx.AllocBuffer), stmt):
            buffer = node.source if isinstance(node, ir.TensorLoad) else node.buffer
            if isinstance(node, tirx.AllocBuffer):
                skipped.add(buffer)
            else:
                accesses.setdefault(buffer, []).append(Access(list(node.indices), conditions))
    written = {s.buffer for s in stores_of(it.body, it.init)} - skipped
    return {b: each for b, each in accesses.items() if b in written}


def has_own_place(it: SparseIteration, coord: Any, accesses: list[Access]) -> bool:
    """Whether accesses of one buffer can only conflict in visits of equal `coord`.

    coord : a coordinate of the iteration, or of one nested in it

    That holds if one of their dimensions is the same sum in all of them, `coord` is in it, and the
    sum is injective. Loop-invariant terms may be added, such as parameters and coordinates of an
    enclosing iteration; so may coordinates of nested iterations, each taken for any coordinate of
    its axis.
    """
    if _has_own_sum(it, coord, accesses):
        return True
    return any(
        all(_has_own_sum(it, inner, accesses) for inner in inside)
        for inside in _parts_of(it, coord)
    )


def has_own_positions(
    it: SparseIteration, axis: Axis, accesses: dict[Any, list[Access]], func: SparseFunc
) -> bool:
    """Whether each access of these buffers is at the current position on `axis`.

    Positions also differ where an axis stores a coordinate twice. The buffer lies over this axis,
    and is indexed by the iteration's coordinates of it and its ancestors.
    """
    coords = {a.name: v for a, v, _ in it.axis_of()}
    return all(
        a.name in coords and is_at(func, buffer, a, coords[a.name], each)
        for buffer, each in accesses.items()
        for a in axis.ancestors()
    )


def is_at(func: SparseFunc, buffer: Any, axis: Axis, coord: Any, accesses: list[Access]) -> bool:
    """Whether all accesses of a buffer are at a coordinate of one of its axes."""
    found = declared(func).buffer_of(buffer)
    places = [n for n, a in enumerate((found and found.axes) or ()) if a.name == axis.name]
    return bool(places) and all(access.indices[places[0]].same_as(coord) for access in accesses)


def _parts_of(it: SparseIteration, coord: Any) -> list[list[Any]]:
    """The coordinates of each entry whose parts `coord` enumerates."""
    inside = [it, *_nested(it)]
    axis = next(a for x in inside for a, v, _ in x.axis_of() if v.same_as(coord))
    groups: list[list[Any]] = []
    for visit, (node, at, end) in ((x, entry) for x in inside for entry in x.entries()):
        axes, coords = flat_axes([node]), list(visit.vars[at:end])
        kinds = visit.kinds[at:end]
        if isinstance(node, PartAxis) and set(kinds) == {"S"} and all(a.unique for a in axes):
            under = {a.name for a in node.by.ancestors()[:-1]}
            if axis.name in under - {a.name for a in axes[0].ancestors()}:
                groups.append(coords)
    return groups


def _has_own_sum(it: SparseIteration, coord: Any, accesses: list[Access]) -> bool:
    """Whether one index of all accesses is a sum that determines `coord`."""
    axis_of, same, moving = _bindings(it)
    coord = same.get(coord, coord)
    limits: list[Any] | None = None
    for dimension in zip(*(access.indices for access in accesses), strict=True):
        first, *others = (affine(substitute(index, same)) for index in dimension)
        weights = _coefficients(first.terms, axis_of, moving)
        if weights is None or coord not in weights or any(s != first for s in others):
            continue
        if limits is None:
            known = limits_of([access.conditions for access in accesses])
            sums = [(affine(substitute(x, same)).weights(axis_of), n) for x, n in known]
            limits = [(x, n) for x, n in sums if x]
        if _is_injective(weights, axis_of, limits):
            return True
    return False


def _differs_between_parents(node: Any, free: dict[str, bool]) -> bool:
    """Whether the axis's extent varies by parent, or its parent's loop is free of races.

    free : for each axis of the loops before it, whether its loop is free of races
    """
    parent = node.to if isinstance(node, AttachedAxis) else node.parent
    axis = node.axis if isinstance(node, AttachedAxis) else node
    if axis.kind != "sparse_fixed" or parent is None or parent.name not in free:
        return True  # other kinds have extents that vary by parent, so a level starts there
    return free[parent.name] or (parent.parent is None and constant_length(parent) == 1)


def _nested(it: SparseIteration) -> list[SparseIteration]:
    return nodes_of(SparseIteration, it.body)


class _Bindings(NamedTuple):
    """The variables of an iteration and of the statements nested in it.

    axis_of : the axis and kind of each coordinate
    same : for each coordinate of a nested iteration the representative of all over its axis
    moving : variables that statements inside define
    """

    axis_of: dict[Any, tuple[Axis, str]]
    same: dict[Any, Any]
    moving: set[Any]


@functools.lru_cache(maxsize=4)
def _bindings(it: SparseIteration) -> _Bindings:
    nested = _nested(it)
    axis_of = {var: (axis, kind) for axis, var, kind in it.axis_of()}
    first_over: dict[str, Any] = {}
    same: dict[Any, Any] = {}
    for axis, var, kind in (c for x in nested for c in x.axis_of()):
        same[var] = first_over.setdefault(axis.name, var)
        axis_of.setdefault(same[var], (axis, kind))
    moving = {x.loop_var for x in nodes_of(tirx.For, it.body, it.init)}
    moving |= {x.var for x in nodes_of(tirx.Bind, it.body, it.init)}
    for inner in nodes_of(SparseIteration, it.body, it.init):
        moving.update(inner.vars)
    return _Bindings(axis_of, same, moving)


def _coefficients(
    terms: dict[Any, int], axis_of: dict[Any, Any], moving: set[Any]
) -> Coefficients | None:
    """The coefficients of the coordinates in a sum; None if any term of it is not invariant.

    axis_of : the coordinates of the iteration
    moving : other variables that are not loop-invariant
    """
    out: Coefficients = {}
    for term, number in terms.items():
        coords = [x for x in term if x in axis_of]
        still = tuple(x for x in term if x not in axis_of)
        used = [v for x in still for v in variables_of(expr_of(x))]
        moves = any(v in axis_of or v in moving or tirx.is_buffer_var(v) for v in used)
        if moves or len(coords) > 1 or coords and coords[0] in out:
            return None
        out |= dict.fromkeys(coords, (still, number))
    return out


def _is_injective(
    weights: Coefficients, axis_of: dict[Any, Any], limits: list[tuple[dict[Any, Any], int]]
) -> bool:
    """Whether a sum of spatial coordinates is injective.

    limits : see :func:`is_injective`
    """
    if any(axis_of[v][1] != "S" for v in weights):
        return False
    symbolic = {v: c for v, c in weights.items() if c[0]}
    if symbolic:  # only as in io * b + ii, where b is the length of ii's axis
        small = [v for v, c in weights.items() if c in (((), 1), ((), -1))]
        if len(symbolic) > 1 or len(small) != 1 or len(weights) > 2:
            return False
        (tile,) = symbolic.values()
        return affine(axis_of[small[0]][0].length).terms == dict([tile])
    terms = [(v, c, constant_length(axis_of[v][0])) for v, (_, c) in weights.items()]
    return is_injective(terms, limits)


def is_one_visit(axis: Axis) -> bool:
    """Whether a loop over an axis has one visit, as over the root of a list of rows."""
    return axis.kind == "dense_fixed" and constant_length(axis) == 1


def constant_length(axis: Axis) -> int | None:
    """The number of coordinates of an axis, if it is constant."""
    return constant(axis.length)
