"""Columns of row panels by their pattern of nonzeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsetir.formats.direct import Level, direct
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, sparse, table
from sparsetir.formats.pattern import Pattern, group
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import index_type, stable_order, starts

LARGEST = 16
MOST_BY_PATTERN = 8  # the most rows of a panel with a rule for each of its patterns


class PanelPatterns(NamedTuple):
    """The patterns of nonzeros of each panel's columns, by panel and pattern.

    Parameters
    ----------
    panel : (groups,) ndarray
        Panel of each group.
    mask : (groups,) ndarray
        Bit r is set where row r of the panel stores an element.
    columns : (groups,) ndarray
        Number of columns with this pattern.
    """

    panel: np.ndarray
    mask: np.ndarray
    columns: np.ndarray


class _Columns(NamedTuple):
    """Nonempty columns of panels, by panel and column; and their elements."""

    panel: np.ndarray
    column: np.ndarray
    mask: np.ndarray
    count: np.ndarray
    number: np.ndarray  # the column of each element


@dataclass(frozen=True)
class EnumeratedPatterns(Format):
    """Panels of rows; columns of a panel grouped by pattern of nonzeros.

    When to use: unstructured sparsity of 50 % and more in weights, where several rows of a panel
    use the same row of the dense operand: it is loaded once for q products. In graphs nearly all
    columns of a panel store one element, and CSR is as good.

    Parameters
    ----------
    rows : int
        Rows per panel, at most 16.
    by : {"count", "pattern"}
        A rule for each number of rows (section 3.5), or one for each pattern (section 3.2), of at
        most 8 rows.

    Notes
    -----
    Rule `enum_<rows>_n<q>` holds the columns that store q elements in a panel, each as its number
    and the q rows within the panel, so that there is no padding. Columns of a panel are ordered by
    their pattern as a bit mask (row 0 is bit 0), then by their number: those with equal patterns
    are adjacent, and `patterns` gives their numbers. (Enumerate-and-sparse-coarsen, sections 3.2
    and 3.3.)

    By pattern, rule `enum_<rows>_p<mask>` holds the columns of one pattern, each only as its
    number: its rows are a constant table in the rule's maps, and all slots are filled.
    """

    rows: int
    by: str = "count"

    def __post_init__(self) -> None:
        set_positive(self, "rows")
        if self.by not in ("count", "pattern"):
            raise ValueError(
                f"EnumeratedPatterns: argument 'by': expected 'count' or 'pattern', got {self.by!r}"
            )
        if self.by == "pattern" and self.rows > MOST_BY_PATTERN:
            raise ValueError(
                f"EnumeratedPatterns: argument 'rows': expected at most {MOST_BY_PATTERN} by "
                f"pattern, got {self.rows}"
            )
        if self.rows > LARGEST:
            raise ValueError(
                f"EnumeratedPatterns: argument 'rows': expected at most {LARGEST}, got {self.rows}"
            )

    @property
    def name(self) -> str:
        return f"enum_{self.rows}" + ("_by_pattern" if self.by == "pattern" else "")

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        if self.by == "pattern":
            return [self._rule(operand, mask) for mask in self._masks]
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

    @property
    def _masks(self) -> range:
        return range(1, 1 << self.rows)

    def _rule(self, operand: Operand, mask: int) -> FormatRewriteRule:
        """The rule for the columns of one pattern."""
        i, j = operand.axes
        u = self.rows
        held = [r for r in range(u) if mask >> r & 1]
        above = [sum(h < r for h in held) for r in range(u)]  # arbitrary for rows it does not hold
        above = [min(a, len(held) - 1) for a in above]
        return make_rule(
            f"enum_{u}_p{mask}", operand,
            [dense(f"{i}O"), sparse(f"{j}C", f"{i}O"), dense(f"{i}I", len(held))],
            {i: [f"{i}O", f"{i}I"], j: [f"{j}C"]},
            lambda i, j: (i // u, j, table(above, i % u)),
            lambda io, j, ii: (io * u + table(held, ii), j),
        )  # fmt: skip

    def patterns(self, pattern: Pattern) -> PanelPatterns:
        """The groups of columns of each panel, for statistics.

        Parameters
        ----------
        pattern : Pattern
            A matrix's pattern.

        Returns
        -------
        PanelPatterns
        """
        panel, mask, of_column = self._groups(self._columns(pattern))
        return PanelPatterns(panel, mask, np.bincount(of_column, minlength=len(panel)))

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        columns = self._columns(pattern)
        of_rule = self._rule_of(columns)[columns.number]
        order = stable_order(of_rule)
        return self._parted(order, of_rule)

    def _rule_of(self, columns: _Columns) -> np.ndarray:
        """The index of each column's rule."""
        return (columns.mask if self.by == "pattern" else columns.count) - 1

    def _parted(self, order: np.ndarray, of_rule: np.ndarray) -> list[np.ndarray]:
        """An order of rules, divided into parts: one per rule."""
        count = len(self._masks) if self.by == "pattern" else self.rows
        ends = np.cumsum(np.bincount(of_rule, minlength=count))
        return np.split(order, ends[:-1])

    def places(self, pattern: Pattern) -> int:
        return pattern.nnz

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        columns = self._columns(pattern)
        order, panels = stable_order(self._groups(columns)[2]), self._panels(pattern)
        rule = self._rule_of(columns)
        of_rule = self._parted(order[stable_order(rule[order])], rule)
        element = self._by_column(pattern, columns, np.concatenate(of_rule))
        out, first = [], 0
        by_pattern = self.by == "pattern"
        for number, (rule, taken) in enumerate(zip(rules, of_rule, strict=True), 1):
            q = number.bit_count() if by_pattern else number
            stored = q * len(taken)
            elements = element[first : first + stored]
            first += stored
            indptr = starts(np.bincount(columns.panel[taken], minlength=panels))
            inner = Level() if by_pattern else Level(None, pattern.coords[0][elements] % self.rows)
            levels = [Level(), Level(indptr, columns.column[taken]), inner]
            lengths = (panels, pattern.shape[1], q if by_pattern else self.rows)
            shape = (len(taken), q) if by_pattern else (stored,)
            out.append(
                direct(
                    rule, pattern, levels, shape, elements=elements, lengths=lengths, stored=stored
                )
            )
        return out

    def _by_column(self, pattern: Pattern, columns: _Columns, order: np.ndarray) -> np.ndarray:
        """Elements by column of a panel, these in the given order, and by row."""
        out = np.empty(pattern.nnz, index_type(pattern.nnz))
        count = columns.count[order]
        start = np.empty(len(order), out.dtype)
        start[order] = np.cumsum(count) - count
        # An element is preceded by those of the rows above it.
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


register(EnumeratedPatterns, EnumeratedPatterns(4))
