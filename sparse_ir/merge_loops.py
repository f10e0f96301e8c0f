"""The loop of a merged axis: co-iteration of several axes, with a pointer into each.

A pointer is at the first element of its axis that has not been visited, and `at` is that element's
coordinate. Each step visits the least of these, and advances the pointers that are at it, without a
branch (Kjolstad et al., "The tensor algebra compiler", section 5: the points of the merge lattice
are predicates here). For `T.union(J1, J2)` under I::

    J1_ptr[0] = 0
    J2_ptr[0] = 0
    J1_at[0] = J1_indices[vi, 0] if it stores anything, else n
    J2_at[0] = ...
    j[0] = min(J1_at[0], J2_at[0])
    while j[0] < n:
        ...  # the body; A[i, j] is A[vi, J1_ptr[0]] where J1_at[0] == j[0], else 0
        J1_ptr[0] += J1_at[0] == j[0]
        J2_ptr[0] += J2_at[0] == j[0]
        J1_at[0] = ...
        j[0] = min(J1_at[0], J2_at[0])

A union of two axes whose body has no blocks is split into the points of the lattice, with the terms
of absent operands removed from each. Where coordinates come in runs, the branches are predicted
well, and no step waits for the one before it::

    while J1_at[0] < n and J2_at[0] < n:
        if J1_at[0] == J2_at[0]: ...  # of both; both pointers move
        elif J1_at[0] < J2_at[0]: ...  # of J1 alone, A[vi, J1_ptr[0]] and 0
        else: ...  # of J2 alone
    while J1_at[0] < n: ...  # what is left of J1
    while J2_at[0] < n: ...

An intersection ends with the first of its axes to end, and visits where all pointers agree; for two
axes it is the first of these loops, with a body for the case of both. Differences and nested merged
axes visit coordinates that satisfy their predicates on the pointers. Visits are sequential: the
loop is a `while`, around blocks that cannot contain it.

Where the schedule says so (:mod:`sparsetir.sparse_ir.schedule.gallop`), the pointer of an axis
with at least a given multiple of another one's elements gallops: it moves to the first element not
before the other pointer's, found in steps of 1, 2, 4, ... elements and then by bisection (Bentley
and Yao, "An almost optimal algorithm for unbounded searching"). For two axes, and a body without
blocks, a second loop serves lengths below that ratio::

    J2_far[0] = 1
    while J2_far[0] < size - J2_ptr[0] and J2_indices[vi, J2_ptr[0] + J2_far[0]] < J1_at[0]:
        J2_ptr[0] += J2_far[0]
        J2_far[0] *= 2
    J2_far[0] = min(J2_far[0], size - J2_ptr[0]) + J2_ptr[0]
    J2_ptr[0] += 1
    while J2_ptr[0] < J2_far[0]:  # half of what is between them
        ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.exact import is_choice
from sparsetir.sparse_ir.nodes import AttachedAxis, Axis, flat_axes, nodes_of
from sparsetir.sparse_ir.position_loop import PositionLoop, extent_under, parents_of, present_above
from sparsetir.sparse_ir.position_space import PositionSpace
from sparsetir.sparse_ir.search import load_one, store_one
from sparsetir.sparse_ir.tir import as_dtype, as_one, conjunction
from sparsetir.sparse_ir.translate import Scope, Translator, Visit
from sparsetir.sparse_ir.traversal import map_expr

BLOCKS = s_tir.SBlockRealize


@dataclass
class Pointer:
    """The loop's pointer into one of the merged axes.

    place, at : one-element buffers, of its position under the parents and of the coordinate there
    extent : the number of positions under the parents, 0 if these are absent
    far : a one-element buffer, the end of the range to search, for an axis that gallops
    """

    axis: Axis
    place: Any
    at: Any
    parents: list[Any]
    extent: Any
    far: Any = None

    @property
    def name(self) -> str:
        """The name of its axis."""
        return self.axis.name

    @property
    def coord(self) -> Any:
        """The coordinate at the pointer."""
        return load_one(self.at)

    def stored(self, space: PositionSpace) -> Any:
        """The coordinate at the pointer; past the last element the axis's length."""
        place = load_one(self.place)
        here = space.coordinate(self.axis, [*self.parents, place])
        return tirx.if_then_else(
            place < self.extent, here, as_dtype(self.axis.length, self.axis.idtype)
        )

    def begin(self, space: PositionSpace) -> list[Any]:
        """Statements that set the pointer to the first element."""
        zero = as_dtype(0, self.axis.idtype)
        return [store_one(self.place, zero), *self._read(space)]

    def move(self, space: PositionSpace, step: Any) -> list[Any]:
        """Statements that advance the pointer by 0 or 1."""
        return [store_one(self.place, load_one(self.place) + step), *self._read(space)]

    def gallop(self, space: PositionSpace, to: Any) -> list[Any]:
        """Statements that advance the pointer, which is before `to`, to the first element not
        before it."""
        place, far = load_one(self.place), load_one(self.far)
        one = as_dtype(1, self.axis.idtype)

        def before(there: Any) -> Any:
            return space.coordinate(self.axis, [*self.parents, there]) < to

        no, left = tirx.const(False, "bool"), self.extent - place
        farther = tirx.if_then_else(far < left, before(place + far), no)
        step = tirx.min(far, as_dtype(1 << 29, self.axis.idtype))  # so that twice this fits, too
        grown = [store_one(self.place, place + far), store_one(self.far, step + step)]
        middle = place + ((far - place) >> one)
        halved = tirx.IfThenElse(
            before(middle), store_one(self.place, middle + one), store_one(self.far, middle)
        )
        return [
            store_one(self.far, one),
            tirx.While(farther, as_one(grown)),
            store_one(self.far, place + tirx.min(far, left)),
            store_one(self.place, place + one),
            tirx.While(place < far, halved),
            *self._read(space),
        ]

    def _read(self, space: PositionSpace) -> list[Any]:
        out: list[Any] = []
        if space.has_padding(self.axis):
            place, one = load_one(self.place), as_dtype(1, self.axis.idtype)
            here = space.coordinate(self.axis, [*self.parents, place])
            inside = tirx.if_then_else(place < self.extent, here < 0, tirx.const(False, "bool"))
            out.append(tirx.While(inside, store_one(self.place, place + one)))
        return [*out, store_one(self.at, self.stored(space))]


