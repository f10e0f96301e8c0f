"""Calls of regions: programs with their arguments, for tuning and look-up of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sparsetir.graph.programs import NAME, Program, parsed
from sparsetir.planning.request import default_threads
from sparsetir.records.records import by_record, recorded_of_program, there_are_records_of
from sparsetir.runtime.kernel import Kernel
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.tuning.program import ProgramTask

TARGET = "llvm"


@dataclass(frozen=True)
class Call:
    """A call of a region, for `sparsetir.tune(call.function, call.arguments)`.

    program : the region's program
    aligned : for each operand whether its edges are in the order of the rows
    names : names of the program's parameters, in order
    known : indices and sizes by name, by which records are looked up
    shapes : shapes of the arrays of floats, whose values do not matter
    """

    program: Program
    aligned: tuple[bool, ...]
    names: Sequence[str]
    known: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def text(self) -> str:
        """The text of the program."""
        return self.program.text(self.aligned)

    @property
    def function(self) -> SparseFunc:
        """The program as a stage-I function."""
        return parsed(self.text)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the function: the call's indices and sizes, random numbers, no result."""
        rng = np.random.default_rng(0)
        arguments = self._with(
            lambda shape, dtype: rng.standard_normal(shape, "float32").astype(dtype)
        )
        del arguments["out"]
        return arguments

    @property
    def task(self) -> ProgramTask:
        """The task by which records are looked up."""
        arguments = self._with(lambda shape, dtype: np.broadcast_to(np.zeros((), dtype), shape))
        return ProgramTask(self.function, arguments, None, TARGET, default_threads())

    def _with(self, make: Callable[[tuple[int, ...], str], np.ndarray]) -> dict[str, Any]:
        """All arguments, in order; make : makes an array of a shape and type."""
        dtypes = {f"x{n}": x.dtype for n, x in enumerate(self.program.operands)}
        dtypes["out"] = self.program.stored
        arrays = {name: make(shape, dtypes[name]) for name, shape in self.shapes.items()}
        known = {n: x.numpy() if isinstance(x, Tensor) else int(x) for n, x in self.known.items()}
        return {name: {**known, **arrays}[name] for name in self.names}


def may_be_recorded() -> bool:
    """Whether any region is recorded; a look-up for a call takes longer than a small kernel."""
    return there_are_records_of(NAME)


def recorded_kernel(call: Call) -> Kernel | None:
    """The kernel that tuning recorded for a call, or None."""
    task = call.task
    like = call.text, task.shape_class(), task.threads
    config = recorded_of_program(task.key, like)
    return by_record(config, lambda c: call.program.kernel(call.aligned, c))
