"""What a schedule hands out: handles of iterations and of their loops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SparseIterationRef:
    """A handle of a sparse iteration; `name` is the iteration's."""

    name: str


@dataclass(frozen=True)
class SpIter:
    """A handle of one loop of an iteration: an axis, a fused, attached or partial one."""

    iteration: str
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The axis's name; of a fused axis the names joined by `_`."""
        return "_".join(self.axes)