@dataclass
class MergeLoop(PositionLoop):
    """The loop of a merged axis; `var` is the buffer that holds the coordinate.

    ratio : the ratio of lengths from which the longer axis's pointer gallops; 0 for never
    """

    pointers: list[Pointer] = field(default_factory=list)
    ratio: int = 0

    @property
    def state(self) -> list[Any]:
        """The buffers that hold the loop's state."""
        each = (b for p in self.pointers for b in (p.place, p.at, p.far) if b is not None)
        return [self.var, *each]

    def around(self, body: Any, space: PositionSpace) -> Any:
        """The whole loop, with the statements before it."""
        axis, coord = self.node, load_one(self.var)
        begin = [s for p in self.pointers for s in p.begin(space)]
        once = axis.kind == "intersect" or not nodes_of(BLOCKS, body)  # blocks have names
        nested = axis.kind == "difference" or any(a.is_merged for a in flat_axes(axis.of))
        if len(self.pointers) == 2 and once and not nested:
            return as_one([*begin, *self._points(body, space)])
        ats = [p.coord for p in self.pointers]
        if self.ratio:
            return as_one([*begin, *self._gallop(ats, body, space)])
        least = store_one(self.var, reduce(tirx.min, ats))
        end = as_dtype(axis.length, axis.idtype)
        going = coord < end
        if axis.kind != "union" or nested:
            at = {p.name: p.coord for p in self.pointers}
            some = tirx.any, lambda *of: conjunction([*of])
            here = axis.stores(lambda n: tirx.EQ(at[n], coord), *some, tirx.Not)
            # An excluding axis that has ended does not end the loop.
            going = axis.stores(lambda n: at[n] < end, *some, lambda _: tirx.const(True, "bool"))
            body = tirx.IfThenElse(here, body, None)
        moves: list[Any] = []
        for p in self.pointers:
            moves += p.move(space, as_dtype(tirx.EQ(p.coord, coord), p.axis.idtype))
        loop = tirx.While(going, as_one([body, *moves, least]))
        return as_one([*begin, least, loop])

    def _gallop(self, ats: list[Any], body: Any, space: PositionSpace) -> list[Any]:
        """The loop of an intersection of several axes whose pointers gallop to the last of them."""
        end, coord = as_dtype(self.node.length, self.node.idtype), load_one(self.var)
        one, last = as_dtype(1, self.node.idtype), store_one(self.var, reduce(tirx.max, ats))
        moves = [s for p in self.pointers for s in p.move(space, one)]
        leaps = [
            tirx.IfThenElse(p.coord < coord, self._skip(p, coord, space), None)
            for p in self.pointers
        ]
        met = conjunction([tirx.EQ(at, coord) for at in ats])
        step = tirx.IfThenElse(met, as_one([body, *moves]), as_one(leaps))
        return [tirx.While(conjunction([at < end for at in ats]), as_one([last, step]))]

    def _may_gallop(self, pointer: Pointer) -> Any:
        """Whether a pointer gallops, given the lengths."""
        shortest = reduce(tirx.min, [p.extent for p in self.pointers if p is not pointer])
        return tirx.floordiv(pointer.extent, as_dtype(self.ratio, self.node.idtype)) >= shortest

    def _skip(self, pointer: Pointer, to: Any, space: PositionSpace) -> Any:
        """Advance a pointer towards a later coordinate, by one step or all the way."""
        step = as_one(pointer.move(space, as_dtype(1, self.node.idtype)))
        if not self.ratio:
            return step
        leap = as_one(pointer.gallop(space, to))
        return tirx.IfThenElse(self._may_gallop(pointer), leap, step)

    def _points(self, body: Any, space: PositionSpace) -> list[Any]:
        """The loops over two axes: while both have elements; for a union, then over the rest."""
        if not self.ratio or nodes_of(BLOCKS, body):
            return self._loops(body, space, lambda p, to: self._skip(p, to, space))
        # Tested once for both: where neither is long, steps cost the same as without galloping.
        long = tirx.any(*map(self._may_gallop, self.pointers))
        one = as_dtype(1, self.node.idtype)
        leaps = self._loops(body, space, lambda p, to: as_one(p.gallop(space, to)))
        steps = self._loops(body, space, lambda p, _: as_one(p.move(space, one)))
        return [tirx.IfThenElse(long, as_one(leaps), as_one(steps))]

    def _loops(
        self, body: Any, space: PositionSpace, nearer: Callable[[Pointer, Any], Any]
    ) -> list[Any]:
        """The loops of `_points`; `nearer` advances a pointer of an intersection."""
        union = self.node.kind == "union"
        end = as_dtype(self.node.length, self.node.idtype)
        first, second = self.pointers
        one, other = first.coord, second.coord

        def at(*there: Pointer) -> Any:
            """The case in which these axes have an element at the coordinate, and no others do."""
            if not union and len(there) < len(self.pointers):
                return nearer(there[0], other if there[0] is first else one)
            moves = [s for p in there for s in p.move(space, as_dtype(1, self.node.idtype))]
            known = {p.name: p in there for p in self.pointers}
            inner = self._known(body, known) if union else body
            return as_one([store_one(self.var, there[0].coord), inner, *moves])

        alone = tirx.IfThenElse(one < other, at(first), at(second))
        both = tirx.IfThenElse(tirx.EQ(one, other), at(first, second), alone)
        loop = tirx.While(tirx.all(one < end, other < end), both)
        rest = [tirx.While(c < end, at(p)) for c, p in ((one, first), (other, second))]
        return [loop, *rest] if union else [loop]

    def _known(self, body: Any, there: dict[str, bool]) -> Any:
        """The body, simplified by which axes store the coordinate."""
        coord = load_one(self.var)
        conditions = [(tirx.EQ(p.coord, coord), there[p.name]) for p in self.pointers]

        def equal(node: Any) -> Any:
            for condition, holds in conditions:
                if tvm_ffi.structural_equal(node, condition):
                    return tirx.const(holds, "bool")
            return node

        def both(node: Any) -> Any:
            for a, b in ((node.a, node.b), (node.b, node.a)):
                if isinstance(a, tirx.IntImm):
                    return b if int(a) else a
            return node

        def chosen(node: Any) -> Any:
            if not is_choice(node) or not isinstance(node.args[0], tirx.IntImm):
                return node
            return node.args[1] if int(node.args[0]) else node.args[2]

        def done(node: Any) -> Any:
            if not isinstance(node.condition, tirx.IntImm):
                return node
            taken = node.then_case if int(node.condition) else node.else_case
            return tirx.Evaluate(0) if taken is None else taken

        rules = [(tirx.EQ, equal), (tirx.And, both), (ir.Call, chosen), (tirx.IfThenElse, done)]
        return map_expr(body, rules)


