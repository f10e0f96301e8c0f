"""Measured programs: a user's function with its arguments, and the expected results."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from typing import Any

import numpy as np

from sparsetir.records.record import Key
from sparsetir.records.task import Config, thread_text
from sparsetir.runtime.arrays import is_array
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import Signature
from sparsetir.schedules.operators.operands import LEAST_SCALE, TOLERANCES, first_wrong
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import TargetLike
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.interpret import interpret
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.position_space import SIGNATURE
from sparsetir.tuning.case import Candidate, Case, array, numbers
from sparsetir.tuning.schedule_ref import ScheduleRef

MADE = "sparsetir.program_space"  # stands for the schedule that is made from a program
# Elements of all arguments up to which the interpreter is the oracle: it takes microseconds per
# visit.
INTERPRETED = 4096
# The terms of a result are unknown; their size is estimated by the largest result.
SLACK = 10.0


@dataclass(frozen=True, eq=False)
class ProgramTask(Case):
    """A stage-I function with arguments; the worker that it is sent to checks the results.

    arguments : all arguments by name: NumPy arrays in their natural shape, numbers for sizes. Each
        check starts from the contents of outputs
    schedule : `schedule(sch, config)`; None for the one that is derived from the program
    target, threads : those of :func:`sparsetir.tune`
    op : the operator that the function is of; "" for a program of a user's

    Expected outputs come from the interpreter if it is fast enough, or else from the kernel of
    the default schedule, which property tests compare with the interpreter. If they do not depend
    on the previous contents of outputs, each check fills these with NaN first.
    """

    program: SparseFunc
    arguments: Mapping[str, Any]
    schedule: ScheduleRef | None = None
    target: TargetLike = "llvm"
    threads: int = 1
    op: str = ""
    _kernels: dict[Config, tuple[Kernel, float]] = field(default_factory=dict, init=False)
    _placed: dict[str, Any] = field(default_factory=dict, init=False)  # on the device

    @cached_property
    def signature(self) -> Signature:
        """The signature of the function's kernels."""
        return Signature(lower_sparse_iter(self.program).attrs[SIGNATURE])

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The types of the parameters."""
        return dict(zip(self.signature.names, self.signature.dtypes, strict=False))

    @cached_property
    def outputs(self) -> dict[str, np.ndarray]:
        """The initial contents of outputs."""
        names = (self.signature.names[i] for i in self.signature.outputs)
        return {name: np.asarray(self.arguments[name]) for name in names}

    def apply(self) -> Callable[..., object]:
        """The schedule as a function."""
        return program_space.apply if self.schedule is None else self.schedule.load()

    def build(self, config: Config) -> Kernel:
        """Build the kernel for a config; without choices by the default schedule."""
        if not config:
            return build(self.program, self.target)
        choices = dict(config) if isinstance(config, Choices) else config
        return build(self.program, self.target, schedule=self.apply(), config=choices)

    def key(self) -> Key:
        """The key of records of tuning.

        Floating-point values do not matter; arrays of integers do, as they hold the structure.
        """
        text = self.program.script() + (MADE if self.schedule is None else self.schedule.digest())
        kind = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        data = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self.arguments.items()):
            if not is_array(value):
                data.update(f"{name}={value};".encode())
                continue
            data.update(f"{name}:{value.dtype}{value.shape};".encode())
            if value.dtype.kind in "iu" and name not in self.outputs:
                little = value.dtype.newbyteorder("<")
                data.update(np.ascontiguousarray(value, little).data)
        return Key.on(
            self.target, self.threads, op=self.program.name, reduce=f"program-{kind}", heads=None,
            feat=0, dtype=",".join(self.dtypes[name] for name in self.outputs),
            shape_class=self.shape_class(), fingerprint=data.hexdigest(),
        )  # fmt: skip

    def shape_class(self) -> str:
        """The sizes rounded to powers of two."""
        sizes = self.traits().items()
        return "-".join(f"{name}{round(log2(max(1.0, abs(x))))}" for name, x in sizes)

    def traits(self) -> dict[str, float]:
        """The numbers among the arguments, in the order of the parameters."""
        return {n: float(x) for n, x in self.arguments.items() if not is_array(x)}

    def title(self, name: str = "") -> str:
        """A line for people; name : the name of the data."""
        sizes = ", ".join(f"{n}={x:,g}" for n, x in self.traits().items())
        on = f" on {name}" if name else ""
        return ", ".join([f"{self.op or self.program.name}{on} ({sizes})", *thread_text(self)])

    # -- measured -------------------------------------------------------------------------------

    @cached_property
    def by_kernel(self) -> Kernel | None:
        """The kernel that expected results come from; None for the interpreter."""
        size = sum(x.size for x in self.arguments.values() if is_array(x))
        small = size <= INTERPRETED and "bfloat16" not in self.dtypes.values()
        return None if small else build(self.program)

    @cached_property
    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The contents of outputs before a check, and the expected outputs, by name."""
        start = self.outputs
        zeros, ones = (self._run({n: np.full_like(x, v) for n, x in start.items()}) for v in (0, 1))
        if all(np.array_equal(zeros[n], ones[n], equal_nan=True) for n in start):
            return {name: _garbage(x) for name, x in start.items()}, zeros
        return start, self._run(start)

    def prepared(self, config: Config, device: object = None) -> Candidate:
        start, _ = self.results
        if config not in self._kernels:
            begin = time.perf_counter()
            built = self.build(config)
            self._kernels[config] = built, time.perf_counter() - begin
        kernel, compile_seconds = self._kernels[config]
        begin = time.perf_counter()
        computed = kernel.compute(self.arguments) if kernel.computed else {}
        passed = [x for name, x in computed.items() if name in kernel.signature.passed]
        convert_seconds = time.perf_counter() - begin
        if not self._placed:  # moved once for all configs
            inputs = {n: x for n, x in self.arguments.items() if n not in start}
            self._placed.update(self._arrays(inputs, device))
        arguments = {**self._placed, **self._arrays(start, device)}
        values = [arguments[name] for name in kernel.signature.names]
        held = [x for x in (*self.arguments.values(), *passed) if is_array(x)]
        about = {
            "compile_seconds": compile_seconds,
            "convert_seconds": convert_seconds,
            "bytes": sum(int(x.nbytes) for x in held),
        }

        def call() -> None:
            kernel(*values)

        def wrong() -> str | None:
            return self.error({name: numbers(arguments[name]) for name in start})

        return Candidate(call, wrong, kernel, about)

    def error(self, results: Mapping[str, np.ndarray]) -> str | None:
        """The first error in results, or None."""
        for name, result in results.items():
            expected = self.results[1][name]
            wrong = first_wrong(_right(result, expected, self.dtypes[name]), result, expected)
            if wrong:
                return f"'{name}': {wrong}"
        return None

    def _arrays(self, arguments: Mapping[str, Any], device: object = None) -> dict[str, Any]:
        """Arguments with arrays of the kernel's types on a device."""
        pairs = arguments.items()
        return {n: array(x, self.dtypes[n], device) if is_array(x) else x for n, x in pairs}

    def _run(self, start: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the reference on a CPU and return its outputs; start : their initial contents."""
        if self.by_kernel is None:
            results = {name: np.array(x) for name, x in start.items()}
            interpret(self.program, {**self.arguments, **results})
        else:
            arrays = self._arrays({**self.arguments, **start})
            self.by_kernel(**arrays)
            results = {name: arrays[name] for name in start}
        return {name: numbers(x) for name, x in results.items()}


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
