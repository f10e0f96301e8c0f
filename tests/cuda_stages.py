"""Run what `sparsetir.lower` makes for a GPU as CUDA text on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from cuda_runner import CudaFunction
from sparsetir.runtime.pipeline import lower
from sparsetir.runtime.signature import signature_of
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.position_space import SIGNATURE

CUDA = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})


class CudaStages:
    """A program with a schedule for GPUs, called with arrays by their names in the program.

    stages : all stages; called : what its flat parameters are called in the program
    function : its CUDA text, whose `counts` tell of the last run
    """

    def __init__(
        self, program: Any, schedule: Any, config: Any = None, arch: str = "sm_90", **options: Any
    ) -> None:
        self.stages = lower(program, schedule, config, {"kind": "cuda", "arch": arch})
        self.signature = self.stages["II"].attrs[SIGNATURE]
        flat = [str(p.name) for p in self.stages["III"].params]
        self.called = dict(zip(flat, signature_of(self.stages).passed, strict=True))
        self.function = CudaFunction(self.stages["III"], arch=arch, **options)

    def __call__(self, args: Mapping[str, Any], **options: Any) -> dict[str, np.ndarray]:
        """The arrays as the kernel leaves them; computed parameters are computed of `args`."""
        every = {**args, **compute(self.signature, dict(args))}
        out = self.function({flat: every[name] for flat, name in self.called.items()}, **options)
        return {self.called[flat]: array for flat, array in out.items()}
