"""Recipes of computed parameters for panels of rows, whose columns are grouped by pattern.

A panel is some rows one after the other; its entries are the columns that store something in it.
The pattern of an entry says which rows of the panel that is: bit r of a number from 1 on for row r.
See :mod:`sparsetir.sparse_ir.schedule.patterns`.
"""

from __future__ import annotations

import numpy as np

from sparsetir.sparse_ir.computed import recipe

__all__ = [
    "entry_ptr",
    "first_elements",
    "panel_count",
    "pattern_order",
    "value_ptr",
]

# Places of a table of all columns of all panels, for each element, up to which one is made.
TABLE = 32


@recipe
def panel_count(m: int, rows: int) -> int:
    """How many panels m rows are, the last maybe of fewer rows."""
    return -(-m // rows)


@recipe
def pattern_order(indptr: np.ndarray, indices: np.ndarray, n: int, rows: int) -> np.ndarray:
    """(nnz,) the elements by panel, pattern, column and row.

    indptr, indices : (m + 1,) and (nnz,), CSR with the columns of a row in order
    n : columns
    rows : of a panel, at most 8

    Linear in the elements; in the sorting of panels of few elements nearly so.
    """
    nnz, m = len(indices), len(indptr) - 1
    index = np.int32 if max(nnz, m * max(1, n)) < 2**31 else np.int64
    lengths = np.diff(indptr)
    number = np.arange(m, dtype=index)
    # Of each element its (panel, column) as one number, and which row of the panel it is in.
    key = np.repeat(number // rows * index(max(1, n)), lengths)
    key += indices.astype(index, copy=False)
    row = np.repeat((number % rows).astype(np.uint8), lengths)
    panels = -(-m // rows)
    if panels * n <= TABLE * nnz:
        place, size = key, panels * n
    else:
        _, place = np.unique(key, return_inverse=True)
        place, size = place.astype(index, copy=False), nnz
    mask = np.zeros(size, np.uint8)
    for r in range(rows):  # each (panel, column) once
        mask[place[row == r]] |= np.uint8(1 << r)
    held = np.flatnonzero(mask).astype(index, copy=False)
    pattern = mask[held]
    panel = held // index(n) if size == panels * n else _panels_of(held, place, key, n, index)
    order = np.argsort(pattern, kind="stable")
    order = order[_stable(panel[order], panels)]
    count = np.bitwise_count(pattern[order])
    start = np.zeros(size, index)
    start[held[order]] = np.cumsum(count, dtype=index) - count
    below = np.bitwise_count(mask[place] & ((np.uint8(1) << row) - np.uint8(1)))
    out = np.empty(nnz, indptr.dtype)
    out[start[place] + below] = np.arange(nnz, dtype=indptr.dtype)
    return out


def _panels_of(
    held: np.ndarray, place: np.ndarray, key: np.ndarray, n: int, index: type
) -> np.ndarray:
    """The panel of each place that is held."""
    panel = np.zeros(int(held[-1]) + 1 if len(held) else 0, index)
    panel[place] = key // index(n)
    return panel[held]


def _stable(key: np.ndarray, length: int) -> np.ndarray:
    """A stable order of numbers below a length; NumPy's is linear for 16 bits."""
    return np.argsort(key.astype(np.uint16) if length <= 1 << 16 else key, kind="stable")


@recipe
def first_elements(
    indptr: np.ndarray, indices: np.ndarray, order: np.ndarray, rows: int
) -> np.ndarray:
    """(entries,) the first element of each entry of a panel.

    order : of :func:`pattern_order`
    """
    return order[_begins(indptr, indices, order, rows)[0]]


@recipe
def entry_ptr(indptr: np.ndarray, indices: np.ndarray, order: np.ndarray, rows: int) -> np.ndarray:
    """(panels * patterns + 1,) where the entries of each pattern of a panel begin.

    order : of :func:`pattern_order`
    """
    patterns = (1 << rows) - 1
    panels = -(-(len(indptr) - 1) // rows)
    begins, row = _begins(indptr, indices, order, rows)
    bits = np.left_shift(np.uint8(1), (row % rows).astype(np.uint8))
    mask = np.bitwise_or.reduceat(bits, begins) if len(begins) else bits
    group = row[begins] // rows * patterns + mask.astype(row.dtype) - 1
    return _starts(np.bincount(group, minlength=panels * patterns))


@recipe
def value_ptr(ptr: np.ndarray, rows: int) -> np.ndarray:
    """(panels * patterns,) where the values of each pattern of a panel begin.

    ptr : of :func:`entry_ptr`
    """
    counts = np.diff(ptr).reshape(-1, (1 << rows) - 1)
    each = np.bitwise_count(np.arange(1, 1 << rows))
    return _starts((counts * each).ravel())[:-1]


def _begins(
    indptr: np.ndarray, indices: np.ndarray, order: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where entries begin among the elements in order, and the row of each element in order."""
    lengths = np.diff(indptr)
    row = np.repeat(np.arange(len(lengths), dtype=indptr.dtype), lengths)[order]
    column, panel = indices[order], row // rows
    first = np.ones(len(order), bool)
    first[1:] = (column[1:] != column[:-1]) | (panel[1:] != panel[:-1])
    return np.flatnonzero(first), row


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype="int64")])
