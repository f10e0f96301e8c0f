"""Block compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.formats.blocks import SEARCHED, block_places, find_blocks
from sparsetir.formats.direct import Level, direct
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class BSR(Format):
    """Dense blocks of `rows` by `cols` that hold an element, by rows of blocks.

    When to use: elements cluster in blocks, as in block-pruned weights and block-sparse attention,
    and a block fits a Tensor Core. A scattered element adds up to rows * cols - 1 zeros of padding.

    Parameters
    ----------
    rows, cols : int
        Rows and columns of a block. Shapes that are not multiples of these are padded.

    Notes
    -----
    SparseTIR, section 3.1 and appendix A.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        set_positive(self, "rows", "cols")

    @property
    def name(self) -> str:
        return f"bsr_{self.rows}_{self.cols}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        r, c = self.rows, self.cols
        return [
            make_rule(
                self.name, operand,
                [dense(f"{i}O"), sparse(f"{j}O", f"{i}O"), dense(f"{i}I", r), dense(f"{j}I", c)],
                {i: [f"{i}O", f"{i}I"], j: [f"{j}O", f"{j}I"]},
                lambda i, j: (i // r, j // c, i % r, j % c),
                lambda io, jo, ii, ji: (io * r + ii, jo * c + ji),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        return block_places(pattern, self.rows, self.cols)

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        (rule,) = rules
        blocks = find_blocks(pattern, self.rows, self.cols)
        levels = [Level(), Level(blocks.indptr, blocks.indices), Level(), Level()]
        shape = (len(blocks.indices), self.rows, self.cols)
        lengths = (*blocks.grid, self.rows, self.cols)
        return [direct(rule, pattern, levels, shape, blocks.places, lengths=lengths)]


register(BSR, BSR(4, 4), search=lambda _: [BSR(*size) for size in SEARCHED])
