"""The joint space of formats and schedules that a search explores. (SparseTIR, section 2)

A point names a template (a branch of the space) and a choice for each of its parameters; it is
flat, with scalar values that JSON preserves. Not every point is a config: choices may be
incompatible. Every config of a space is valid, and its template supports the problem and the
pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.targets import is_gpu
from sparsetir.schedules.template import BRANCH, Branch, Point, SearchInput
from sparsetir.schedules.templates.registry import templates_for


@dataclass(frozen=True)
class Space:
    """The configs that may serve a problem, by branch."""

    branches: tuple[Branch, ...]

    def config(self, point: Point) -> Any | None:
        """The config of a point; None if the choices are incompatible.

        Raises ValueError for an object that is not a point of this space.
        """
        branch = next((b for b in self.branches if b.name == point.get(BRANCH)), None)
        if branch is None:
            names = ", ".join(b.name for b in self.branches)
            raise ValueError(
                f"Space.config: expected a point with '{BRANCH}' of {names}, got {point}"
            )
        chosen = {}
        for name, values in branch.choices.items():
            key = f"{branch.name}.{name}"
            if key not in point or point[key] not in values:
                raise ValueError(
                    f"Space.config: expected a point with '{key}' of {values}, got {point}"
                )
            chosen[name] = point[key]
        return branch.config(chosen)

    def point(self, config: Any) -> Point | None:
        """A point with this config; None if the space has none."""
        return self._points.get(config)

    def points(self) -> list[tuple[Point, Any]]:
        """Every config once, with the first point that has it; always in the same order."""
        return [(point, config) for config, point in self._points.items()]

    @cached_property
    def _points(self) -> dict[Any, Point]:
        points: dict[Any, Point] = {}
        for branch in self.branches:
            for point, config in branch.points():
                points.setdefault(config, point)
        return points


def space(problem: Any, pattern: CsrPattern, stats: Statistics, target: Any) -> Space:
    """The space of a problem, pattern and target: a branch for each template that supports it.

    stats : of the pattern, as for `choose`. Results of `candidates` are always in the space.
    """
    search = SearchInput(problem, pattern, stats, target, candidates(problem, stats, target))
    branches = (template.branch(search) for template in templates_for(problem, is_gpu(target)))
    return Space(tuple(branch for branch in branches if branch is not None))
