"""A user's function with its arguments, as what is tuned."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

from sparsetir.records.task import Config, of_threads
from sparsetir.runtime.arrays import is_array, to_numpy
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import Signature
from sparsetir.schedules.search import program_space
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.position_space import SIGNATURE
from sparsetir.tuning.schedule_ref import ScheduleRef

FILLED = ("float16", "float32", "float64")  # what is random where it may be
MADE = "sparsetir.program_space"  # stands for the schedule that is made from a program


@dataclass(frozen=True, eq=False)
class ProgramTask:
    """A stage-I function with arguments; one of :class:`sparsetir.records.task.Tunable`.

    arguments : all of them by name: NumPy arrays in their natural shape, numbers for sizes. What
        outputs hold is where each check begins
    schedule : `schedule(sch, config)`; None for the one that is made from the program
    target, threads : as of :class:`sparsetir.records.task.Task`
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
        """The kernel for a config; without choices that of the default schedule."""
        if not config:
            return build(self.program, self.target)
        given = dict(config) if isinstance(config, Choices) else config
        return build(self.program, self.target, schedule=self.apply(), config=given)

    def identity(self) -> dict[str, Any]:
        """See :class:`sparsetir.records.task.Tunable`.

        Values of floating point play no part; arrays of integers do, as they say where elements
        are.
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
        """Sizes to the nearest power of two."""
        sizes = self.statistics().items()
        return "-".join(f"{name}{round(log2(max(1.0, abs(x))))}" for name, x in sizes)

    def statistics(self) -> dict[str, float]:
        """Its numbers, in the order of the parameters."""
        return {n: float(x) for n, x in self.arguments.items() if not is_array(x)}

    def title(self, name: str = "") -> str:
        sizes = ", ".join(f"{n}={x:,g}" for n, x in self.statistics().items())
        on = f" on {name}" if name else ""
        return ", ".join([f"{self.program.name}{on} ({sizes})", *of_threads(self)])


def bound_arguments(
    program: SparseFunc,
    arguments: object,
    who: str = "tune: argument 'arguments'",
    rng: np.random.Generator | None = None,
) -> dict[str, Any]:
    """All arguments of a function in the order of its parameters.

    Sizes that the shapes of arrays imply may be missing; outputs that are missing are zeros.

    who : how errors begin
    rng : fills missing arrays of floating-point numbers; None refuses them

    Raises TypeError or ValueError naming the argument.
    """
    signature = Signature(lower_sparse_iter(program).attrs[SIGNATURE])
    names = signature.names
    if not isinstance(arguments, Mapping):
        raise TypeError(
            f"{who}: expected a dict of arrays and numbers by parameter, got "
            f"{type(arguments).__name__}"
        )
    for name in arguments:
        if name not in names:
            raise ValueError(f"{who}: '{program.name}' has no '{name}'; it has {', '.join(names)}")
    values: list[Any] = [arguments.get(name) for name in names]
    missing = [
        i
        for i in signature.arrays
        if values[i] is None
        and (i in signature.outputs or rng is not None and signature.dtypes[i] in FILLED)
    ]
    given = [i for i in signature.arrays if i not in missing]
    for i in given:
        values[i] = _array(f"{who}: '{names[i]}'", values[i], signature.dtypes[i])
    signature.infer(values)
    for i in signature.scalars:
        values[i] = _number(f"{who}: '{names[i]}'", values[i], signature.dtypes[i])
    for i in signature.arrays:
        expected = signature.expected_shape(i, values)
        if min(expected, default=0) < 0:
            raise ValueError(f"{who}: '{names[i]}': expected lengths of 0 or more, got {expected}")
        if i in missing:
            random = None if i in signature.outputs else rng
            made = np.zeros(expected) if random is None else random.standard_normal(expected)
            values[i] = made.astype(signature.dtypes[i])
            continue
        values[i] = signature.view(i, values)
        if list(values[i].shape) != expected:
            legal = signature.expected_text(i, values)
            raise ValueError(f"{who}: '{names[i]}': expected shape {legal}, got {values[i].shape}")
    return dict(zip(names, values, strict=True))


def _array(who: str, value: object, dtype: str) -> np.ndarray:
    if not is_array(value):
        got = "nothing" if value is None else type(value).__name__
        raise TypeError(f"{who}: expected an array, got {got}")
    found = np.asarray(to_numpy(value))
    if str(found.dtype) != dtype:
        raise TypeError(f"{who}: expected dtype {dtype}, got {found.dtype}")
    return found


def _number(who: str, value: object, dtype: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    what = "a number" if dtype.startswith(("float", "bfloat")) else "an integer"
    if not isinstance(value, bool | int | float if what == "a number" else int):
        got = "nothing" if value is None else repr(value)
        raise TypeError(f"{who}: expected {what}, got {got}")
    return value
