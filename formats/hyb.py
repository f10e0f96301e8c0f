"""Hyb: columns in parts, rows in buckets by length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.buckets import (
    Bucket,
    bucket_labels,
    positions,
    set_bucket,
    split_rows,
    store_bucket,
)
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, row_pieces
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import starts

MOST_PARTS = 1024  # each has a rule for every bucket


@dataclass(frozen=True)
class Hyb(Format):
    """Columns in parts of equal width, and in each part rows padded to powers of two.

    When to use: rows of very different lengths, as in social and web graphs. All rows of a bucket
    are equal work; parts keep the rows of the dense operand in cache, but each of them updates
    the result once more. If rows are short and even, CSR or ELL is as good.

    Parameters
    ----------
    c : int
        Number of column parts.
    k : int
        The last bucket, of 2^k slots.

    Notes
    -----
    In a part, rows of length l with 2^(b-1) < l <= 2^b are in bucket b, with 2^b slots each, up to
    bucket `k`. Longer rows are split into pieces of 2^k elements and one of the remainder, which
    goes to the bucket that it fits. (SparseTIR, section 4.2.1 and figure 11.) The paper seems to
    pad remainders to 2^k, so there is less padding here: on Cora with c = 1 and k = 2, 5.9 % of the
    slots, against 15.8 % that way and 15.9 % in the paper's table 1.

    There is a rule `hyb_<c>_<k>_p<part>_b<bucket>` for each part and bucket, including empty
    ones.
    """

    c: int
    k: int

    def __post_init__(self) -> None:
        set_positive(self, "c")
        if self.c > MOST_PARTS:
            raise ValueError(
                f"Hyb: argument 'c': expected at most {MOST_PARTS} parts, got {self.c}"
            )
        set_bucket(self)

    @classmethod
    def for_pattern(cls, pattern: Pattern, c: int = 1) -> Hyb:
        """The format with the paper's choice of k: ceil(log2(nnz / rows)), at least 0.

        Parameters
        ----------
        pattern : Pattern
            A matrix's pattern.
        c : int
            Number of column parts.

        Returns
        -------
        Hyb
        """
        k = 0
        while pattern.shape[0] << k < pattern.nnz:
            k += 1
        return cls(c, k)

    @property
    def name(self) -> str:
        return f"hyb_{self.c}_{self.k}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        axes = f"{i}O", f"{i}B", f"{j}B"
        return [
            row_pieces(
                f"{self.name}_p{part}_b{b}",
                operand,
                axes,
                slots=1 << b,
                unique=b < self.k,  # a row has at most one remainder
            )
            for part in range(self.c)
            for b in range(self.k + 1)
        ]

    def labels(self, operand: Operand) -> list[str]:
        rows = bucket_labels(self.k)
        parts = [f"part {p + 1} of {self.c}, " if self.c > 1 else "" for p in range(self.c)]
        return [part + row for part in parts for row in rows]

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        return [positions(bucket) for bucket in self._buckets(pattern)]

    def places(self, pattern: Pattern) -> int:
        width = max(1, -(-pattern.shape[1] // self.c))
        rows, cols = pattern.coords
        lengths = np.bincount(rows.astype(np.int64) * self.c + cols // width)
        whole, rest = np.divmod(lengths[lengths > 0], 2**self.k)
        rests = 2 ** np.ceil(np.log2(np.maximum(rest, 1))).astype(np.int64) * (rest > 0)
        return int((whole * 2**self.k + rests).sum())

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        shape = (1, *pattern.shape)
        return [
            store_bucket(rule, pattern, shape, np.zeros_like(bucket.row), bucket.row, bucket)
            for rule, bucket in zip(rules, self._buckets(pattern), strict=True)
        ]

    def _buckets(self, pattern: Pattern) -> list[Bucket]:
        rows, cols = pattern.shape
        if self.c == 1:
            bounds = pattern.indptr
        else:
            width = max(1, -(-cols // self.c))
            within = pattern.coords[0].astype(np.intp) * self.c
            within += pattern.coords[1] // width
            counts = np.bincount(within, minlength=rows * self.c)
            bounds = starts(counts, pattern.indptr.dtype)
        first, length = bounds[:-1].reshape(rows, self.c), np.diff(bounds).reshape(rows, self.c)
        parts = [split_rows(first[:, p], length[:, p], self.k) for p in range(self.c)]
        return [bucket for buckets in parts for bucket in buckets]


def _fitting(pattern: Pattern, *parts: int) -> list[Hyb]:
    """Formats with these numbers of parts; above two at most 5 buckets, as each is compiled."""
    k = Hyb.for_pattern(pattern).k
    return [Hyb(c, k if c <= 2 else min(k, 5)) for c in parts]


register(
    Hyb, Hyb(1, 2),
    library=lambda p: _fitting(p, 1, 4), search=lambda p: _fitting(p, 1, 2, 4),
)  # fmt: skip
