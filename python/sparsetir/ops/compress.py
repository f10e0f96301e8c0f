"""Stable sorts of elements by rows or columns."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:  # SciPy's counting sorts, which are private; torch's sort takes five times as long
    from scipy.sparse._sparsetools import coo_tocsr, csr_tocsc
except ImportError:
    coo_tocsr = csr_tocsc = None

INT32_MAX = 2**31 - 1


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
        given = None if places is None else places.numpy()
        arrays, results = _arrays(n, narrow, rowptr.numpy(), col.numpy(), given)
        csr_tocsc(m, n, *arrays, *results)
        return _tensors(results)
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
    counts = coo_tocsr if keys.is_cpu else None
    a, b = (keys.numpy(), others.numpy()) if counts is not None else (keys, others)
    bounds, narrow = [0, -1, 0, -1, 0], max(len(a), size, n) < INT32_MAX
    if len(a):
        ends = (x.aminmax() if isinstance(x, Tensor) else (x.min(), x.max()) for x in (a, b))
        bounds = [int(x) for x in (*chain(*ends), (a[1:] < a[:-1]).any())]
    if bounds[0] < 0 or bounds[1] >= size:
        return keys, others, keys, bounds
    if counts is not None and bounds[4]:
        arrays, results = _arrays(size, narrow, a, b)
        counts(size, n, len(a), *arrays, *results)
        return *_tensors(results), bounds
    order = torch.argsort(keys, stable=True) if bounds[4] else None
    moved = others if order is None else others[order]
    starts, moved = _narrowed(narrow, _starts(keys, size), moved)
    return starts, moved, order, bounds


def _arrays(
    size: int, narrow: bool, first: Any, others: Any, places: Any = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The arrays that a counting sort reads, in one type, and those that it writes: the start of
    each of `size` keys, others and positions."""
    dtype = np.int32 if narrow else np.int64
    places = np.arange(len(others), dtype=dtype) if places is None else places
    read = [first.astype(dtype, copy=False), others.astype(dtype, copy=False), places]
    return read, [np.empty(size + 1, dtype), np.empty_like(read[1]), np.empty_like(places)]


def _tensors(results: list[np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a counting sort, with positions in int64."""
    starts, others, places = map(torch.from_numpy, results)
    return starts, others, places.long()


def _narrowed(narrow: bool, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of arrays in int32 if it suffices, which halves the memory."""
    dtype = torch.int32 if narrow else torch.int64
    return first.to(dtype, copy=True), second.to(dtype, copy=True)


def _starts(rows: Tensor, m: int) -> Tensor:
    """(m + 1,) row pointers of elements with these rows."""
    counts = torch.bincount(rows, minlength=m)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
