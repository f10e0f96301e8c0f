"""The templates there are: which program and schedule a config stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from sparsetir.schedules.operators.problems import Arranged, Sddmm, Spmm
from sparsetir.schedules.operators.sddmm import program as sddmm_operator
from sparsetir.schedules.operators.spmm import program as spmm_operator
from sparsetir.schedules.templates import (
    decomposed,
    sddmm,
    sddmm_gpu,
    spmm,
    spmm_gpu,
    spmm_hyb,
    spmv,
)
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["TEMPLATES", "Template", "template_of"]


@dataclass(frozen=True)
class Template:
    """How a kernel is made of a config, and its arguments of a pattern.

    program : (problem, config) -> stage-I function
    schedule : (stage-II function, problem, config, target) -> scheduled stage-II function; of
        templates that have no `apply`
    arrange : (CsrPattern, problem, config) -> Arranged
    problem : Spmm or Sddmm
    gpu : whether it is for GPUs; None: for CPUs and GPUs
    vectors : whether operands and result have no dimension of features
    configs : (problem, CsrPattern, Statistics, target) -> configs to search beside those of
        :mod:`sparsetir.schedules.search.spaces`; for templates of plug-in modules
    apply : (stage-I Schedule, config), which schedules the program by primitives, in both stages;
        in place of `schedule`

    Configs are frozen data with `compiled`, what of them a kernel depends on, and `tiles(feat)`,
    the argument of that name, which raises ScheduleError for feature sizes they do not serve.
    """

    program: Callable[..., SparseFunc]
    schedule: Callable[..., tirx.PrimFunc] | None
    arrange: Callable[..., Arranged]
    problem: type
    gpu: bool | None = False
    vectors: bool = False
    configs: Callable[..., Sequence[Any]] | None = None
    apply: Callable[..., Any] | None = None

    def fits(self, problem: Any, gpu: bool) -> bool:
        """Whether it is for a problem's operator, and for GPUs or CPUs."""
        return self.problem is type(problem) and self.gpu in (None, gpu)


# Of configs; others may add theirs.
TEMPLATES: dict[type, Template] = {
    spmm.RowBlocks: Template(spmm_operator, None, spmm.arrange, Spmm, apply=spmm.apply),
    spmv.SlicedRows: Template(spmv.program, spmv.schedule, spmv.arrange, Spmm, vectors=True),
    sddmm.SddmmGroups: Template(sddmm_operator, None, sddmm.arrange, Sddmm, apply=sddmm.apply),
    sddmm_gpu.FusedNonzeros: Template(
        sddmm_operator, None, sddmm_gpu.arrange, Sddmm, gpu=True, apply=sddmm_gpu.apply
    ),
    spmm_gpu.RowSplit: Template(
        spmm_operator, None, spmm_gpu.arrange, Spmm, gpu=True, apply=spmm_gpu.apply
    ),
    spmm_hyb.HybRows: Template(
        spmm_hyb.program, None, spmm_hyb.arrange, Spmm, gpu=True, apply=spmm_hyb.apply
    ),
    decomposed.Decomposed: Template(
        decomposed.program, None, decomposed.arrange, Spmm, gpu=None, apply=decomposed.apply
    ),
}


def template_of(config: Any, problem: Any, gpu: bool) -> Template:
    """The template that a config is for.

    Raises TypeError for what is no config, and for one of another operator or kind of target.
    """
    found = TEMPLATES.get(type(config))
    if found is None or not found.fits(problem, gpu):
        fit = [c for c, t in TEMPLATES.items() if t.fits(problem, gpu)]
        known = " or ".join(c.__name__ for c in fit)
        raise TypeError(
            f"plan: argument 'config': expected {known} for this operator and target, got "
            f"{type(config).__name__}"
        )
    return found
