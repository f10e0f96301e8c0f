"""Sparse results of expressions, which store what their programs visit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.expressions.compiled import Compiled
from sparsetir.expressions.declarations import Key
from sparsetir.expressions.levels import LevelArrays, coordinates, level_arrays
from sparsetir.expressions.operands import Operand, patterns_of
from sparsetir.expressions.storage import COMPRESSED, DENSE
from sparsetir.expressions.unit import Unit, fixed_arguments
from sparsetir.formats.pattern import Pattern
from sparsetir.planning.sparse_results import gathering_pays
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
        self._numeric: tuple[Numeric, Unit, dict[Key, LevelArrays]] | None = None
        self._settled: dict[int, tuple[dict[str, Any], dict[Key, LevelArrays]]] = {}

    def __call__(self, operands: Mapping[str, Operand]) -> SparseTensor:
        """Compute the result."""
        if self._pattern is None:
            result = self.assembled(operands)
            self._pattern = result.pattern
            return result
        numeric, unit, kept = self._numeric = self._numeric or self._at_pattern(operands)
        values = numeric(values_of(unit, kept, operands))
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
        unit = self._unit(operands)
        known, kept = self._known(unit, operands)
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
        return self._kind.of_stored(Stored(pattern, result.values))

    def _unit(self, operands: Mapping[str, Operand]) -> Unit:
        """The program of the result.

        Rows of several terms are added one after the other where their pattern is known, so that
        they need no bitmap, or where their elements are worth one.
        """
        this = self._compiled
        if this.together is None or self._form.levels != DENSE + COMPRESSED:
            return this.together or this.whole
        stored = [p.nnz for p in patterns_of(operands).values()]
        known = self._pattern is not None
        return this.whole if known or gathering_pays(self._shape, stored) else this.together

    def _known(
        self, unit: Unit, operands: Mapping[str, Operand]
    ) -> tuple[dict[str, Any], dict[Key, LevelArrays]]:
        """The arguments that depend on sizes and patterns, and operands' levels."""
        if id(unit) not in self._settled:
            idtype = self._compiled.idtype
            known, kept = fixed_arguments(unit, self._sizes, patterns_of(operands), idtype)
            known = {n: plain_view(known[n]) for n in unit.assembled.params if n in known}
            self._settled[id(unit)] = known, kept
        return self._settled[id(unit)]

    def _at_pattern(
        self, operands: Mapping[str, Operand]
    ) -> tuple[Numeric, Unit, dict[Key, LevelArrays]]:
        """The kernel that computes values at the pattern, its unit, and its operands' levels."""
        unit, levels = self._unit(operands), self._levels(operands)
        known, kept = self._known(unit, operands)
        kernel, arguments = unit.assembled, {**known, **values_of(unit, kept, operands)}
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
