"""Hyb of each relation of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparsetir.formats.buckets import (
    Bucket,
    positions,
    set_bucket,
    split_rows,
    store_bucket,
    store_tiles,
)
from sparsetir.formats.format import Format, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True)
class RelationalHyb(Format):
    """A tensor of relations by rows by columns, the matrix of each relation as `Hyb(1, k)`.

    When to use: products by relation (RGCN, sparse convolution), where a relation's rows share a
    weight matrix and have very different lengths. Tiles are for kernels that multiply a tile of
    rows by that matrix.

    Parameters
    ----------
    k : int
        The last bucket, of 2^k slots.
    rows : int, optional
        The pieces of rows of a bucket form tiles of `rows` rows, each of one relation, whose last
        tile is padded with rows of number -1, which are not visited. The outer axis is then over
        tiles, and holds the relation of each. None: no tiles.

    Notes
    -----
    Bucket b of all relations is one rule, `relational_hyb_<k>_b<b>`, with the relation as its outer
    axis. The rule of tiles does not determine where a tile ends: arrays come from `convert`.
    (SparseTIR, section 4.4.1, with k = 5.)
    """

    order: ClassVar[int | None] = 3

    k: int
    rows: int | None = None

    def __post_init__(self) -> None:
        set_bucket(self)
        if self.rows is not None:
            set_positive(self, "rows")

    @property
    def name(self) -> str:
        return f"relational_hyb_{self.k}" + (f"_{self.rows}" if self.rows else "")

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        r, i, j = operand.axes
        if self.rows is not None:
            return self._rules_of_tiles(operand, self.rows)
        outer, row, col = f"{r}O", f"{i}B", f"{j}B"
        return [
            make_rule(
                f"{self.name}_b{b}", operand,
                [
                    dense(outer),
                    sparse(row, outer, unique=b < self.k),  # a row has at most one remainder
                    fixed(col, row, slots=1 << b),
                ],
                {r: [outer], i: [row], j: [col]},
                lambda r, i, j: (r, i, j), lambda r, i, j: (r, i, j),
            )
            for b in range(self.k + 1)
        ]  # fmt: skip

    def _rules_of_tiles(self, operand: Operand, rows: int) -> list[FormatRewriteRule]:
        r, i, j = operand.axes
        tile, row, col = f"{r}T", f"{i}B", f"{j}B"
        return [
            make_rule(
                f"{self.name}_b{b}", operand,
                [
                    dense("O", 1), sparse(tile, "O", unique=False),
                    fixed(row, tile, slots=rows, unique=False),
                    fixed(col, row, slots=1 << b),
                ],
                {r: ["O", tile], i: [row], j: [col]},
                lambda r, i, j: (0, r, i, j), lambda o, r, i, j: (r, i, j),
            )
            for b in range(self.k + 1)
        ]  # fmt: skip

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        return [positions(bucket) for bucket in self._buckets(pattern)]

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        relation, row, _ = pattern.coords
        if self.rows is not None:
            return [
                store_tiles(rule, pattern, relation[b.start], row[b.start], b, self.rows)
                for rule, b in zip(rules, self._buckets(pattern), strict=True)
            ]
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
