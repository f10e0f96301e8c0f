"""Sparse results of expressions, which store what their programs visit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.expressions.compiled import Compiled
from sparsetir.expressions.declarations import Key
from sparsetir.expressions.levels import LevelArrays, coordinates, level_arrays
from sparsetir.expressions.operands import Operand, patterns_of
from sparsetir.expressions.unit import Unit, fixed_arguments
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import plain_view, to_numpy
from sparsetir.runtime.assembled import AssembledKernel, CsrArrays, Numeric
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.open_axes import closed, open_axes


class Assembling:
    """The sparse result of an expression, for operands of the same patterns and sizes.

    The first call computes the pattern; later ones compute values at this pattern, which
    :meth:`assembled` does not keep.

    compiled : the expression
    sizes : sizes of indices, and of dimensions of operands
    """

    def __init__(self, compiled: Compiled, sizes: Mapping[object, int]) -> None:
        assert compiled.open_form is not None
        self._compiled, self._sizes, self._form = compiled, sizes, compiled.open_form
        self._shape = tuple(sizes[n] for n in compiled.statement.result.plain)
        self._kind = SparseMatrix if len(self._shape) == 2 else SparseTensor
        self._pattern: Pattern | None = None
        self._phases: list[tuple[Numeric, Unit, dict[Key, LevelArrays]]] = []
        self._settled: list[tuple[dict[str, Any], dict[Key, LevelArrays]]] = []

    def __call__(self, operands: Mapping[str, Operand]) -> SparseTensor:
        """Compute the result."""
        if self._pattern is None:
            result = self.assembled(operands)
            self._pattern = result.pattern
            return result
        if not self._phases:
            units = zip(self._compiled.assembling, self._known(operands), strict=True)
            self._phases = [self._numeric(unit, *known, operands) for unit, known in units]
        parts = [numeric(values_of(unit, kept, operands)) for numeric, unit, kept in self._phases]
        values = reduce(lambda total, part: np.add(total, part, out=total), parts)
        return self._kind.of_stored(Stored(self._pattern, values))

    def pattern(self, operands: Mapping[str, Operand]) -> Pattern:
        """The pattern of the result."""
        if self._pattern is None:
            self._pattern = self.assembled(operands).pattern
        return self._pattern

    def at_pattern(
        self, func: SparseFunc, operands: Mapping[str, Operand]
    ) -> tuple[SparseFunc, dict[str, Any]]:
        """Turn a program that assembles the result into one at its pattern.

        Also returns the arguments that are the pattern.
        """
        names, arguments = [axis.name for axis in open_axes(func)], dict[str, Any]()
        func = closed(func)
        axes = [axis for axis in func.axes if axis.name in names]
        for axis, (ptr, idx) in zip(axes, self._levels(operands), strict=True):
            named = (axis.indptr, ptr), (axis.indices, idx), (axis.nnz, len(idx))
            arguments |= {str(param.name): value for param, value in named}
        return func, arguments

    def assembled(self, operands: Mapping[str, Operand]) -> SparseTensor:
        """Compute the result with the pattern that the programs visit."""
        parts = list[Any]()
        units = zip(self._compiled.assembling, self._known(operands), strict=True)
        for unit, (known, kept) in units:
            kernel, arguments = unit.assembled, known | values_of(unit, kept, operands)
            result = (
                kernel.assembled(arguments, kernel.bounds(arguments))
                if isinstance(kernel, AssembledKernel)
                else kernel(**arguments)
            )
            if isinstance(result, CsrArrays) and len(self._shape) == 2:
                pattern = Pattern.from_csr(result.indptr, result.indices, self._shape, check=False)
            else:
                pattern = Pattern(coordinates(result, self._shape), self._shape)
            parts.append(self._kind.of_stored(Stored(pattern, result.values)))
        return parts[0].add(*parts[1:]) if len(parts) > 1 else parts[0]

    def _known(
        self, operands: Mapping[str, Operand]
    ) -> list[tuple[dict[str, Any], dict[Key, LevelArrays]]]:
        """For each unit the arguments that depend on sizes and patterns, and operands' levels."""
        if not self._settled:
            patterns, idtype = patterns_of(operands), self._compiled.idtype
            for unit in self._compiled.assembling:
                known, kept = fixed_arguments(unit, self._sizes, patterns, idtype)
                known = {n: plain_view(known[n]) for n in unit.assembled.params if n in known}
                self._settled.append((known, kept))
        return self._settled

    def _numeric(
        self, unit: Unit, known: Mapping[str, Any], kept: dict[Key, LevelArrays],
        operands: Mapping[str, Operand],
    ) -> tuple[Numeric, Unit, dict[Key, LevelArrays]]:  # fmt: skip
        """The kernel of a unit that computes values at the pattern, and its operands' levels."""
        kernel, arguments = unit.assembled, {**known, **values_of(unit, kept, operands)}
        levels = self._levels(operands)
        if isinstance(kernel, AssembledKernel):
            return kernel.at(*levels[-1], arguments, kernel.bounds(arguments)), unit, kept
        return kernel.at(levels, arguments), unit, kept

    def _levels(self, operands: Mapping[str, Operand]) -> list[tuple[Any, Any]]:
        """The arrays of the compressed levels of the result, from the root down."""
        form, order = self._form, tuple(range(len(self._shape)))
        pattern = self.pattern(operands)
        arrays = level_arrays(pattern, form.levels, order, self._compiled.idtype).arrays
        return [pair for pair in arrays if pair[0] is not None]


def arguments_of(
    unit: Unit, params: Iterable[str], sizes: Mapping[object, int],
    operands: Mapping[str, Operand], idtype: str,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a unit that depend on sizes, patterns and values."""
    known, kept = fixed_arguments(unit, sizes, patterns_of(operands), idtype)
    return {n: known[n] for n in params if n in known} | values_of(unit, kept, operands)


def values_of(
    unit: Unit, kept: Mapping[Key, LevelArrays], operands: Mapping[str, Operand]
) -> dict[str, Any]:
    """The values of a unit's inputs by parameter, in the order of their levels."""
    values: dict[str, Any] = {}
    for param in unit.inputs:
        name, key = unit.values[param]
        x = to_numpy(operands[name].values)
        x = x if key is None else kept[key].values(x)
        x = x if x.flags.c_contiguous else np.require(x, requirements="C")
        values[param] = x if x.size else plain_view(x)  # TVM refuses NumPy's strides of empty ones
    return values
