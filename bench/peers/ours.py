"""sparsetir as a peer: the only place that knows how its operators are called."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.peers.cases import Case
from bench.peers.libraries import Calls, Peer, output
from sparsetir.planning.plan import plan
from sparsetir.schedules.search.configs import to_data
from sparsetir.tuning.case import array, numbers


class Ours(Peer):
    """Plans, with the default config."""

    def prepare(self, case: Case) -> Calls:
        """Calls into a given result."""
        operands = [array(x, case.dtype) for x in case.operands]
        options = {k: getattr(case, k) for k in ("dtype", "reduce", "heads")}
        kernel = plan(case.op, case.matrix, case.feat, **options, threads=self.threads)
        self.told, out = {"plans": {"default": describe(kernel)}}, array(output(case), case.dtype)
        return {"default": lambda: kernel(*operands, out=out)}

    def to_numpy(self, result: Any) -> np.ndarray:
        """A result as numbers, also from TVM's tensors."""
        return numbers(result)


class OursFloat32(Ours):
    """Plans of the same numbers in float32, as if there were no half-precision kernels."""

    def prepare(self, case: Case) -> Calls:
        """Calls into a given float32 result."""
        return super().prepare(dataclasses.replace(case, dtype="float32"))


def describe(plan: Any) -> dict[str, Any]:
    """A plan's config, costs, launches and padding, for JSON."""
    config = to_data(plan.config)
    names = ("convert_seconds", "compile_seconds", "launches", "padding")
    about = {k: getattr(plan, k) for k in names}
    return {"template": config.pop("template"), "config": config, **about}
