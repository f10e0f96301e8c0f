"""Recipes of computed parameters for panels of rows whose columns are grouped by pattern.

A panel is a number of consecutive rows; its entries are the columns with a nonzero in any of them.
The pattern of an entry is the set of these rows, a number from 1 on with bit r set for row r.
Patterns are ordered by this number, or with by="count" those of fewer rows first. Groups are pairs
of panel and pattern, numbered in order. See
:mod:`sparsetir.sparse_ir.schedule.group_columns_by_pattern`.
"""

from __future__ import annotations

import numpy as np

from sparsetir.sparse_ir.index_arrays import index_type, row_numbers, stable_order, starts
from sparsetir.sparse_ir.recipes.registry import Below, LengthOf, NonzerosOf, recipe

# The largest number of matrix places per element for which a table of all places is made.
TABLE = 24


@recipe(steps="rows")
def panel_count(m: int, rows: int) -> int:
    """The number of panels for m rows; the last panel may have fewer rows."""
    return -(-m // rows)


@recipe
def pattern_counts(rows: int) -> np.ndarray:
    """(patterns,) the number of rows of each pattern, ordered by count."""
    return np.bitwise_count(_masks(rows, "count")).astype(np.int64)


@recipe(values=Below("rows"))
def pattern_rows(rows: int) -> np.ndarray:
    """(patterns, rows) the rows of each pattern, then the others, ordered by count."""
    masks = _masks(rows, "count")[:, None]
    return np.argsort(masks >> np.arange(rows) & 1 ^ 1, axis=1, kind="stable")


@recipe
def pattern_entries(
    indptr: np.ndarray, indices: np.ndarray, n: int, rows: int, by: str = "pattern"
) -> np.ndarray:
    """(entries,) int64, group * n + column of each entry, increasing.

    indptr, indices : (m + 1,) and (nnz,), CSR with the columns of a row in order
    n : columns
    rows : rows per panel, at most 8
    by : the order of patterns, "pattern" or "count"

    Linear in the elements unless these are few in a large matrix; then they are sorted.
    """
    m, nnz, patterns = len(indptr) - 1, len(indices), (1 << rows) - 1
    place = _places_of_patterns(rows, by)
    if not _fits_a_table(m, n, nnz):
        bits = np.uint8(1) << (row_numbers(indptr) % rows).astype(np.uint8)
        held, number = np.unique(_places(indptr, indices, n, rows), return_inverse=True)
        mask = np.zeros(len(held), np.uint8)
        np.bitwise_or.at(mask, number, bits)
        held = held.astype(np.int64)  # panels times patterns times columns may exceed panels * n
        return np.sort((held // n * patterns + place[mask]) * n + held % n)
    stored = _table(indptr, indices, n, rows)
    masks = stored[:, 0].copy()
    for r in range(1, rows):
        masks |= stored[:, r] << np.uint8(r)
    index = index_type(masks.size * patterns)
    some = masks != 0  # a bool array, which is counted and searched several times as fast
    held = np.flatnonzero(some)
    panel = np.repeat(np.arange(len(masks), dtype=index), np.count_nonzero(some, axis=1))
    group = panel * index(patterns) + place[masks[some]]
    held = held.astype(index)
    # From (panel, column) as one number to (group, column) as one number.
    held += (group - panel) * index(n)
    return held[stable_order(group)]


@recipe
def entry_ptr(entries: np.ndarray, n: int, panels: int, rows: int) -> np.ndarray:
    """(panels * patterns + 1,) the first entry of each pattern of a panel.

    entries : the result of :func:`pattern_entries`
    """
    groups = panels * ((1 << rows) - 1)
    return np.searchsorted(entries, np.arange(groups + 1) * n)


@recipe(values=LengthOf("n"))
def entry_columns(entries: np.ndarray, n: int) -> np.ndarray:
    """(entries,) the column of each entry."""
    return _small(entries) % n if len(entries) else entries


@recipe
def value_ptr(ptr: np.ndarray, rows: int, by: str = "pattern") -> np.ndarray:
    """(panels * patterns,) the first value of each pattern of a panel.

    ptr : the result of :func:`entry_ptr`
    by : see :func:`pattern_entries`
    """
    counts = np.diff(ptr).reshape(-1, (1 << rows) - 1)
    each = np.bitwise_count(_masks(rows, by))
    return starts((counts * each).ravel())[:-1]


@recipe(values=NonzerosOf(indices="indices"), distinct=True)
def pattern_order(
    indptr: np.ndarray, indices: np.ndarray, entries: np.ndarray, ptr: np.ndarray, n: int,
    rows: int, by: str = "pattern",
) -> np.ndarray:  # fmt: skip
    """(nnz,) the elements ordered by panel, pattern, column and row.

    indptr, indices, n, rows, by : the arguments of :func:`pattern_entries`
    entries, ptr : the results of that and of :func:`entry_ptr`
    """
    m, nnz, patterns = len(indptr) - 1, len(indices), (1 << rows) - 1
    entries, index = _small(entries), index_type(max(nnz, m * n * patterns))
    counts, groups = np.diff(ptr), np.arange(len(ptr) - 1, dtype=index)
    mask = np.repeat(np.resize(_masks(rows, by).astype(np.uint8), len(groups)), counts)
    # The column of each entry in the table of panels and columns, and the start of its values.
    place = entries - np.repeat((groups - groups // patterns) * index(n), counts)
    each = np.bitwise_count(mask)
    start = np.cumsum(each, dtype=index) - each
    at = _places(indptr, indices, n, rows)
    if _fits_a_table(m, n, nnz):
        masks, starts = (np.empty(panel_count(m, rows) * n, x.dtype) for x in (mask, start))
        masks[place], starts[place] = mask, start
    else:
        by_place = np.argsort(place)
        at = by_place[np.searchsorted(place, at, sorter=by_place)]
        masks, starts = mask, start
    lower = (1 << np.arange(m) % rows).astype(np.uint8) - np.uint8(1)  # the rows above each
    value = starts[at]
    value += np.bitwise_count(masks[at] & np.repeat(lower, np.diff(indptr)))
    out = np.full(nnz, -1, indptr.dtype)  # -1 is refused, if wrong `entries` omit an element
    out[value] = np.arange(nnz, dtype=indptr.dtype)
    return out


def _masks(rows: int, by: str) -> np.ndarray:
    """(patterns,) the number of each pattern, in order."""
    masks = np.arange(1, 1 << rows)
    return masks if by == "pattern" else masks[np.argsort(np.bitwise_count(masks), kind="stable")]


def _places_of_patterns(rows: int, by: str) -> np.ndarray:
    """(patterns + 1,) the rank of each pattern in the order, by its number."""
    out = np.zeros(1 << rows, np.int32)
    out[_masks(rows, by)] = np.arange((1 << rows) - 1)
    return out


def _small(entries: np.ndarray) -> np.ndarray:
    """Increasing numbers in a smaller type if it holds them: division is faster there."""
    return entries.astype(index_type(int(entries[-1]))) if len(entries) else entries


def _fits_a_table(m: int, n: int, nnz: int) -> bool:
    return m * n <= TABLE * nnz


def _table(indptr: np.ndarray, indices: np.ndarray, n: int, rows: int) -> np.ndarray:
    """(panels, rows, n) uint8, 1 where an element is stored."""
    m = len(indptr) - 1
    panels = panel_count(m, rows)
    out = np.zeros(panels * rows * n, np.uint8)
    index = index_type(len(out))
    at = np.repeat(np.arange(m, dtype=index) * index(n), np.diff(indptr))
    at += indices.astype(index, copy=False)
    out[at] = 1
    return out.reshape(panels, rows, n)


def _places(indptr: np.ndarray, indices: np.ndarray, n: int, rows: int) -> np.ndarray:
    """(nnz,) panel * n + column."""
    m = len(indptr) - 1
    index = index_type(m * n)
    at = np.repeat(np.arange(m, dtype=index) // index(rows) * index(n), np.diff(indptr))
    at += indices.astype(index, copy=False)
    return at
