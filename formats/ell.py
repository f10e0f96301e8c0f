"""ELLPACK."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class ELL(Format):
    """Rows with as many slots each as the longest row has elements.

    When to use: rows have similar lengths, as in meshes and graphs of neighbours. A single long row
    pads all others: then `Hyb`.

    Notes
    -----
    SparseTIR, section 3.1.
    """

    @property
    def name(self) -> str:
        return "ell"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [
            make_rule(
                self.name, operand, [dense(f"{i}R"), fixed(f"{j}C", f"{i}R")],
                {i: [f"{i}R"], j: [f"{j}C"]},
                lambda i, j: (i, j), lambda i, j: (i, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        lengths = np.diff(pattern.indptr)
        return int(lengths.max(initial=0)) * len(lengths)

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        rows, lengths = pattern.shape[0], np.diff(pattern.indptr)
        cols = int(lengths.max(initial=0))
        check_fits(rules[0], pattern, rows * cols)
        skipped = np.arange(rows) * cols - pattern.indptr[:-1]
        places = np.arange(pattern.nnz) + skipped.repeat(lengths)
        slots = np.full(rows * cols, -1, pattern.coords[1].dtype)
        slots[places] = pattern.coords[1]
        levels = [Level(), Level(indices=slots, cols=cols)]
        return [direct(rules[0], pattern, levels, (rows * cols,), places=places)]


register(ELL, ELL())
