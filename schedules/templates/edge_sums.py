"""Sums over edges in no order, on a CPU: the loops as they are, for one number of features."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.operators.edge_sums import EdgeSums, program
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class SumLoops(Config):
    """How a CPU kernel is made: for `feat` features."""

    feat: int = number()


def apply(sch: Schedule, config: SumLoops) -> None:
    """Schedule the sums; LLVM makes vectors of features, whose number it is told.

    Before (stage II), and after::

        for e in range(nnz):
            for k in range(feat):
                C[TARGET[e], k] = C[TARGET[e], k] + B[SOURCE[e], k]

        for e in range(nnz):
            for k in range(32):
                C[TARGET[e], k] = C[TARGET[e], k] + B[SOURCE[e], k]
    """
    for name in ("zero", "added"):
        _, features = sch.get_sp_iters(sch.get_sparse_iteration(name))
        sch.bound(features, config.feat, "exact")
    sch.lower()


register(Template(SumLoops, EdgeSums, program, apply))
