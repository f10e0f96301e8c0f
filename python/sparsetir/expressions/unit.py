"""Programs of expressions: bound to patterns and sizes, run, and differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx

from sparsetir.expressions.declarations import Key, PatternAxes
from sparsetir.expressions.levels import LevelArrays, Reordered, level_arrays
from sparsetir.expressions.program import Program
from sparsetir.expressions.surrogates import reduction_to, surrogate
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import (
    aligned_rows,
    check_memory,
    count_writes,
    empty,
    plain_view,
    to_numpy,
)
from sparsetir.runtime.assembled import AssembledKernel
from sparsetir.runtime.assembled_levels import LevelsKernel, build_assembled
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pool import work_of_threads
from sparsetir.schedules.row_orders import RowOrders, row_orders
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.templates.spmv import SlicedRows, apply, numbers
from sparsetir.sparse_ir.gradient import gradient, transposed_axes
from sparsetir.sparse_ir.nodes import Axis, stores_of

GRAD = ""  # the operand that stands for the gradient of a result
MOST_CHANGES = 3  # changes of values, after which they are no longer packed


@dataclass
class Unit(Program):
    """A program of an expression, or one derived from it, with its kernels."""

    _sliced: dict[SlicedRows, Kernel] = field(default_factory=dict, init=False)
    _derived: dict[str, Unit] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, program: Program) -> Unit:
        """The unit of a program."""
        return cls(**vars(program))

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel with the default schedule."""
        return build(self.func)

    @cached_property
    def orders(self) -> RowOrders | None:
        """The orders of rows that it can have."""
        return row_orders(self.func, resolve_target("llvm"))

    def sliced(self, config: SlicedRows) -> Kernel:
        """The kernel for a row sum with rows in slices."""
        key = config.compiled
        if key not in self._sliced:
            self._sliced[key] = build(self.func, schedule=apply, config=config)
        return self._sliced[key]

    @cached_property
    def inputs(self) -> list[str]:
        """The parameters for values that are read, in order."""
        params = {str(p.name) for p in self.func.params}
        return [name for name in self.values if name in params and name != self.result]

    @cached_property
    def arrays(self) -> dict[Key, tuple[PatternAxes, list[tuple[str, str, str]]]]:
        """For each pattern the parameters of each level: `indptr`, `indices`, and their number."""
        axes = {str(a.name): a for a in self.func.axes}
        out: dict[Key, tuple[PatternAxes, list[tuple[str, str, str]]]] = {}
        for key, p in self.patterns.items():
            if all(n in axes for n in p.axes):  # a gradient may not need the pattern
                out[key] = p, [_parameters(axes[n]) for n in p.axes]
        return out

    @cached_property
    def assembled(self) -> AssembledKernel | LevelsKernel:
        """The kernel of a sparse result with its pattern."""
        return build_assembled(self.func)

    @cached_property
    def reduction(self) -> str | None:
        """The operator of :func:`reduction_to`."""
        return reduction_to(self.func, self.result)

    def gradient(self, param: str) -> Unit:
        """The unit of the gradient for an input, derived once; ValueError if there is none."""
        if param not in self._derived:
            self._derived[param] = self._gradient(param)
        return self._derived[param]

    def surrogate(self, kind: str) -> Unit:
        """The unit of :func:`surrogate`, made once; its last inputs are the result and weights, if
        it reads these."""
        if kind not in self._derived:
            func, weights, result = surrogate(self.func, self.result, kind)
            over, values = self.values[self.result], dict(self.values)
            del values[self.result]
            values |= dict.fromkeys((self.result, weights, result), over)
            self._derived[kind] = replace(self, func=func, values=values, result=result)
        return self._derived[kind]

    def _gradient(self, param: str) -> Unit:
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
        moved = transposed_axes(derived)  # with the axis of length 1 above a compressed root
        patterns: dict[Key, PatternAxes] = {}
        for key, p in self.patterns.items():
            dims = dict(zip(p.axes, p.dims, strict=True))
            orders = (tuple(n for n in m if n in dims) for m in moved if dims.keys() <= {*m})
            axes = next(orders, p.axes)
            patterns[key] = replace(p, axes=axes, dims=tuple(dims[n] for n in axes))
        return replace(self, func=derived, values=values, result=result, patterns=patterns)


