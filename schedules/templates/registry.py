"""The templates there are: which program and schedule a config stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.gpu import rgms as rgms_gpu
from sparsetir.schedules.gpu import rgms_gradients as rgms_gradients_gpu
from sparsetir.schedules.gpu import rgms_tensor_cores, spmm_groups, spmm_hyb, spmm_tensor_cores
from sparsetir.schedules.gpu import sddmm as sddmm_gpu
from sparsetir.schedules.gpu import spmm as spmm_gpu
from sparsetir.schedules.gpu import spmm_panels as spmm_panels_gpu
from sparsetir.schedules.operators.problems import Arranged, Sddmm, Spmm, in_csr
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.operators.rgms_gradients import RgmsGradient
from sparsetir.schedules.operators.sddmm import program as sddmm_operator
from sparsetir.schedules.operators.spmm import program as spmm_operator
from sparsetir.schedules.operators.spmv import program as spmv_operator
from sparsetir.schedules.templates import (
    amx,
    decomposed,
    rgms,
    sddmm,
    spmm,
    spmm_blocks,
    spmm_panels,
    spmm_sorted,
    spmv,
)
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class Template:
    """How a kernel is made of a config, and its arguments of a pattern.

    program : (problem, config) -> stage-I function
    apply : (Schedule of that function, config), which schedules it by primitives, in both stages
    problem : Spmm, Sddmm, Rgms or RgmsGradient
    arrange : (CsrPattern, problem, config) -> Arranged; by default for kernels that take CSR. Of
        the last two a Pattern of three axes, or a RelationPattern, is given
    gpu : whether it is for GPUs; None: for CPUs and GPUs
    vectors : whether operands and result have no dimension of features
    configs : (problem, CsrPattern, Statistics, target) -> configs to search beside those of
        :mod:`sparsetir.schedules.search.spaces`; also of plug-in modules

    Configs are frozen data with `compiled`, what of them a kernel depends on, and `tiles(feat)`,
    the argument of that name, which raises ScheduleError for feature sizes they do not serve.
    """

    program: Callable[..., SparseFunc]
    apply: Callable[..., Any]
    problem: type
    arrange: Callable[..., Arranged] = in_csr
    gpu: bool | None = False
    vectors: bool = False
    configs: Callable[..., Sequence[Any]] | None = None

    def fits(self, problem: Any, gpu: bool) -> bool:
        """Whether it is for a problem's operator, and for GPUs or CPUs."""
        return self.problem is type(problem) and self.gpu in (None, gpu)


# Of configs; others may add theirs.
TEMPLATES: dict[type, Template] = {
    spmm.RowBlocks: Template(spmm_operator, spmm.apply, Spmm, spmm.arrange),
    spmm_blocks.BlockRows: Template(
        spmm_blocks.program, spmm_blocks.apply, Spmm, spmm_blocks.arrange
    ),
    spmm_panels.PanelRows: Template(
        spmm_operator, spmm_panels.apply, Spmm, spmm_panels.arrange
    ),
    spmm_sorted.SortedRows: Template(
        spmm_operator, spmm_sorted.apply, Spmm, spmm_sorted.arrange
    ),
    spmv.SlicedRows: Template(spmv_operator, spmv.apply, Spmm, spmv.arrange, vectors=True),
    sddmm.SddmmGroups: Template(sddmm_operator, sddmm.apply, Sddmm, sddmm.arrange),
    amx.AmxBlocks: Template(amx.program, amx.apply, Spmm, amx.arrange, configs=amx.configs),
    sddmm_gpu.FusedNonzeros: Template(sddmm_operator, sddmm_gpu.apply, Sddmm, gpu=True),
    spmm_gpu.RowSplit: Template(spmm_operator, spmm_gpu.apply, Spmm, gpu=True),
    spmm_hyb.HybRows: Template(spmm_hyb.program, spmm_hyb.apply, Spmm, spmm_hyb.arrange, gpu=True),
    spmm_groups.Groups: Template(spmm_operator, spmm_groups.apply, Spmm, gpu=True),
    spmm_panels_gpu.PanelThreads: Template(
        spmm_operator, spmm_panels_gpu.apply, Spmm, spmm_panels_gpu.arrange, gpu=True
    ),
    spmm_tensor_cores.TensorCores: Template(
        spmm_tensor_cores.program, spmm_tensor_cores.apply, Spmm, spmm_tensor_cores.arrange,
        gpu=True, configs=spmm_tensor_cores.configs,
    ),
    rgms.TiledRelations: Template(rgms.program, rgms.apply, Rgms, rgms.arrange),
    rgms_gpu.RelationalRows: Template(
        rgms_gpu.program, rgms_gpu.apply, Rgms, rgms_gpu.arrange, gpu=True
    ),
    rgms_tensor_cores.RelationalTensorCores: Template(
        rgms_tensor_cores.program, rgms_tensor_cores.apply, Rgms, rgms_tensor_cores.arrange,
        gpu=True,
    ),
    rgms_gradients_gpu.GradientTiles: Template(
        rgms_gradients_gpu.program, rgms_gradients_gpu.apply, RgmsGradient,
        rgms_gradients_gpu.arrange, gpu=True,
    ),
    decomposed.Decomposed: Template(
        decomposed.program, decomposed.apply, Spmm, decomposed.arrange, gpu=None
    ),
}  # fmt: skip


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
