"""Doubly compressed sparse rows."""

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
class DCSR(Format):
    """The nonempty rows, each with the columns that it stores.

    When to use: most rows are empty, as in pruned weights and in a single relation of a graph.
    Otherwise CSR, which needs no row numbers.

    Notes
    -----
    SparseTIR, section 4.3.
    """

    @property
    def name(self) -> str:
        return "dcsr"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [
            make_rule(
                self.name, operand,
                [dense("O", 1), sparse(f"{i}R", "O"), sparse(f"{j}C", f"{i}R")],
                {i: ["O", f"{i}R"], j: [f"{j}C"]},
                lambda i, j: (0, i, j), lambda o, i, j: (i, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        return pattern.nnz

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        check_fits(rules[0], pattern)
        nnz, indptr = pattern.nnz, pattern.indptr
        rows = np.flatnonzero(np.diff(indptr))
        levels = [
            Level(),
            Level(np.array([0, len(rows)]), rows),
            Level(np.append(indptr[rows], indptr[-1]), pattern.coords[1].copy()),
        ]
        return [direct(rules[0], pattern, levels, (nnz,), places=np.arange(nnz))]


register(DCSR, DCSR())