def _parameters(axis: Axis) -> tuple[str, str, str]:
    """The parameters of an axis for `indptr`, `indices`, and their number; "" where it has none."""
    of = axis.indptr, axis.indices, axis.nnz_cols if axis.nnz is None else axis.nnz
    ptr, idx, count = ("" if x is None else str(getattr(x, "name", "")) for x in of)
    return ptr, idx, count


def fixed_arguments(
    unit: Unit, sizes: Mapping[object, int], patterns: Mapping[str, Pattern], idtype: str
) -> tuple[dict[str, Any], dict[Key, LevelArrays]]:
    """The arguments that depend on sizes and patterns, by name, and the stored patterns."""
    known: dict[str, Any] = {p: sizes[of] for p, of in unit.sizes.items() if of in sizes}
    kept: dict[Key, LevelArrays] = {}
    for key, (p, names) in unit.arrays.items():
        kept[key] = level_arrays(patterns[p.operand], p.levels, p.dims, idtype)
        levels = zip(names, kept[key].arrays, kept[key].lengths, strict=True)
        for (indptr, indices, number), (ptr, idx), n in levels:
            if idx is not None:
                known[indices], known[number] = idx, n
            if ptr is not None:
                known[indptr] = ptr
    return known, kept


class _Run:
    """A kernel with the arguments that depend on patterns and sizes.

    chosen : values for numbers that the kernel leaves open
    packed : for each argument packed from values its position, that of the values, and the order
    """

    def __init__(
        self, unit: Unit, kernel: Kernel, known: Mapping[str, Any],
        chosen: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.kernel, signature = kernel, kernel.signature
        self._names = [*unit.inputs, unit.result]
        numbers = {n: x for n, x in (chosen or {}).items() if n in kernel.computed}
        known = {**known, **(kernel.compute(known, numbers) if kernel.computed else {})}
        kept = [None if n in self._names else known.get(n) for n in signature.passed]
        self._args: list[Any] = [
            tvm_ffi.from_dlpack(plain_view(x)) if isinstance(x, np.ndarray) else x for x in kept
        ]
        self._places = [signature.passed.index(n) for n in self._names]
        self._empty: list[tuple[int, Any]] = []
        self.packed: list[tuple[int, int, Reordered]] = []
        for name in signature.of_values:
            read, order = (str(kernel.computed[name][what])[1:] for what in ("values", "order"))
            at = signature.passed.index(name), unit.inputs.index(read)
            self.packed.append((*at, Reordered(known[order].astype(np.intp))))

    def __call__(self, values: Sequence[Any], out: Any, steady: Sequence[bool]) -> None:
        args, arrays, numpy = self._args.copy(), [*values, out], True
        for place, x in zip(self._places, arrays, strict=True):
            args[place] = x
            numpy = numpy and type(x) is np.ndarray
        for place, at, order in self.packed:
            args[place] = order.of(to_numpy(values[at]), len(steady) > at and steady[at])
        for place, by in self.kernel.gathered:
            args[place] = aligned_rows(args[place], args[by])
        for place, x in self._empty:
            args[place] = x
        if not numpy:
            check_memory(self.kernel.name, self._names, arrays)
        try:  # TVM checks arrays; arguments from patterns are known to be valid
            self.kernel.run_unchecked(args)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            self.kernel.run_refused(args, error)
            # TVM refuses the strides of empty arrays; any others of these shapes are as good.
            self._empty = [
                (place, plain_view(x.copy() if type(x) is np.ndarray else x.clone()))
                for place, x in zip(self._places, arrays, strict=True)
                if 0 in x.shape
            ]
        if type(out) is not np.ndarray:
            count_writes([out])


class Bound:
    """A unit bound to patterns and sizes; called with values.

    unit : the unit
    sizes : sizes of indices, and of dimensions of operands
    patterns : patterns of operands by name
    steady : whether values of patterns are mostly the same, see :class:`Reordered`
    """

    def __init__(
        self, unit: Unit, sizes: Mapping[object, int], patterns: Mapping[str, Pattern], idtype: str,
        steady: bool = False,
    ) -> None:  # fmt: skip
        self.unit, self.sizes, self.idtype = unit, sizes, idtype
        self._derived: dict[int, Bound] = {}
        self._known, self.stored = fixed_arguments(unit, sizes, patterns, idtype)
        # For each input its operand, and the level arrays that permute its values, if any.
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
        self._dtype = np.dtype(self.dtype)  # of its name it takes as long as a small product
        self.over = None if over is None else self.stored[over]
        self.shape: tuple[int, ...] = ()
        if self.over is not None:
            self.shape = (self.over.places,)
        elif buffer.axes:
            self.shape = tuple(
                int(s) if isinstance(s, tirx.IntImm) else self._known[str(s.name)]
                for s in buffer.var.ty.shape
            )
        self._steady, self._calls = steady, 0

    @cached_property
    def _run(self) -> _Run:
        """The kernel in use with its arguments; of a result whose gradients alone are needed there
        is none."""
        unit, slices = self.unit, None
        if self._steady and len(self.stored) == 1 and self.over is None and unit.orders:
            (levels,) = self.stored.values()
            slices = unit.orders.in_packed_slices(*levels.arrays[-1], work_of_threads())
        if slices is None:
            return _Run(unit, unit.kernel, self._known)
        return _Run(unit, unit.sliced(slices), self._known, numbers(slices))

    @property
    def kernel(self) -> Kernel:
        """The kernel in use."""
        return self._run.kernel

    def __call__(self, values: Sequence[Any], out: Any, steady: Sequence[bool] = ()) -> Any:
        """Compute the result from values in the order of `sources`, each in that of its levels.

        steady : for each array of values, see :class:`Reordered`
        """
        run = self._run
        run(values, out, steady)
        self._calls += 1
        if self._calls == 2 and run.kernel.by_pattern is not None:
            self._order_rows(run.kernel)
        if run.packed and run.packed[0][2].changes > MOST_CHANGES:
            # Packing takes longer than it saves.
            self._run = _Run(self.unit, self.unit.kernel, self._known)
            self._order_rows(self._run.kernel)
        return out

    def _order_rows(self, kernel: Kernel) -> None:
        """Use the kernel for the pattern's order of rows, if it has one, as built kernels do."""
        of = kernel.by_pattern(self._known) if kernel.by_pattern else None
        other = of and of([self._known.get(n) for n in kernel.signature.names])
        if other is not None:
            self._run = _Run(self.unit, other, self._known)

    def empty(self, torch: bool) -> Any:
        """Allocate the result, in torch or NumPy."""
        if not torch:
            return empty(self.shape, self._dtype)
        import torch as loaded

        return loaded.empty(self.shape, dtype=torch_dtype(self.dtype))

    def natural(self, values: Any) -> Any:
        """Permute the result from the order of its levels into that of its pattern."""
        return values if self.over is None else self.over.restored(values)

    def derived(self, unit: Unit, patterns: Mapping[str, Pattern]) -> Bound:
        """A unit that was derived from this one's, bound to the same patterns and sizes once."""
        if id(unit) not in self._derived:
            self._derived[id(unit)] = Bound(unit, self.sizes, patterns, self.idtype)
        return self._derived[id(unit)]


@cache
def torch_dtype(name: str) -> Any:
    """The torch dtype of a name."""
    import torch

    return getattr(torch, name)
