"""One loop of an iteration in position space."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import flat_axes
from sparsetir.sparse_ir.translate import Search


@dataclass
class PositionLoop:
    """One loop: an axis, a fused axis, an attached axis, or one of these by parts.

    coords : its coordinates of stage I
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
        """Kind of the block variable: spatial, reduction, or opaque for a mixture."""
        if set(self.kinds) == {"S"}:
            return tirx.IterVar.DataPar
        return tirx.IterVar.CommReduce if set(self.kinds) == {"R"} else tirx.IterVar.Opaque
