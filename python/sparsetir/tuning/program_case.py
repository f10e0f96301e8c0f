"""Measured programs: a user's function with arguments and expected results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.records.task import Config
from sparsetir.runtime.arrays import is_array
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.operators.operands import LEAST_SCALE, TOLERANCES
from sparsetir.sparse_ir.interpret import interpret
from sparsetir.tuning.case import Array, Prepared, array, first_wrong, numbers
from sparsetir.tuning.program import ProgramTask

# Elements of all arguments up to which the interpreter is the oracle: it takes microseconds per
# visit.
INTERPRETED = 4096
# The terms of a result are unknown; their size is estimated by the largest result.
SLACK = 10.0


class ProgramCase:
    """Arguments for a task, and the expected results.

    Expected outputs come from the interpreter where it is fast enough, or else from the kernel of
    the default schedule, which property tests compare with the interpreter. If they do not depend
    on the previous contents of outputs, each check fills these with NaN first.

    expected : outputs by name
    """

    def __init__(self, task: ProgramTask) -> None:
        self.task = task
        self._kernels: dict[Config, tuple[Kernel, float]] = {}
        signature = task.signature()
        self.dtypes = dict(zip(signature.names, signature.dtypes, strict=False))
        self.outputs = [signature.names[i] for i in signature.outputs]
        self._placed: dict[str, Any] = {}
        start = {name: np.asarray(task.arguments[name]) for name in self.outputs}
        self._reference = None if self._is_small() else build(task.program)
        zeros, ones = (self._run({n: np.full_like(x, v) for n, x in start.items()}) for v in (0, 1))
        self.start, self.expected = start, zeros
        if all(np.array_equal(zeros[n], ones[n], equal_nan=True) for n in start):
            self.start = {name: _garbage(x) for name, x in start.items()}
        else:
            self.expected = self._run(start)

    def prepared(self, config: Config, device: object = None) -> Prepared:
        """Prepare a config as a kernel, with the arguments on a device (None: this CPU)."""
        if config not in self._kernels:
            begin = time.perf_counter()
            built = self.task.build(config)
            self._kernels[config] = built, time.perf_counter() - begin
        kernel, compile_seconds = self._kernels[config]
        begin = time.perf_counter()
        computed = kernel.compute(self.task.arguments) if kernel.computed else {}
        passed = [x for name, x in computed.items() if name in kernel.signature.passed]
        convert_seconds = time.perf_counter() - begin
        arguments = {**self._on(device), **self._outputs(device)}
        values = [arguments[name] for name in kernel.signature.names]
        held = [x for x in (*self.task.arguments.values(), *passed) if is_array(x)]
        about = {
            "compile_seconds": compile_seconds,
            "convert_seconds": convert_seconds,
            "bytes": sum(int(x.nbytes) for x in held),
        }

        def call() -> None:
            kernel(*values)

        def wrong() -> str | None:
            return self.error({name: _numbers(arguments[name]) for name in self.outputs})

        return Prepared(call, wrong, kernel, about)

    def error(self, results: Mapping[str, np.ndarray]) -> str | None:
        """The first error in results, or None."""
        for name, result in results.items():
            expected = self.expected[name]
            wrong = first_wrong(_right(result, expected, self.dtypes[name]), result, expected)
            if wrong:
                return f"'{name}': {wrong}"
        return None

    def release(self) -> None:
        """Do nothing, as no data is kept for single candidates."""

    def _on(self, device: object) -> dict[str, Any]:
        """The arguments except outputs on a device, moved once for all configs."""
        if not self._placed:
            for name, value in self.task.arguments.items():
                if name not in self.outputs:
                    dtype = self.dtypes[name]
                    self._placed[name] = array(value, dtype, device) if is_array(value) else value
        return self._placed

    def _outputs(self, device: object) -> dict[str, Array]:
        return {name: array(x, self.dtypes[name], device) for name, x in self.start.items()}

    def _is_small(self) -> bool:
        sizes = [x.size for x in self.task.arguments.values() if is_array(x)]
        return sum(sizes) <= INTERPRETED and "bfloat16" not in self.dtypes.values()

    def _run(self, start: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the reference on a CPU and return its outputs; start : their initial contents."""
        if self._reference is None:
            results = {name: np.array(x) for name, x in start.items()}
            interpret(self.task.program, {**self.task.arguments, **results})
        else:
            results = {name: array(x, self.dtypes[name]) for name, x in start.items()}
            inputs = {n: x for n, x in self.task.arguments.items() if n not in self.outputs}
            arrays = {n: array(x, self.dtypes[n]) for n, x in inputs.items() if is_array(x)}
            self._reference(**{**inputs, **arrays, **results})
        return {name: _numbers(x) for name, x in results.items()}


def _numbers(result: Array) -> np.ndarray:
    """Convert an output to this CPU, keeping integers, else in float32 or float64."""
    values = result if isinstance(result, np.ndarray) else result.numpy()
    return values if values.dtype.kind in "iub" else numbers(values)


def _garbage(output: np.ndarray) -> np.ndarray:
    """An output filled with numbers that no result has."""
    if output.dtype.kind in "iu":
        return np.full_like(output, np.iinfo(output.dtype).max)
    return np.full_like(output, True if output.dtype.kind == "b" else np.nan)


def _right(result: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """A mask of the correct elements, up to the order of sums, including NaN and infinities."""
    if dtype not in TOLERANCES:
        return result == expected
    same = (result == expected) | (np.isnan(result) & np.isnan(expected))
    known = np.isfinite(expected)
    scale = np.abs(expected[known]).max(initial=0.0) + LEAST_SCALE
    with np.errstate(invalid="ignore"):
        near = np.abs(result - expected) <= SLACK * TOLERANCES[dtype] * scale
    return same | (near & known)
