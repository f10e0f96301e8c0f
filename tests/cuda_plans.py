"""Plans for a GPU without one: their kernels' CUDA text is run on the CPU."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_runner import CudaFunction
from sparsetir.runtime.arrays import is_array, to_numpy
from sparsetir.runtime.signature import signature_of
from sparsetir.sparse_ir.computed import compute_of_values
from spmm_gpu_common import bfloat16_arrays

__all__ = ["run_plans"]


class EmulatedKernel:
    """The part of a kernel's interface that plans use."""

    def __init__(self, stages: Any) -> None:
        self.stages, self.signature = stages, signature_of(stages)
        self.names = [str(p.name) for p in stages["III"].params]
        self.function = CudaFunction(stages["III"])

    def of_values(self, stored: Any, computed: Any) -> dict[str, Any]:
        """The parameters that depend on values."""
        values = {**stored, **computed}
        return compute_of_values(self.signature.func, self.signature.of_values, values)

    def entry(self, *args: Any) -> None:
        """Run on arrays of torch or NumPy, which must have the shapes that are expected."""
        signature = self.signature
        for index, name in enumerate(signature.names):
            if is_array(args[index]):
                expected = signature.expected_shape(signature.position[name], [*args])
                assert [*args[index].shape] == expected, name
        arrays = [to_numpy(x) if is_array(x) else x for x in args]
        with bfloat16_arrays():
            results = self.function(dict(zip(self.names, arrays, strict=True)), seeds=(0, 1))
        index = signature.passed.index("out")
        result = results[self.names[index]]
        if isinstance(args[index], torch.Tensor):
            args[index].copy_(torch.from_numpy(result))
        else:
            args[index][...] = result


def run_plans(monkeypatch: pytest.MonkeyPatch) -> dict[Any, EmulatedKernel]:
    """Let plans for GPUs be made and called on arrays of the CPU; their kernels by what is made."""
    plans: Any = import_module("sparsetir.planning.run_plan")
    kernels: dict[Any, EmulatedKernel] = {}

    def compiled(key: Any, target: Any, stages: Any, *_: Any) -> EmulatedKernel:
        assert target.kind.name == "cuda"
        if key not in kernels:
            kernels[key] = EmulatedKernel(stages())
        return kernels[key]

    device = SimpleNamespace(device=lambda *_: SimpleNamespace(exist=True))
    monkeypatch.setattr("sparsetir.planning.run_plan.compiled", compiled)
    monkeypatch.setattr(plans, "tvm", SimpleNamespace(runtime=device))
    monkeypatch.setattr(plans.Plan, "_on_device", lambda _, array: to_numpy(array))
    return kernels
