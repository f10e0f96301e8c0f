"""A program with what its parameters are: its kernels, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from sparsetir.expressions.declarations import Key
from sparsetir.expressions.program import Program
from sparsetir.expressions.row_sums import is_row_sum
from sparsetir.runtime.assembled import AssembledKernel, build_assembled
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules.templates.spmv import SlicedRows, apply
from sparsetir.sparse_ir.gradient import gradient, transposed_axes
from sparsetir.sparse_ir.nodes import SparseFunc, stores_of

GRAD = ""  # the operand that stands for the gradient of a result


@dataclass
class Unit:
    """A program, and the levels of its patterns where these are not as in `program`.

    func : the program itself, or a gradient of it
    values : for each array of values the operand, and the pattern that it is over, if any
    result : the parameter that is written
    levels : for each pattern the names of its axes from the root down
    """

    program: Program
    func: SparseFunc
    values: dict[str, tuple[str, Key | None]]
    result: str
    levels: dict[Key, tuple[str, ...]]
    _sliced: dict[SlicedRows, Kernel] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> Unit:
        """The unit of a program itself."""
        levels = {key: p.axes for key, p in program.patterns.items()}
        return cls(program, program.func, program.values, program.result, levels)

    @cached_property
    def kernel(self) -> Kernel:
        """What computes it, with the default schedule."""
        return build(self.func)

    @cached_property
    def sums_rows(self) -> bool:
        """Whether it is a sum of products over what the rows of one matrix store."""
        return is_row_sum(self.func)

    def sliced(self, config: SlicedRows) -> Kernel:
        """What computes such a sum with rows in slices."""
        key = config.compiled
        if key not in self._sliced:
            self._sliced[key] = build(self.func, schedule=apply, config=config)
        return self._sliced[key]

    @cached_property
    def inputs(self) -> list[str]:
        """The parameters for values that are read, in order."""
        there = {str(p.name) for p in self.func.params}
        return [name for name in self.values if name in there and name != self.result]

    @cached_property
    def assembled(self) -> AssembledKernel:
        """What computes a sparse result with its pattern."""
        return build_assembled(self.func)

    def dims(self, key: Key) -> tuple[int, ...]:
        """The dimension of each level of a pattern, from the root down."""
        pattern = self.program.patterns[key]
        known = dict(zip(pattern.axes, pattern.dims, strict=True))
        return tuple(known[name] for name in self.levels[key])

    def gradient(self, param: str) -> Unit:
        """The unit of the gradient for an input; raises ValueError where there is none."""
        try:
            derived = gradient(self.func, param)
        except ValueError:
            derived = gradient(self.func, param, transpose=False)
        old = {str(p.name) for p in self.func.params}
        new = [str(p.name) for p in derived.params if str(p.name) not in old]
        written = {s.buffer for s in stores_of(derived.body)}
        results = {
            str(b.handle.name) for b in derived.buffers if b.var in written and b.handle is not None
        }
        (result,) = results
        values = {n: of for n, of in self.values.items() if n != self.result}
        values |= {n: (GRAD, self.values[self.result][1]) for n in new if n != result}
        values[result] = self.values[param][0], self.values[param][1]
        moved = [tuple(names) for names in transposed_axes(derived)]
        levels = {
            key: next((m for m in moved if sorted(m) == sorted(names)), names)
            for key, names in self.levels.items()
        }
        return Unit(self.program, derived, values, result, levels)
