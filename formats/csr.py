"""Compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class CSR(Format):
    """The rows in sequence, each with the columns that it stores.

    When to use: by default. There is no padding; rows that differ in length make work uneven.
    """

    @property
    def name(self) -> str:
        return "csr"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [
            make_rule(
                self.name, operand, [dense(f"{i}R"), sparse(f"{j}C", f"{i}R")],
                {i: [f"{i}R"], j: [f"{j}C"]},
                lambda i, j: (i, j), lambda i, j: (i, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        return pattern.nnz

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        check_fits(rules[0], pattern)
        nnz = pattern.nnz
        levels = [Level(), Level(pattern.indptr.copy(), pattern.coords[1].copy())]
        return [direct(rules[0], pattern, levels, (nnz,), places=np.arange(nnz))]


register(CSR, CSR())
