"""Tasks of the tuner for a user's function with its arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

from sparsetir.records.task import Config, of_threads
from sparsetir.runtime.arrays import is_array
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import Signature
from sparsetir.schedules.search import program_space
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.position_space import SIGNATURE
from sparsetir.tuning.schedule_ref import ScheduleRef

MADE = "sparsetir.program_space"  # stands for the schedule that is made from a program


@dataclass(frozen=True, eq=False)
class ProgramTask:
    """A stage-I function with arguments; one of :class:`sparsetir.records.task.Tunable`.

    arguments : all arguments by name: NumPy arrays in their natural shape, numbers for sizes. Each
        check starts from the contents of outputs
    schedule : `schedule(sch, config)`; None for the one that is derived from the program
    target, threads : those of :class:`sparsetir.records.task.Task`
    """

    program: SparseFunc
    arguments: Mapping[str, Any]
    schedule: ScheduleRef | None = None
    target: str | Mapping[str, object] = "llvm"
    threads: int = 1

    def signature(self) -> Signature:
        """The signature of the function's kernels."""
        return Signature(lower_sparse_iter(self.program).attrs[SIGNATURE])

    def apply(self) -> Callable[..., object]:
        """The schedule as a function."""
        return program_space.apply if self.schedule is None else self.schedule.load()

    def build(self, config: Config) -> Kernel:
        """Build the kernel for a config; without choices by the default schedule."""
        if not config:
            return build(self.program, self.target)
        choices = dict(config) if isinstance(config, Choices) else config
        return build(self.program, self.target, schedule=self.apply(), config=choices)

    def identity(self) -> dict[str, Any]:
        """See :class:`sparsetir.records.task.Tunable`.

        Floating-point values do not matter; arrays of integers do, as they hold the structure.
        """
        signature = self.signature()
        outputs = {signature.names[i] for i in signature.outputs}
        text = self.program.script() + (MADE if self.schedule is None else self.schedule.digest())
        kind = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        data = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self.arguments.items()):
            if not is_array(value):
                data.update(f"{name}={value};".encode())
                continue
            data.update(f"{name}:{value.dtype}{value.shape};".encode())
            if value.dtype.kind in "iu" and name not in outputs:
                little = value.dtype.newbyteorder("<")
                data.update(np.ascontiguousarray(value, little).data)
        return {
            "op": self.program.name,
            "reduce": f"program-{kind}",
            "heads": None,
            "feat": 0,
            "dtype": ",".join(signature.dtypes[i] for i in signature.outputs),
            "shape_class": self.shape_class(),
            "fingerprint": data.hexdigest(),
        }

    def shape_class(self) -> str:
        """The sizes rounded to powers of two."""
        sizes = self.statistics().items()
        return "-".join(f"{name}{round(log2(max(1.0, abs(x))))}" for name, x in sizes)

    def statistics(self) -> dict[str, float]:
        """The numbers among the arguments, in the order of the parameters."""
        return {n: float(x) for n, x in self.arguments.items() if not is_array(x)}

    def title(self, name: str = "") -> str:
        sizes = ", ".join(f"{n}={x:,g}" for n, x in self.statistics().items())
        on = f" on {name}" if name else ""
        return ", ".join([f"{self.program.name}{on} ({sizes})", *of_threads(self)])
