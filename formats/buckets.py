"""Rows by length: pieces of at most 2^k elements, each in the bucket of the next power of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import index_type, is_integer, starts

LARGEST = 30  # buckets hold at most 2^30 elements of a row, which int32 can count


class Bucket(NamedTuple):
    """Pieces of rows, in the order of the rows.

    row : (pieces,) row of each piece
    start : (pieces,) position of its first element
    length : (pieces,) its number of elements, at least 1
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray


def set_bucket(fmt: Any) -> None:
    """Check the largest bucket `k` of a new format, and convert it to an int."""
    k = fmt.k
    if not is_integer(k) or not 0 <= k <= LARGEST:
        raise ValueError(
            f"{type(fmt).__name__}: argument 'k': expected an integer in [0, {LARGEST}], got {k!r}"
        )
    object.__setattr__(fmt, "k", int(k))


def bucket_labels(k: int) -> list[str]:
    """The contents of buckets 0 .. k in words; the last one also has pieces of longer rows."""
    first = [1, *(2**b // 2 + 1 for b in range(1, k + 1))]
    out = [f"rows of {n}" if n == 2**b else f"rows of {n} to {2**b}" for b, n in enumerate(first)]
    out[-1] += ", and pieces"
    return out


def split_rows(starts: np.ndarray, lengths: np.ndarray, k: int) -> list[Bucket]:
    """Buckets 0 .. k of rows of consecutive elements; bucket b has pieces of 2^(b-1) < l <= 2^b.

    starts : (rows,) position of the first element of each row
    lengths : (rows,) number of its elements
    k : rows longer than 2^k become pieces of 2^k, and one of the remainder

    Time and memory are linear in the rows and pieces.
    """
    most = 1 << k
    whole = lengths >> k
    rest = lengths & (most - 1)
    # The bit length of rest - 1, which is its logarithm rounded up; -1 if nothing remains.
    number = np.frexp(np.maximum(rest - 1, 0).astype(np.float64))[1].astype(np.int8)
    number[rest == 0] = -1
    behind = starts + (whole << k)
    out = []
    for b in range(k):
        row = np.flatnonzero(number == b)
        out.append(Bucket(row, behind[row], rest[row]))
    pieces = whole + (number == k)
    row = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(row)) - (np.cumsum(pieces) - pieces)[row]
    done = (nth << k).astype(starts.dtype, copy=False)
    out.append(Bucket(row, starts[row] + done, np.minimum(lengths[row] - done, most)))
    return out


def positions(bucket: Bucket) -> np.ndarray:
    """Positions of the elements of a bucket, increasing."""
    before = np.cumsum(bucket.length) - bucket.length
    return np.repeat(bucket.start - before, bucket.length) + np.arange(bucket.length.sum())


def store_bucket(
    rule: FormatRewriteRule,
    pattern: Pattern,
    shape: Sequence[int],
    parents: np.ndarray,
    rows: np.ndarray,
    bucket: Bucket,
) -> FormatPart:
    """The arrays of a rule with axes dense > sparse > fixed, for the pieces of a bucket.

    shape : lengths of the three axes
    parents : (pieces,) coordinate of each piece on the dense axis, non-decreasing
    rows : (pieces,) its coordinate on the sparse axis

    The last axis of the pattern is the fixed one.
    """
    columns = pattern.coords[-1]
    _, _, inner = (rule.axis(n) for n in rule.axes_after_rewrite)
    slots, count = int(inner.nnz_cols), len(columns)
    index = index_type(count + slots)
    start, length = (a.astype(index, copy=False)[:, None] for a in bucket[1:])
    slots_in_use = slots if len(start) else 0
    within = np.arange(slots_in_use, dtype=index)
    elements = np.empty((len(start), slots), index)
    for at in _stripes(0, slots_in_use):
        np.add(start, within[at], out=elements[:, at])
    # More than half of the slots of a piece are used.
    padded = [(at, within[at] >= length) for at in _stripes(slots // 2 + 1, slots_in_use)]
    for at, where in padded:
        np.copyto(elements[:, at], index(count), where=where)
    slots_of = columns.take(elements, mode="clip").astype(inner.idtype, copy=False)
    for at, where in padded:
        np.copyto(slots_of[:, at], -1, where=where)
    indptr = starts(np.bincount(parents, minlength=shape[0]))
    levels = [Level(), Level(indptr, rows), Level(None, slots_of.reshape(-1))]
    stored = int(bucket.length.sum())
    return direct(
        rule, pattern, levels, (elements.size,), elements=elements, lengths=shape, stored=stored
    )


def store_tiles(
    rule: FormatRewriteRule,
    pattern: Pattern,
    parents: np.ndarray,
    rows: np.ndarray,
    bucket: Bucket,
    size: int,
) -> FormatPart:
    """The arrays of a rule with axes root > tiles > rows > columns, for the pieces of a bucket.

    size : rows per tile, whose pieces have one parent; rows of number -1 pad its last tile

    Other arguments as for :func:`store_bucket`; tiles have the coordinate of the parent.
    Time and memory are linear in the slots.
    """
    columns = pattern.coords[-1]
    slots = int(rule.axis(rule.axes_after_rewrite[-1]).nnz_cols)
    pieces = np.bincount(parents, minlength=pattern.shape[0])
    tiles = -(-pieces // size)
    count = int(tiles.sum())
    check_fits(rule, pattern, count * size * slots)
    shift = (np.cumsum(tiles) - tiles) * size - (np.cumsum(pieces) - pieces)
    at = np.arange(len(rows)) + np.repeat(shift, pieces)
    rows_of = np.full(count * size, -1, rows.dtype)
    rows_of[at] = rows
    within = np.arange(slots)
    held = bucket.start[:, None] + within
    held[within >= bucket.length[:, None]] = pattern.nnz
    elements = np.full((count * size, slots), pattern.nnz, index_type(pattern.nnz + slots))
    elements[at] = held
    columns_of = np.append(columns, columns.dtype.type(-1)).take(elements)
    levels = [
        Level(), Level(np.array([0, count]), np.repeat(np.arange(len(tiles)), tiles)),
        Level(None, rows_of), Level(None, columns_of.reshape(-1)),
    ]  # fmt: skip
    return direct(
        rule, pattern, levels, (elements.size,), elements=elements,
        lengths=(1, *pattern.shape), stored=int(bucket.length.sum()),
    )  # fmt: skip


def _stripes(first: int, last: int) -> list[slice]:
    """Columns to process together: one by one if rows are short, since NumPy loops over rows."""
    if last <= 8:
        return [slice(n, n + 1) for n in range(first, last)]
    return [slice(first, last)]
