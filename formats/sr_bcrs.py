"""Strided row-wise block compressed rows: groups of narrow tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.blocks import find_blocks
from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import distinct, starts


@dataclass(frozen=True)
class SRBCRS(Format):
    """Nonempty tiles of `t` rows by one column, in groups of `g`.

    When to use: elements are scattered, as in unstructured pruned weights, and Tensor Cores should
    multiply them. At least 1 in `t` slots of a stored tile holds an element, where BSR of t by t
    may have 1 in t * t.

    Parameters
    ----------
    t : int
        Rows per tile.
    g : int
        Tiles per group.

    Notes
    -----
    The tiles of a row of tiles are ordered by column; the last group is padded with tiles of column
    -1, which are not visited. Values are (groups * g, t): as (groups, g, t) the transposed left
    operands of matrix instructions, whose right operand is g rows of the dense matrix. (SparseTIR,
    section 4.3.2 and figure 18; Magicube.)
    """

    t: int
    g: int

    def __post_init__(self) -> None:
        set_positive(self, "t", "g")

    @property
    def name(self) -> str:
        return f"sr_bcrs_{self.t}_{self.g}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        t = self.t
        return [
            make_rule(
                self.name, operand,
                [
                    dense(f"{i}O"), sparse("G", f"{i}O", 1, unique=False),
                    fixed(f"{j}T", "G", slots=self.g), dense(f"{i}I", t),
                ],
                {i: [f"{i}O", f"{i}I"], j: ["G", f"{j}T"]},
                lambda i, j: (i // t, 0, j, i % t),
                lambda io, g, j, ii: (io * t + ii, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        i, j = pattern.coords
        columns = distinct((i // self.t).astype(np.int64) * pattern.shape[1] + j)
        counts = np.bincount(columns // max(1, pattern.shape[1]))
        return int((-(-counts // self.g)).sum()) * self.g * self.t

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        (rule,) = rules
        tiles = find_blocks(pattern, self.t, 1)
        counts = np.diff(tiles.indptr)
        indptr = starts(-(-counts // self.g))
        groups = int(indptr[-1])
        slots = groups * self.g
        check_fits(rule, pattern, slots)
        shift = indptr[:-1] * self.g - tiles.indptr[:-1]
        indices = np.full(slots, -1, rule.axis(rule.axes_after_rewrite[0]).idtype)
        indices[np.arange(len(tiles.indices)) + np.repeat(shift, counts)] = tiles.indices
        places = tiles.places
        places += np.repeat(shift * self.t, np.diff(tiles.bounds))
        zeros = np.zeros(groups, np.int64)
        levels = [Level(), Level(indptr, zeros), Level(None, indices, self.g), Level()]
        lengths = (len(counts), 1, pattern.shape[1], self.t)
        return [direct(rule, pattern, levels, (slots, self.t), places, lengths=lengths)]


register(
    SRBCRS, SRBCRS(4, 4), library=lambda _: [SRBCRS(8, 32)],
    search=lambda _: [SRBCRS(t, g) for t in (4, 8) for g in (8, 32)],
)  # fmt: skip
