"""Doubly compressed block sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.blocks import SEARCHED, block_places, find_blocks
from sparsetir.formats.direct import Level, direct
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class DBSR(Format):
    """BSR of the nonempty rows of blocks, with the number of each such row.

    When to use: many rows of blocks are empty, as in block-pruned weights. Otherwise BSR, which
    needs no row numbers.

    Parameters
    ----------
    rows, cols : int
        Rows and columns of a block. Shapes that are not multiples of these are padded.

    Notes
    -----
    SparseTIR, section 4.3.2.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        set_positive(self, "rows", "cols")

    @property
    def name(self) -> str:
        return f"dbsr_{self.rows}_{self.cols}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        r, c = self.rows, self.cols
        return [
            make_rule(
                self.name, operand,
                [
                    dense("O", 1), sparse(f"{i}O", "O"), sparse(f"{j}O", f"{i}O"),
                    dense(f"{i}I", r), dense(f"{j}I", c),
                ],
                {i: ["O", f"{i}O", f"{i}I"], j: [f"{j}O", f"{j}I"]},
                lambda i, j: (0, i // r, j // c, i % r, j % c),
                lambda o, io, jo, ii, ji: (io * r + ii, jo * c + ji),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        return block_places(pattern, self.rows, self.cols)

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        (rule,) = rules
        blocks = find_blocks(pattern, self.rows, self.cols)
        stored = np.flatnonzero(np.diff(blocks.indptr))
        indptr = np.append(blocks.indptr[stored], blocks.indptr[-1])
        levels = [
            Level(), Level(np.array([0, len(stored)]), stored), Level(indptr, blocks.indices),
            Level(), Level(),
        ]  # fmt: skip
        shape = (len(blocks.indices), self.rows, self.cols)
        lengths = (1, *blocks.grid, self.rows, self.cols)
        return [direct(rule, pattern, levels, shape, blocks.places, lengths=lengths)]


register(DBSR, DBSR(4, 4), search=lambda _: [DBSR(*size) for size in SEARCHED])
