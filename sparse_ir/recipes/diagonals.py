"""Recipes of computed parameters for slices of consecutive rows whose nonzeros lie on diagonals.

A slice is `lanes` consecutive rows, from a multiple of `lanes` on. Its diagonals are those with a
nonzero in any of its rows: columns `first`, `first + 1`, ..., one in each row, all of them columns
of the matrix. See :mod:`sparsetir.sparse_ir.schedule.sell_slices`.
"""

from __future__ import annotations

import itertools

import numpy as np

from sparsetir.sparse_ir.index_arrays import distinct, rows_increase
from sparsetir.sparse_ir.recipes.registry import LengthOf, NonzerosOf, RowsOf, recipe

# Nonzeros that are processed at a time.
CHUNK = 1 << 18


@recipe
def slice_diagonals(
    indptr: np.ndarray, indices: np.ndarray, n: int, lanes: int, dense: int
) -> np.ndarray:
    """(diagonals, lanes) the position of each row's nonzero, or -1; by slice, then by column.

    indptr, indices : (m + 1,) and (nnz,), CSR; no diagonals unless the columns of rows are in order
    n : columns
    dense : the least percentage of nonzeros on the diagonals of a slice

    Linear in the nonzeros, but for the logarithm of `lanes`.
    """
    ends = indptr[::lanes]  # of slices; chunks of these have temporary arrays that caches hold
    chunks = np.append(np.searchsorted(ends, np.arange(0, ends[-1], CHUNK)), len(ends) - 1) * lanes
    if n < lanes or not rows_increase(indptr, indices):
        chunks = chunks[:1]
    parts = [
        _diagonals(indptr[begin : end + 1], indices, n, lanes, dense)
        for begin, end in itertools.pairwise(chunks)
    ]
    return np.concatenate([np.zeros((0, lanes), indptr.dtype), *parts])


def _diagonals(
    indptr: np.ndarray, indices: np.ndarray, n: int, lanes: int, dense: int
) -> np.ndarray:
    """:func:`slice_diagonals` of some slices of all rows."""
    width, lengths, row = n + lanes, np.diff(indptr), np.arange(len(indptr) - 1)
    # slice * width + column of the diagonal in a row before the first one
    key = np.repeat(row // lanes * width + lanes - row % lanes, lengths)
    key += indices[indptr[0] : indptr[-1]]
    order = np.argsort(key, kind="stable")  # merges the rows of each slice
    key = key[order]
    begins = np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])
    sizes = np.diff(np.append(begins, len(key)))
    number, first = np.divmod(key[begins], width)
    counts = np.bincount(number, minlength=len(row) // lanes)
    outside = np.bincount(number[(first < lanes) | (first > n)], minlength=len(counts))
    elements = lengths.reshape(-1, lanes).sum(axis=1)
    fits = ((outside == 0) & (100 * elements >= dense * lanes * counts))[number]
    out = np.full((np.count_nonzero(fits), lanes), -1, indptr.dtype)
    held = order[np.repeat(fits, sizes)]
    lane = np.repeat(row % lanes, lengths)[held]
    out[np.repeat(np.arange(len(out)), sizes[fits]), lane] = held + indptr[0]
    return out


@recipe(values=RowsOf("indptr", run="lanes"), distinct=True, multiples="lanes")
def first_rows(diagonals: np.ndarray, indptr: np.ndarray, lanes: int) -> np.ndarray:
    """(slices,) the first row of each slice with these diagonals, a multiple of `lanes`."""
    return distinct(_rows(diagonals, indptr) // lanes) * lanes


@recipe
def diagonal_slice_count(rows: np.ndarray) -> int:
    """The number of slices; rows : the result of :func:`first_rows`."""
    return len(rows)


@recipe
def diagonal_ptr(
    diagonals: np.ndarray, indptr: np.ndarray, rows: np.ndarray, lanes: int
) -> np.ndarray:
    """(slices + 1,) the first diagonal of each slice; rows : the result of :func:`first_rows`."""
    numbers = np.append(rows // lanes, len(indptr))
    return np.searchsorted(_rows(diagonals, indptr) // lanes, numbers)


@recipe(values=LengthOf("n", run="lanes"))
def first_columns(
    diagonals: np.ndarray, indptr: np.ndarray, indices: np.ndarray, n: int, lanes: int
) -> np.ndarray:
    """(diagonals,) the column of each diagonal in the first row of its slice."""
    return indices[diagonals.max(axis=1)] - _rows(diagonals, indptr) % lanes


@recipe(values=NonzerosOf("indptr"))
def diagonal_slots(indptr: np.ndarray, diagonals: np.ndarray) -> np.ndarray:
    """(diagonals, lanes) the position of each row's nonzero; 0 where there is none."""
    return np.maximum(diagonals, 0)


@recipe
def diagonal_masks(diagonals: np.ndarray) -> np.ndarray:
    """(diagonals,) int32, bit l is set where row l of the slice, of at most 32, has a nonzero."""
    bits = np.uint32(1) << np.arange(diagonals.shape[1], dtype=np.uint32)
    return ((diagonals >= 0) @ bits).view(np.int32)


def _rows(diagonals: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """The last row with a nonzero on each diagonal."""
    return np.searchsorted(indptr, diagonals.max(axis=1), "right") - 1
