"""Programs bound to patterns and sizes: called with values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx

from sparsetir.expressions.declarations import Key
from sparsetir.expressions.levels import LevelArrays, Reordered, level_arrays
from sparsetir.expressions.row_sums import MOST_CHANGES, slices_of
from sparsetir.expressions.unit import Unit
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import check_memory, count_writes, empty, plain_view, to_numpy
from sparsetir.runtime.kernel import Kernel


def settled(
    unit: Unit, sizes: Mapping[object, int], patterns: Mapping[str, Pattern], idtype: str
) -> tuple[dict[str, Any], dict[Key, LevelArrays]]:
    """The arguments that follow from sizes and patterns, by name, and the patterns as stored."""
    program = unit.program
    known: dict[str, Any] = {p: sizes[of] for p, of in program.sizes.items() if of in sizes}
    axes = {str(a.name): a for a in unit.func.axes}
    kept: dict[Key, LevelArrays] = {}
    for key, pattern in program.patterns.items():
        names = unit.levels[key]
        if not all(n in axes for n in names):
            continue  # which a gradient does not need
        kept[key] = level_arrays(patterns[pattern.operand], pattern.levels, unit.dims(key), idtype)
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
        self._known, self.stored = settled(unit, sizes, patterns, idtype)
        # For each array that is read its operand, and what brings its values into order, if any.
        keys = [unit.values[n][1] for n in unit.inputs]
        arrays = [None if key is None else self.stored[key] for key in keys]
        self.sources = [
            (unit.values[n][0], None if x is None or x.take is None else x)
            for n, x in zip(unit.inputs, arrays, strict=True)
        ]
        buffer = next(
            b for b in unit.func.buffers
            if b.handle is not None and b.handle.name == unit.result
        )  # fmt: skip
        self.dtype, over = buffer.dtype, unit.values[unit.result][1]
        self.over = None if over is None else self.stored[over]
        self.shape: tuple[int, ...] = ()
        if self.over is not None:
            self.shape = (self.over.places,)
        elif buffer.axes:
            self.shape = tuple(
                int(s) if isinstance(s, tirx.IntImm) else self._known[str(s.name)]
                for s in buffer.var.ty.shape
            )
        slices = None
        if len(self.stored) == 1 and len(self.shape) == 1 and self.over is None:
            ((key, levels),) = self.stored.items()
            if len(levels.arrays) == 2:
                slices = slices_of(*levels.arrays[1], self.shape[0], self.dtype)
        if slices is not None and unit.sums_rows:
            config, numbers = slices
            self._take(unit.sliced(config), numbers)
        else:
            self._take(unit.kernel)

    def _take(self, kernel: Kernel, chosen: Mapping[str, int] | None = None) -> None:
        """Settle a kernel; chosen : numbers that it leaves open."""
        self.kernel, signature, unit = kernel, kernel.signature, self.unit
        numbers = {n: x for n, x in (chosen or {}).items() if n in kernel.computed}
        known = self._known | (kernel.compute(self._known, numbers) if kernel.computed else {})
        given = {*unit.inputs, unit.result}
        kept = [None if n in given else known.get(n) for n in signature.passed]
        self._args: list[Any] = [
            tvm_ffi.from_dlpack(plain_view(x)) if isinstance(x, np.ndarray) else x for x in kept
        ]
        self._places = [signature.passed.index(n) for n in unit.inputs]
        self._at = signature.passed.index(unit.result)
        self._packed: list[tuple[int, int, Reordered]] = []
        for name in signature.of_values:
            read, order = (str(kernel.computed[name][what])[1:] for what in ("values", "order"))
            at = signature.passed.index(name), unit.inputs.index(read)
            self._packed.append((*at, Reordered(known[order].astype(np.intp))))

    def __call__(self, values: Sequence[Any], out: Any, steady: Sequence[bool] = ()) -> Any:
        """Write the result, of values in the order of `sources`, each in that of its levels.

        steady : of values, see :class:`Reordered`
        """
        args = self._args.copy()
        args[self._at], numpy = out, type(out) is np.ndarray
        for place, x in zip(self._places, values, strict=True):
            args[place] = x
            numpy = numpy and type(x) is np.ndarray
        for place, at, order in self._packed:
            args[place] = order.of(to_numpy(values[at]), bool(steady) and steady[at])
            if order.changes > MOST_CHANGES:  # to pack takes longer than to do without
                self._take(self.unit.kernel)
                return self(values, out, steady)
        if not numpy:
            names = [*self.unit.inputs, self.unit.result]
            check_memory(self.kernel.name, names, [*values, out])
        try:  # TVM checks arrays; what follows of the patterns is known
            self.kernel.run_unchecked(args)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            self.kernel.run_refused(args, error)
        if type(out) is not np.ndarray:
            count_writes([out])
        return out

    def empty(self, torch: bool) -> Any:
        """Memory for the result, of torch or NumPy."""
        if not torch:
            return empty(self.shape, self.dtype)
        from torch import empty as tensor

        return tensor(self.shape, dtype=torch_dtype(self.dtype))

    def natural(self, values: Any) -> Any:
        """The result, from the order of its levels to that of its pattern."""
        return values if self.over is None else self.over.restored(values)

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
