"""A program with what its parameters are: bound to patterns and sizes, run, differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.expressions.operands import Stored, stored
from sparsetir.expressions.program import Key, Program
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import empty, is_torch
from sparsetir.runtime.assembled import AssembledKernel, build_assembled
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
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

    @classmethod
    def of(cls, program: Program) -> Unit:
        """The unit of a program itself."""
        levels = {key: p.axes for key, p in program.patterns.items()}
        return cls(program, program.func, program.values, program.result, levels)

    @cached_property
    def kernel(self) -> Kernel:
        """What computes it."""
        return build(self.func)

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


def settled(
    unit: Unit, sizes: Mapping[object, int], patterns: Mapping[str, Pattern], idtype: str
) -> tuple[dict[str, Any], dict[Key, Stored]]:
    """The arguments that follow from sizes and patterns, by name, and the patterns as stored."""
    program = unit.program
    known: dict[str, Any] = {p: sizes[of] for p, of in program.sizes.items() if of in sizes}
    axes = {str(a.name): a for a in unit.func.axes}
    kept: dict[Key, Stored] = {}
    for key, pattern in program.patterns.items():
        names = unit.levels[key]
        if not all(n in axes for n in names):
            continue  # which a gradient does not need
        kept[key] = stored(patterns[pattern.operand], pattern.levels, unit.dims(key), idtype)
        for name, (ptr, idx), n in zip(names, kept[key].arrays, kept[key].lengths, strict=True):
            axis = axes[name]
            if idx is not None:
                count = axis.nnz if ptr is not None else axis.nnz_cols
                known |= {str(axis.indices.name): idx, str(count.name): n}
            if ptr is not None:
                known[str(axis.indptr.name)] = ptr
    return known, kept


class Bound:
    """A unit for patterns and sizes: called with values.

    unit : the unit
    sizes : of each index, and of dimensions of operands
    patterns : of operands by name
    """

    def __init__(
        self, unit: Unit, sizes: Mapping[object, int], patterns: Mapping[str, Pattern], idtype: str
    ) -> None:
        self.unit, self.sizes, self.idtype = unit, sizes, idtype
        self._gradients: dict[str, Bound] = {}
        self._checked = False  # whether the kernel has seen the patterns
        known, self.stored = settled(unit, sizes, patterns, idtype)
        names = unit.kernel.signature.names
        given = {*unit.inputs, unit.result}
        self._args = [None if n in given else known.get(n) for n in names]
        self.sources = [(unit.values[n][0], n) for n in unit.inputs]
        self._places = [names.index(n) for n in unit.inputs]
        self.held: object = None  # what drops it where a pattern is gone
        self._at = names.index(unit.result)
        buffer = next(
            b for b in unit.func.buffers
            if b.handle is not None and b.handle.name == unit.result
        )  # fmt: skip
        self.dtype, over = buffer.dtype, unit.values[unit.result][1]
        self.shape: tuple[int, ...] = ()
        if over is not None:
            self.shape = (self.stored[over].places,)
        elif buffer.axes:
            self.shape = tuple(known[str(s.name)] for s in buffer.var.ty.shape)

    def __call__(self, values: Sequence[Any], out: Any) -> Any:
        """Write the result, of values in the order of `sources`, each in that of its levels."""
        args = self._args.copy()
        for place, x in zip(self._places, values, strict=True):
            args[place] = x
        args[self._at] = out
        kernel = self.unit.kernel
        if self._checked and all(type(x) is np.ndarray for x in values):
            try:  # TVM checks arrays; what follows of the patterns was checked before
                kernel.run_unchecked(args)
                return out
            except (TypeError, ValueError, BufferError, RuntimeError):
                self._checked = False
        kernel(*args)
        self._checked = not kernel.computed
        return out

    def empty(self, torch: bool) -> Any:
        """Memory for the result, of torch or NumPy."""
        if not torch:
            return empty(self.shape, self.dtype)
        from torch import empty as tensor

        return tensor(self.shape, dtype=torch_dtype(self.dtype))

    def ordered(self, param: str, values: Any) -> Any:
        """Values in the order of their pattern, as the unit takes them."""
        key = self.unit.values[param][1]
        return values if key is None else self.stored[key].values(values)

    def natural(self, values: Any) -> Any:
        """The result, from the order of its levels to that of its pattern."""
        key = self.unit.values[self.unit.result][1]
        return values if key is None else self.restored(key, values)

    def restored(self, key: Key, values: Any) -> Any:
        """Values of a pattern in its own order."""
        take = self.stored[key].take
        if take is None:
            return values
        count = self.stored[key].padded
        there = np.flatnonzero(take < (len(take) if count is None else count))
        place = np.empty(len(there), np.int64)
        place[take[there]] = there
        if is_torch(values):
            import torch

            return values.index_select(0, torch.from_numpy(place))
        return values.take(place)

    def gradient(self, param: str, patterns: Mapping[str, Pattern]) -> Bound:
        """The gradient for an input, bound to the same."""
        if param not in self._gradients:
            unit = self.unit.gradient(param)
            self._gradients[param] = Bound(unit, self.sizes, patterns, self.idtype)
        return self._gradients[param]


def torch_dtype(name: str) -> Any:
    """The type of torch by its name."""
    import torch

    return getattr(torch, name)
