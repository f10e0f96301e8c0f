"""What a template is: a config, and how a kernel for a problem is made of it. And all there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sparsetir.schedules.operators.problems import Arranged, in_csr
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc

# {"template": "RowBlocks", "RowBlocks.tile": 64, ...}
Point = dict[str, Any]
BRANCH = "template"


@dataclass(frozen=True)
class Branch:
    """The configs of one template.

    name : of the template
    choices : for each parameter the values that it may have
    make : a config of one value for each parameter, by name; None where they do not go together
    """

    name: str
    choices: Mapping[str, tuple[Any, ...]]
    make: Callable[..., Any | None]

    def points(self) -> Iterator[tuple[Point, Any]]:
        """All points that are a config, with it."""
        for values in product(*self.choices.values()):
            chosen = dict(zip(self.choices, values, strict=True))
            config = self.config(chosen)
            if config is not None:
                point = {f"{self.name}.{name}": value for name, value in chosen.items()}
                yield {BRANCH: self.name, **point}, config

    def one_by_one(self) -> list[Any]:
        """The config of the first values, and those that differ from it in one parameter."""
        first = {name: values[0] for name, values in self.choices.items()}
        others = ((name, value) for name, values in self.choices.items() for value in values[1:])
        found = [self.config(first), *(self.config({**first, name: x}) for name, x in others)]
        return [config for config in found if config is not None]

    def config(self, chosen: Mapping[str, Any]) -> Any | None:
        """The config of some values; None where there is none."""
        try:
            return self.make(**chosen)
        except (ValueError, ScheduleError):
            return None


@dataclass(frozen=True)
class Template:
    """How kernels for problems of one kind are made of configs, and their arguments of a pattern.

    config : the class of configs: frozen data, whose `compiled` is what of it a kernel depends on.
        For plans `tiles(feat)` is the argument of that name, which raises ScheduleError for feature
        sizes that it does not serve
    problem : the class of problems
    program : (problem, config) -> stage-I function
    apply : (Schedule of that function, config), which schedules it by primitives, in both stages
    arrange : (CsrPattern, problem, config) -> Arranged; by default for kernels that take CSR. Of
        relations a Pattern of three axes, or a RelationPattern, is given
    gpu : whether it is for GPUs; None: for CPUs and GPUs
    configs : (problem, CsrPattern, Statistics, target) -> configs to search beside those of
        :mod:`sparsetir.schedules.search.spaces`; also of plug-in modules
    """

    config: type
    problem: type
    program: Callable[..., SparseFunc]
    apply: Callable[..., Any]
    arrange: Callable[..., Arranged] = in_csr
    gpu: bool | None = False
    configs: Callable[..., Sequence[Any]] | None = None

    def fits(self, problem: Any, gpu: bool) -> bool:
        """Whether it is for a problem's operator, and for GPUs or CPUs."""
        return self.problem is type(problem) and self.gpu in (None, gpu)


# By the classes of config and problem; :mod:`sparsetir.schedules.templates.registry` has all.
TEMPLATES: dict[tuple[type, type], Template] = {}


def register(template: Template) -> Template:
    """Make a template known to plans, searches and records of tuning."""
    TEMPLATES[template.config, template.problem] = template
    return template
