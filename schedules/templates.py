"""The templates there are: which program and schedule a config stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsetir.schedules import spmm
from sparsetir.schedules.problems import Sddmm, Spmm

__all__ = ["PROBLEMS", "Template", "template_of"]

# The problem of each operator, by the operator's name.
PROBLEMS: Mapping[str, type] = {"spmm": Spmm, "spmv": Spmm, "sddmm": Sddmm}


@dataclass(frozen=True)
class Template:
    """How a kernel is made of a config, and its arguments of a pattern.

    program : (problem, config) -> stage-I function
    schedule : (stage-II function, problem, config) -> scheduled stage-II function
    arrange : (CsrPattern, problem, config, threads) -> arguments by name that do not depend on
        values or dense operands
    """

    program: Callable[..., Any]
    schedule: Callable[..., Any]
    arrange: Callable[..., dict[str, Any]]


TEMPLATES: Mapping[type, Template] = {
    spmm.RowBlocks: Template(spmm.program, spmm.schedule, spmm.arrange),
}


def template_of(config: Any) -> Template:
    """The template that a config is for; raises TypeError for what is no config."""
    found = TEMPLATES.get(type(config))
    if found is None:
        known = ", ".join(c.__name__ for c in TEMPLATES)
        raise TypeError(
            f"plan: argument 'config': expected one of {known}, got {type(config).__name__}"
        )
    return found
