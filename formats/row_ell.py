"""ELLPACK of pieces of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, row_pieces
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import starts


@dataclass(frozen=True)
class RowELL(Format):
    """Nonempty rows, in pieces of a fixed number of slots, and the row of each piece.

    A row of more elements has several pieces, the last of them padded; each bucket of a `Hyb` has
    this format.

    When to use: most nonempty rows have about `cols` elements, or are much longer. Pieces are
    equal work; those of a long row update the same result, so parallel workers have to add
    atomically.

    Parameters
    ----------
    cols : int
        Slots per piece.

    Notes
    -----
    SparseTIR, section 4.2.1.
    """

    cols: int

    def __post_init__(self) -> None:
        set_positive(self, "cols")

    @property
    def name(self) -> str:
        return f"row_ell_{self.cols}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        return [row_pieces(self.name, operand, ["O", f"{i}R", f"{j}C"], slots=self.cols)]

    def places(self, pattern: Pattern) -> int:
        return int((-(-np.diff(pattern.indptr) // self.cols)).sum()) * self.cols

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        lengths = np.diff(pattern.indptr)
        pieces = -(-lengths // self.cols)
        first = starts(pieces)
        number = int(first[-1])
        check_fits(rules[0], pattern, number * self.cols)
        skipped = first[:-1] * self.cols - pattern.indptr[:-1]
        places = np.arange(pattern.nnz) + skipped.repeat(lengths)
        slots = np.full(number * self.cols, -1, pattern.coords[1].dtype)
        slots[places] = pattern.coords[1]
        rows = np.arange(len(pieces)).repeat(pieces)
        levels = [Level(), Level(np.array([0, number]), rows), Level(indices=slots)]
        return [direct(rules[0], pattern, levels, slots.shape, places=places)]


register(
    RowELL, RowELL(4),
    library=lambda _: [RowELL(8)], search=lambda _: [RowELL(g) for g in (4, 8, 16, 32)],
)  # fmt: skip
