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

An intersection ends with the shortest of its axes, and visits where all pointers stand on the
coordinate. There is one visit after the other: the loop is a `while`, around blocks that cannot
know it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import AttachedAxis, Axis
from sparsetir.sparse_ir.position_loop import PositionLoop, extent_under, parents_of, present_above
from sparsetir.sparse_ir.position_space import PositionSpace
from sparsetir.sparse_ir.search import load_one, store_one
from sparsetir.sparse_ir.tir import as_dtype, as_one, conjunction
from sparsetir.sparse_ir.translate import Scope, Translator, Visit


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

    def move(self, space: PositionSpace, coord: Any) -> list[Any]:
        """Statements that move the pointer on if it stands on the coordinate."""
        step = as_dtype(tirx.EQ(load_one(self.at), coord), self.axis.idtype)
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
        ats = [load_one(p.at) for p in self.pointers]
        least = store_one(self.var, reduce(tirx.min, ats))
        end = as_dtype(axis.length, axis.idtype)
        going = [coord < end]
        if axis.kind == "intersect":
            going = [at < end for at in ats]
            body = tirx.IfThenElse(conjunction([tirx.EQ(at, coord) for at in ats]), body, None)
        moves = [s for p in self.pointers for s in p.move(space, coord)]
        loop = tirx.While(conjunction(going), as_one([body, *moves, least]))
        return as_one([*(s for p in self.pointers for s in p.begin(space)), least, loop])


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
