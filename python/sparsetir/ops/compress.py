"""Stable sorts of elements by rows or columns."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from sparsetir.ops.counting_sort import kernel as counting_sort

try:  # SciPy's transposition, which is private; torch's sort takes five times as long
    from scipy.sparse._sparsetools import csr_tocsc
except ImportError:
    csr_tocsc = None

INT32_MAX = 2**31 - 1
DTYPES = {torch.int32: "int32", torch.int64: "int64"}  # of the keys of counting sorts


def transpose(
    rowptr: Tensor, col: Tensor, n: int, places: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row pointers, columns and positions of the elements of the transposed (n, m) matrix.

    rowptr, col : (m + 1,) and (nnz,), of one type on a CPU
    places : (nnz,) int64 positions of the elements in another order, which the result then refers
        to; by default positions are those in `col`
    """
    m, narrow = len(rowptr) - 1, max(len(col), len(rowptr), n) < INT32_MAX
    if csr_tocsc is not None and col.is_cpu:
        dtype = np.int32 if narrow else np.int64
        order = np.arange(len(col)) if places is None else places.numpy()
        read = [x.astype(dtype, copy=False) for x in (rowptr.numpy(), col.numpy(), order)]
        results = [np.empty(n + 1, dtype), np.empty_like(read[1]), np.empty_like(read[2])]
        csr_tocsc(m, n, *read, *results)
        starts, rows, order = map(torch.from_numpy, results)
        return starts, rows, order.long()
    rows = torch.repeat_interleave(rowptr[1:] - rowptr[:-1])
    order = torch.argsort(col, stable=True)
    starts, cols = _narrowed(narrow, _starts(col, n), rows[order])
    return starts, cols, order if places is None else places[order]


def compress(edges: Tensor, m: int, n: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Compress (2, nnz) edges, columns first, to rows; return None if one is out of range.

    Returns row pointers (m + 1,), columns (nnz,), both in int32 if it suffices, and the position
    of each element among the edges, None if they are sorted already. The order is stable.
    """
    col, row = edges.contiguous()
    rowptr, cols, order, (low, high, first, last, falls) = sorted_pairs(row, col, m, n)
    if len(row) and (low < 0 or high >= m or first < 0 or last >= n):
        return None
    return rowptr, cols, order if falls else None


def sorted_by(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The start of each key (size + 1,), and the elements' positions (int64) sorted by key.

    keys : (nnz,) from 0 to size - 1
    """
    starts, _, order, _ = sorted_pairs(keys, keys, size, size)
    return starts, torch.arange(len(keys), device=keys.device) if order is None else order


def sorted_pairs(
    keys: Tensor, others: Tensor, size: int, n: int
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """The start of each key, others and positions sorted by key, and statistics of both.

    The statistics are the least and the greatest key, the least and the greatest of the others, and
    whether keys ever decrease. The arrays are meaningless if keys or others are out of range.
    """
    narrow = max(len(keys), size, n) < INT32_MAX
    if keys.is_cpu and keys.dtype in DTYPES and len(keys):
        return _counted(keys.contiguous(), others.contiguous(), size, narrow)
    bounds = [0, -1, 0, -1, 0]
    if len(keys):
        ends = chain(keys.aminmax(), others.aminmax())
        bounds = [int(x) for x in (*ends, (keys[1:] < keys[:-1]).any())]
    if bounds[0] < 0 or bounds[1] >= size:
        return keys, others, keys, bounds
    order = torch.argsort(keys, stable=True) if bounds[4] else None
    moved = others if order is None else others[order]
    starts, moved = _narrowed(narrow, _starts(keys, size), moved)
    return starts, moved, order, bounds


def _counted(
    keys: Tensor, others: Tensor, size: int, narrow: bool
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """:func:`sorted_pairs` on the host, of at least one pair."""
    dtype = torch.int32 if narrow else torch.int64
    starts, moved = torch.empty(size + 1, dtype=dtype), torch.empty(len(keys), dtype=dtype)
    places, bounds = torch.empty(len(keys), dtype=torch.int64), torch.empty(5, dtype=torch.int64)
    kernel = counting_sort(DTYPES[keys.dtype], narrow)
    kernel.run_unchecked([keys, others, starts, moved, places, bounds])
    results: list[int] = bounds.tolist()
    return starts, moved, places if results[4] else None, results


def _narrowed(narrow: bool, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of arrays in int32 if it suffices, which halves the memory."""
    dtype = torch.int32 if narrow else torch.int64
    return first.to(dtype, copy=True), second.to(dtype, copy=True)


def _starts(rows: Tensor, m: int) -> Tensor:
    """(m + 1,) row pointers of elements with these rows."""
    counts = torch.bincount(rows, minlength=m)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
