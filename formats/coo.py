"""Coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, row_pieces
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class COO(Format):
    """The row and the column of each element, in the order of rows.

    When to use: rows differ much in length, or most are empty, and equal numbers of elements per
    worker matter more than one worker per row. Several elements update the same row, so parallel
    workers have to add atomically or by segments.
    """

    @property
    def name(self) -> str:
        return "coo"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [row_pieces(self.name, operand, ["O", f"{i}R", f"{j}C"], slots=1)]

    def places(self, pattern: Pattern) -> int:
        return pattern.nnz

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        check_fits(rules[0], pattern)
        nnz = pattern.nnz
        rows, columns = (c.copy() for c in pattern.coords)
        levels = [Level(), Level(np.array([0, nnz]), rows), Level(indices=columns)]
        return [direct(rules[0], pattern, levels, (nnz,), places=np.arange(nnz))]


register(COO, COO())
