"""Compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.formats.describe import Operand, dense, make_rule, sparse
from sparsetir.formats.format import Format
from sparsetir.formats.rule import FormatRewriteRule

__all__ = ["CSR"]


@dataclass(frozen=True)
class CSR(Format):
    """Rows one after the other, each with the columns that it stores.

    When to use: by default. Nothing is padded; rows of very different lengths make work uneven.
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
