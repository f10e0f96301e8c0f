"""The loop of a merged axis: several axes gone through together, by a pointer into each.

A pointer stands at the first element of its axis that has not been visited, and `at` is that
element's coordinate. Each step visits the least of these, and moves the pointers that stand on it,
without a branch (Kjolstad et al., "The tensor algebra compiler", section 5: the points of the merge
lattice are conditions here). Of `T.union(J1, J2)` under I::

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

A union of two axes whose body has no blocks is taken apart into the points of the lattice, each
with what its operand does not store left out. Where coordinates come in runs, the next one is
guessed right, and none waits for the one before it::

    while J1_at[0] < n and J2_at[0] < n:
        if J1_at[0] == J2_at[0]: ...  # of both; both pointers move
        elif J1_at[0] < J2_at[0]: ...  # of J1 alone, A[vi, J1_ptr[0]] and 0
        else: ...  # of J2 alone
    while J1_at[0] < n: ...  # what is left of J1
    while J2_at[0] < n: ...

An intersection ends with the shortest of its axes, and visits where all pointers stand on the
coordinate; one of two axes has the first of these loops, and a body for both alone. There is one
visit after the other: the loop is a `while`, around blocks that cannot know it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.exact import is_choice
from sparsetir.sparse_ir.nodes import AttachedAxis, Axis, nodes_of
from sparsetir.sparse_ir.position_loop import PositionLoop, extent_under, parents_of, present_above
from sparsetir.sparse_ir.position_space import PositionSpace
from sparsetir.sparse_ir.search import load_one, store_one
from sparsetir.sparse_ir.tir import as_dtype, as_one, conjunction
from sparsetir.sparse_ir.translate import Scope, Translator, Visit
from sparsetir.sparse_ir.traversal import map_expr

BLOCKS = s_tir.SBlockRealize


@dataclass
class Pointer:
    """Where the loop stands on one of the merged axes.

    place, at : one-element buffers, of its position under the parents and of the coordinate there
    extent : how many positions it has there, 0 under what is absent
    """

    axis: Axis
    place: Any
    at: Any
    parents: list[Any]
    extent: Any

    @property
    def name(self) -> str:
        """The name of its axis."""
        return self.axis.name

    def stored(self, space: PositionSpace) -> Any:
        """The coordinate that the pointer stands on, behind the last one the axis's length."""
        place = load_one(self.place)
        here = space.coordinate(self.axis, [*self.parents, place])
        return tirx.if_then_else(
            place < self.extent, here, as_dtype(self.axis.length, self.axis.idtype)
        )

    def begin(self, space: PositionSpace) -> list[Any]:
        """Statements that put the pointer to the first element."""
        zero = as_dtype(0, self.axis.idtype)
        return [store_one(self.place, zero), *self._read(space)]

    def move(self, space: PositionSpace, step: Any) -> list[Any]:
        """Statements that move the pointer on by 0 or 1."""
        return [store_one(self.place, load_one(self.place) + step), *self._read(space)]

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
    """The loop of a merged axis; `var` is the buffer that holds the coordinate."""

    pointers: list[Pointer] = field(default_factory=list)

    @property
    def locals(self) -> list[Any]:
        """The buffers that the loop keeps."""
        return [self.var, *(b for p in self.pointers for b in (p.place, p.at))]

    def around(self, body: Any, space: PositionSpace) -> Any:
        """The whole loop, with what stands in front of it."""
        axis, coord = self.node, load_one(self.var)
        begin = [s for p in self.pointers for s in p.begin(space)]
        once = axis.kind == "intersect" or not nodes_of(BLOCKS, body)  # blocks have names
        if len(self.pointers) == 2 and once:
            return as_one([*begin, *self._points(body, space)])
        ats = [at for at, _ in self._standing()]
        least = store_one(self.var, reduce(tirx.min, ats))
        end = as_dtype(axis.length, axis.idtype)
        going = [coord < end]
        if axis.kind == "intersect":
            going = [at < end for at in ats]
            body = tirx.IfThenElse(conjunction([tirx.EQ(at, coord) for at in ats]), body, None)
        moves: list[Any] = []
        for at, p in self._standing():
            moves += p.move(space, as_dtype(tirx.EQ(at, coord), p.axis.idtype))
        loop = tirx.While(conjunction(going), as_one([body, *moves, least]))
        return as_one([*begin, least, loop])

    def _standing(self) -> list[tuple[Any, Pointer]]:
        """The coordinate of each pointer."""
        return [(load_one(p.at), p) for p in self.pointers]

    def _points(self, body: Any, space: PositionSpace) -> list[Any]:
        """The loops of two: over what either has; of a union, then over the rest of each."""
        union = self.node.kind == "union"
        end = as_dtype(self.node.length, self.node.idtype)
        (one, first), (other, second) = self._standing()

        def at(*there: Pointer) -> Any:
            """What is done where these have an element, and the others none."""
            moves = [s for p in there for s in p.move(space, as_dtype(1, self.node.idtype))]
            if not union and len(there) < len(self.pointers):
                return as_one(moves)
            known = {p.name: p in there for p in self.pointers}
            found = self._known(body, known) if union else body
            return as_one([store_one(self.var, load_one(there[0].at)), found, *moves])

        alone = tirx.IfThenElse(one < other, at(first), at(second))
        both = tirx.IfThenElse(tirx.EQ(one, other), at(first, second), alone)
        loop = tirx.While(tirx.all(one < end, other < end), both)
        rest = [tirx.While(c < end, at(p)) for c, p in ((one, first), (other, second))]
        return [loop, *rest] if union else [loop]

    def _known(self, body: Any, there: dict[str, bool]) -> Any:
        """The body where it is known which axes store the coordinate."""
        coord = load_one(self.var)
        conditions = [(tirx.EQ(at, coord), there[p.name]) for at, p in self._standing()]

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


def merge_loop(
    axis: Axis,
    coord_var: Any,
    kind: str,
    name: str,
    scope: Scope,
    space: PositionSpace,
    translate: Translator,
) -> MergeLoop:
    """The loop of a merged axis; `scope` learns where it and its axes stand."""
    coord = translate.local(name, axis.idtype)
    unit = MergeLoop(axis, [coord_var], kind, coord, coord, as_dtype(axis.length, axis.idtype))
    value = load_one(coord)
    for member in axis.of:
        one = member.axis if isinstance(member, AttachedAxis) else member
        parents, present = parents_of(member, scope), present_above(member, scope, space)
        extent = extent_under(member, parents, scope, space)
        place, at = (translate.local(f"{one.name}_{what}", one.idtype) for what in ("ptr", "at"))
        unit.pointers.append(Pointer(one, place, at, parents, extent))
        here = [*present, tirx.EQ(load_one(at), value)] if axis.kind == "union" else list(present)
        scope.visits[one.name] = Visit(one, load_one(place), value, parents, here)
    translate.locals.extend(unit.locals)
    scope.visits[axis.name] = Visit(axis, value, value, [])
    scope.coords[coord_var] = value
    return unit