def _certain(axis: Axis) -> set[str]:
    """Names of the members that store every coordinate of the axis."""
    return axis.stores(lambda n: {n}, set.intersection, set.union, lambda _: set())


def merge_loop(
    axis: Axis,
    coord_var: Any,
    kind: str,
    name: str,
    scope: Scope,
    space: PositionSpace,
    translate: Translator,
    ratio: int = 0,
) -> MergeLoop:
    """The loop of a merged axis; registers the positions of it and its axes in `scope`.

    ratio : see :class:`MergeLoop`
    """
    coord, length = translate.local(name, axis.idtype), as_dtype(axis.length, axis.idtype)
    unit = MergeLoop(axis, [coord_var], kind, coord, coord, length, ratio=ratio)
    value, certain = load_one(coord), _certain(axis)
    for member in axis.merged:
        one = member.axis if isinstance(member, AttachedAxis) else member
        if one.is_merged:
            continue
        parents, present = parents_of(member, scope), present_above(member, scope, space)
        extent = extent_under(member, parents, scope, space)
        kept = ("ptr", "at", "far") if ratio else ("ptr", "at")
        place, at, *far = (translate.local(f"{one.name}_{what}", one.idtype) for what in kept)
        unit.pointers.append(Pointer(one, place, at, parents, extent, *far))
        here = [*present] if one.name in certain else [*present, tirx.EQ(load_one(at), value)]
        scope.visits[one.name] = Visit(one, load_one(place), value, parents, here)
    translate.locals.extend(unit.state)
    scope.visits[axis.name] = Visit(axis, value, value, [])
    scope.coords[coord_var] = value
    return unit
