"""What a template is: a config, and how a kernel for a problem is made of it. And all there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.operators.problems import Arranged, in_csr
from sparsetir.sparse_ir.nodes import SparseFunc


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
