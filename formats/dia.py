"""Diagonals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import distinct

LONGEST = 2**30  # the most rows or columns
OFFSET = LONGEST - 1  # the number of the main diagonal


@dataclass(frozen=True)
class DIA(Format):
    """The nonempty diagonals, each with a slot for every row.

    Element (i, j) is on diagonal i - j + OFFSET, which is nonnegative for any shape, so a matrix
    has at most 2**30 rows and columns. A mask marks the slots that hold an element.

    When to use: few diagonals hold nearly all elements, as in band matrices and stencils on regular
    grids. A diagonal with a single element takes as many slots as there are rows.
    """

    @property
    def name(self) -> str:
        return "dia"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        # A slot for every row and not, as in scipy, for every column: programs write rows, so that
        # no two slots of a diagonal write the same one. The number decreases with j, so that i +
        # OFFSET - d, evaluated from the left, stays below 2**31.
        return [
            make_rule(
                self.name, operand,
                [dense("O", 1), sparse(f"{j}D", "O", 2 * OFFSET + 1), dense(f"{i}R")],
                {i: [f"{i}R"], j: ["O", f"{j}D"]},
                lambda i, j: (0, i - j + OFFSET, i),
                lambda o, d, i: (i, i + OFFSET - d),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        i, j = pattern.coords
        return len(distinct(j.astype(np.int64) - i)) * pattern.shape[0]

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        rows, cols = pattern.shape
        if max(rows, cols) > LONGEST:
            raise ValueError(
                f"DIA: argument 'pattern': expected at most {LONGEST} rows and columns, got shape "
                f"{pattern.shape}"
            )
        diagonal = pattern.coords[0] - pattern.coords[1] + cols  # from 1 to rows + cols - 1
        number = np.zeros(rows + cols, np.int64)
        number[diagonal] = 1
        diagonals = np.flatnonzero(number)
        number[diagonals] = np.arange(len(diagonals))
        places = number[diagonal] * rows + pattern.coords[0]
        levels = [
            Level(),
            Level(np.array([0, len(diagonals)]), diagonals + (OFFSET - cols)),
            Level(),
        ]
        return [direct(rules[0], pattern, levels, (len(diagonals), rows), places=places)]


register(DIA, DIA())
