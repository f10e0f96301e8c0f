"""Columns of row panels by their pattern of non-zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsetir.formats.direct import Level, direct
from sparsetir.formats.format import Format, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.group import group
from sparsetir.formats.index_arrays import index_type, stable_order, starts
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule

__all__ = ["EnumeratedPatterns", "PanelPatterns"]

LARGEST = 16


class PanelPatterns(NamedTuple):
    """Which patterns of non-zeros the columns of each panel have, by panel and pattern.

    panel : (groups,) number of the panel
    mask : (groups,) bit r is set where row r of the panel stores an element
    columns : (groups,) number of columns with this pattern
    """

    panel: np.ndarray
    mask: np.ndarray
    columns: np.ndarray


class _Columns(NamedTuple):
    """Columns of panels that store something, by panel and column; and their elements."""

    panel: np.ndarray
    column: np.ndarray
    mask: np.ndarray
    count: np.ndarray
    number: np.ndarray  # of each element


@dataclass(frozen=True)
class EnumeratedPatterns(Format):
    """Panels of `rows` rows, at most 16; columns of a panel grouped by pattern of non-zeros.

    Rule `enum_<rows>_n<q>` holds the columns that store q elements in a panel, each as its number
    and the q rows within the panel, so that nothing is padded. Columns of a panel stand in the
    order of their pattern as a bit mask (row 0 is bit 0), then of their number: those with equal
    patterns are adjacent, and `patterns` says how many there are. (Enumerate-and-sparse-coarsen,
    sections 3.2 and 3.3.)

    When to use: unstructured sparsity of 50 % and more in weights, where several rows of a panel
    use the same row of the dense operand: it is loaded once for q products. In graphs nearly all
    columns of a panel store one element, and CSR does as well.
    """

    rows: int

    def __post_init__(self) -> None:
        set_positive(self, "rows")
        if self.rows > LARGEST:
            raise ValueError(
                f"EnumeratedPatterns: argument 'rows': expected at most {LARGEST}, got {self.rows}"
            )

    @property
    def name(self) -> str:
        return f"enum_{self.rows}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        u = self.rows
        return [
            make_rule(
                f"{self.name}_n{q}", operand,
                [
                    dense(f"{i}O"),
                    sparse(f"{j}C", f"{i}O", unique=False),  # by pattern, not by number
                    fixed(f"{i}I", f"{j}C", u, q),
                ],
                {i: [f"{i}O", f"{i}I"], j: [f"{j}C"]},
                lambda i, j: (i // u, j, i % u), lambda io, j, ii: (io * u + ii, j),
            )
            for q in range(1, u + 1)
        ]  # fmt: skip

    def patterns(self, pattern: Pattern) -> PanelPatterns:
        """The groups of columns of each panel, for statistics."""
        panel, mask, of_column = self._groups(self._columns(pattern))
        return PanelPatterns(panel, mask, np.bincount(of_column, minlength=len(panel)))

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        columns = self._columns(pattern)
        count = columns.count[columns.number]
        return [np.flatnonzero(count == q) for q in range(1, self.rows + 1)]

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        columns = self._columns(pattern)
        order = stable_order(self._groups(columns)[2])
        panels, count = self._panels(pattern), columns.count[order]
        of_rule = [order[count == q] for q in range(1, self.rows + 1)]
        element = self._by_column(pattern, columns, np.concatenate(of_rule))
        out, first = [], 0
        for q, (rule, taken) in enumerate(zip(rules, of_rule, strict=True), 1):
            stored = q * len(taken)
            elements = element[first : first + stored]
            first += stored
            indptr = starts(np.bincount(columns.panel[taken], minlength=panels))
            rows = pattern.coords[0][elements] % self.rows
            levels = [Level(), Level(indptr, columns.column[taken]), Level(None, rows)]
            lengths = (panels, pattern.shape[1], self.rows)
            out.append(
                direct(
                    rule, pattern, levels, (stored,), elements=elements, lengths=lengths,
                    stored=stored,
                )
            )  # fmt: skip
        return out

    def _by_column(self, pattern: Pattern, columns: _Columns, order: np.ndarray) -> np.ndarray:
        """Elements by column of a panel, these in an order, and by row."""
        out = np.empty(pattern.nnz, index_type(pattern.nnz))
        count = columns.count[order]
        start = np.empty(len(order), out.dtype)
        start[order] = np.cumsum(count) - count
        # Before an element are those of the rows above it.
        above = columns.mask[columns.number] & ((1 << pattern.coords[0] % self.rows) - 1)
        out[start[columns.number] + np.bitwise_count(above)] = np.arange(
            pattern.nnz, dtype=out.dtype
        )
        return out

    def _panels(self, pattern: Pattern) -> int:
        return -(-pattern.shape[0] // self.rows)

    def _columns(self, pattern: Pattern) -> _Columns:
        row, column = pattern.coords
        panel, of_column, number = group(
            row // self.rows, self._panels(pattern), column, pattern.shape[1], self.name
        )
        bits = np.left_shift(np.int32(1), row % self.rows)
        mask = np.bincount(number, bits, len(panel)).astype(np.int32)
        return _Columns(panel, of_column, mask, np.bincount(number, minlength=len(panel)), number)

    def _groups(self, columns: _Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        panels = int(columns.panel[-1]) + 1 if len(columns.panel) else 0
        return group(columns.panel, panels, columns.mask, 1 << self.rows)
