"""Compressed sparse columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import index_type


@dataclass(frozen=True)
class CSC(Format):
    """The columns in sequence, each with the rows that it stores.

    When to use: the program visits the elements of a column together, as the product with the
    transposed matrix does. A product whose results are rows updates each of them from many columns,
    so that columns cannot run in parallel.
    """

    @property
    def name(self) -> str:
        return "csc"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [
            make_rule(
                self.name, operand, [dense(f"{j}C"), sparse(f"{i}R", f"{j}C")],
                {i: [f"{i}R"], j: [f"{j}C"]},
                lambda i, j: (j, i), lambda j, i: (i, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        return pattern.nnz

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        check_fits(rules[0], pattern)
        nnz = pattern.nnz
        number = np.arange(nnz, dtype=index_type(nnz))
        columns = csr_array((number, pattern.coords[1], pattern.indptr), pattern.shape).tocsc()
        levels = [Level(), Level(columns.indptr, columns.indices)]
        return [direct(rules[0], pattern, levels, (nnz,), elements=columns.data)]


register(CSC, CSC())
