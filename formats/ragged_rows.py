"""Ragged rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, ragged
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import starts


@dataclass(frozen=True)
class Ragged(Format):
    """All columns of a row up to its last nonzero; a mask distinguishes nonzeros from padding.

    When to use: rows are filled from the left, as in batches of sequences of different lengths and
    in lower triangles. Then there is no padding, and there are no column numbers to load.

    Notes
    -----
    SparseTIR, section 3.1: dense_variable axes.
    """

    @property
    def name(self) -> str:
        return "ragged"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [
            make_rule(
                self.name, operand, [dense(f"{i}R"), ragged(f"{j}C", f"{i}R")],
                {i: [f"{i}R"], j: [f"{j}C"]},
                lambda i, j: (i, j), lambda i, j: (i, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        ends = pattern.indptr[1:][np.diff(pattern.indptr) > 0]
        return int((pattern.coords[1][ends - 1].astype(np.int64) + 1).sum())

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        indptr, columns = pattern.indptr, pattern.coords[1]
        ends = np.zeros(pattern.shape[0], np.int64)
        stored = np.flatnonzero(np.diff(indptr))
        ends[stored] = columns[indptr[stored + 1] - 1] + 1
        check_fits(rules[0], pattern, int(ends.sum(dtype=np.float64)))  # int64 could overflow
        first = starts(ends)
        places = first[:-1].repeat(np.diff(indptr)) + columns
        levels = [Level(), Level(first)]
        return [direct(rules[0], pattern, levels, (int(first[-1]),), places=places)]


register(Ragged, Ragged())
