"""One loop of an iteration in position space."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import AttachedAxis, flat_axes
from sparsetir.sparse_ir.position_space import PositionSpace
from sparsetir.sparse_ir.tir import as_dtype, conjunction
from sparsetir.sparse_ir.translate import Scope, Search


@dataclass
class PositionLoop:
    """One loop: an axis, a fused axis, an attached axis, or one of these by parts.

    coords : its stage-I coordinates
    """

    node: Any
    coords: list[Any]
    kinds: str
    loop: Any
    var: Any
    extent: Any
    pads: list[Any] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the loop in stage I."""
        return "_".join(axis.name for axis in flat_axes([self.node]))

    @property
    def iter_type(self) -> int:
        """The kind of the block variable: spatial, reduction, or opaque for a mixture."""
        if set(self.kinds) == {"S"}:
            return tirx.IterVar.DataPar
        return tirx.IterVar.CommReduce if set(self.kinds) == {"R"} else tirx.IterVar.Opaque


def parents_of(node: Any, scope: Scope) -> list[Any]:
    """Positions of the ancestors of an axis, also of an attached one."""
    if isinstance(node, AttachedAxis):
        to = scope.visits[node.to.name]
        return [as_dtype(to.coord, node.axis.parent.idtype)]
    if node.parent is None:
        return []
    visit = scope.visits[node.parent.name]
    return [*visit.parents, visit.pos]


def present_above(node: Any, scope: Scope, space: PositionSpace) -> list[Any]:
    """Conditions under which the parents of an axis, or what it is attached to, are present."""
    if isinstance(node, AttachedAxis):
        return [scope.visits[node.to.name].coord >= 0] if space.has_padding(node.to) else []
    return [] if node.parent is None else scope.visits[node.parent.name].present


def extent_under(node: Any, parents: list[Any], scope: Scope, space: PositionSpace) -> Any:
    """The number of positions of an axis under these parents, 0 if they are absent."""
    axis = node.axis if isinstance(node, AttachedAxis) else node
    extent = as_dtype(space.extent(axis, parents), axis.idtype)
    present = present_above(node, scope, space)
    if not present:
        return extent
    return tirx.if_then_else(conjunction(present), extent, as_dtype(0, axis.idtype))
