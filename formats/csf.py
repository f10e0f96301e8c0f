"""Compressed sparse fibers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.csc import CSC
from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import is_integer, starts


@dataclass(frozen=True)
class CSF(Format):
    """A tree of coordinates with one level per axis of a tensor.

    When to use: tensors of three axes and more. The axis whose coordinates are results should come
    first, the one that stores most under each parent last.

    Parameters
    ----------
    axes : tuple of int
        The axes from the root down, a permutation of 0 .. n - 1 with n >= 2.

    Notes
    -----
    The root level is dense, those below are compressed: CSF((0, 1)) is equivalent to CSR, and
    CSF((1, 0)) to CSC. (SparseTIR, section 3.1; Smith and Karypis, "Tensor-matrix products with a
    compressed sparse tensor", 2015)
    """

    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = self.axes
        numbers = isinstance(axes, tuple | list) and all(map(is_integer, axes))
        if numbers:
            object.__setattr__(self, "axes", tuple(int(a) for a in axes))
        if not numbers or len(axes) < 2 or sorted(axes) != list(range(len(axes))):
            raise ValueError(
                "CSF: argument 'axes': expected a permutation of 0 .. n - 1 with n >= 2, got "
                f"{axes!r}"
            )

    @property
    def order(self) -> int:
        """The number of axes of the tensors that it stores."""
        return len(self.axes)

    @property
    def name(self) -> str:
        return "_".join(["csf", *map(str, self.axes)])

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        levels = [f"{operand.axes[a]}L" for a in self.axes]
        below = [sparse(n, under) for n, under in zip(levels[1:], levels, strict=False)]
        back = [self.axes.index(a) for a in range(self.order)]
        return [
            make_rule(
                self.name, operand, [dense(levels[0]), *below],
                {a: [f"{a}L"] for a in operand.axes},
                lambda *coords: tuple(coords[a] for a in self.axes),
                lambda *coords: tuple(coords[n] for n in back),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        return pattern.nnz

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        if self.axes == (1, 0):
            return CSC().infer(pattern, rules)
        if list(self.axes) != sorted(self.axes):
            return super().infer(pattern, rules)
        check_fits(rules[0], pattern)
        coords, nnz = pattern.coords, pattern.nnz
        differs = coords[0][1:] != coords[0][:-1]
        levels, parents = [Level()], np.arange(0)
        # The first element of each node of a level.
        nodes = parents
        for axis in range(1, self.order):
            if axis == self.order - 1:
                nodes = np.arange(nnz)
            else:
                differs |= coords[axis][1:] != coords[axis][:-1]
                nodes = np.append(np.arange(min(1, nnz)), np.flatnonzero(differs) + 1)
            if axis == 1:
                indptr = starts(np.bincount(coords[0][nodes], minlength=pattern.shape[0]))
            else:
                indptr = np.append(np.searchsorted(nodes, parents), len(nodes))
            levels.append(Level(indptr, coords[axis][nodes]))
            parents = nodes
        return [direct(rules[0], pattern, levels, (nnz,), places=nodes)]


register(CSF, library=lambda _: [CSF((0, 1)), CSF((1, 0))], search=lambda _: [])
