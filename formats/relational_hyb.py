"""Hyb of each relation of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.buckets import Bucket, positions, set_bucket, split_rows, store_bucket
from sparsetir.formats.format import Format
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule

__all__ = ["RelationalHyb"]


@dataclass(frozen=True)
class RelationalHyb(Format):
    """A tensor of relations by rows by columns, the matrix of each relation as `Hyb(1, k)`.

    Bucket b of all relations is one rule, `relational_hyb_<k>_b<b>`, with the relation as its outer
    axis. (SparseTIR, section 4.4.1, with k = 5.)

    When to use: products by relation (RGCN, sparse convolution), where a relation's rows share a
    weight matrix and have very different lengths.
    """

    order = 3

    k: int

    def __post_init__(self) -> None:
        set_bucket(self)

    @property
    def name(self) -> str:
        return f"relational_hyb_{self.k}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        r, i, j = operand.axes
        outer, row, col = f"{r}O", f"{i}B", f"{j}B"
        return [
            make_rule(
                f"{self.name}_b{b}", operand,
                [
                    dense(outer),
                    sparse(row, outer, unique=b < self.k),  # a row has one remainder at most
                    fixed(col, row, slots=1 << b),
                ],
                {r: [outer], i: [row], j: [col]},
                lambda r, i, j: (r, i, j), lambda r, i, j: (r, i, j),
            )
            for b in range(self.k + 1)
        ]  # fmt: skip

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        return [positions(bucket) for bucket in self._buckets(pattern)]

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        relation, row, _ = pattern.coords
        return [
            store_bucket(rule, pattern, pattern.shape, relation[b.start], row[b.start], b)
            for rule, b in zip(rules, self._buckets(pattern), strict=True)
        ]

    def _buckets(self, pattern: Pattern) -> list[Bucket]:
        relation, row, _ = pattern.coords
        first = np.ones(pattern.nnz, bool)
        np.not_equal(row[1:], row[:-1], out=first[1:])
        first[1:] |= relation[1:] != relation[:-1]
        starts = np.flatnonzero(first)
        return split_rows(starts, np.diff(starts, append=pattern.nnz), self.k)
