"""Recipes of computed parameters for rows of about the same length, side by side in slices.

Rows are parted in three: those of slices, `lanes` to each, one element of every row at a time; long
ones, gone through in vectors of `lanes` elements; and what fills no slice, fewer than `lanes` rows.
See :mod:`sparsetir.sparse_ir.schedule.sell_slices`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.index_arrays import numbers_within, stable_order, starts
from sparsetir.sparse_ir.recipes.registry import NonzerosOf, RowsOf, SameAs, recipe


def order_in_windows(lengths: np.ndarray, number: np.ndarray, down: Any) -> np.ndarray:
    """(rows,) rows by window, then by length, then as they are.

    lengths, number : (rows,) elements of a row, and its window
    down : where this is true, those of more elements come first
    """
    most = int(lengths.max(initial=0))
    return stable_order(number * (most + 1) + np.where(down, most - lengths, lengths))


# -- which rows -------------------------------------------------------------------------------


@recipe(values=RowsOf("indptr"), distinct=True)
def row_order(indptr: np.ndarray, lanes: int, longest: int, window: int, filled: int) -> np.ndarray:
    """(m,) the rows, each once: those of slices, slice by slice, then long ones, then the others.

    indptr : (m + 1,) where rows begin
    lanes : rows of a slice
    longest : elements from which on a row is a long one, at least `lanes`
    window : rows that are sorted by length together
    filled : long rows are in slices too where elements are in this many percent of the slots
    """
    if window < 1:
        raise ScheduleError(f"sell_slices: argument 'window': expected 1 or more, got {window}")
    lengths, short, long = _parted(indptr, lanes, longest)
    number = short // window
    # Lengths go up in one window and down in the next, for slices that reach over both.
    order = order_in_windows(lengths[short], number, number % 2)
    left, rest = np.split(short[order], [len(short) % lanes])
    whole, even, others = _even(lengths, long, lanes, filled)
    others = np.sort(np.concatenate([whole[~even].ravel(), others]))
    return np.concatenate([rest, whole[even].ravel(), others, left])


@recipe(steps="lanes")
def slice_count(indptr: np.ndarray, lanes: int, longest: int, filled: int) -> int:
    """The number of slices; arguments as of :func:`row_order`."""
    lengths, short, long = _parted(indptr, lanes, longest)
    return len(short) // lanes + int(_even(lengths, long, lanes, filled)[1].sum())


@recipe
def left_count(indptr: np.ndarray, lanes: int, longest: int) -> int:
    """The number of rows that fill no slice."""
    return len(_parted(indptr, lanes, longest)[1]) % lanes


@recipe
def long_count(indptr: np.ndarray, slices: int, lanes: int, left: int) -> int:
    """The number of long rows, which are in no slice."""
    return len(indptr) - 1 - slices * lanes - left


@recipe(values=SameAs("order"), distinct="order")
def rows_of_slices(order: np.ndarray, slices: int, lanes: int) -> np.ndarray:
    """(slices * lanes,) the rows of the slices, of those in the order of :func:`row_order`."""
    return order[: slices * lanes]


@recipe(values=SameAs("order"), distinct="order")
def long_rows(order: np.ndarray, left: int, longs: int) -> np.ndarray:
    """(longs,) the long rows, increasing."""
    return order[len(order) - left - longs : len(order) - left]


@recipe(values=SameAs("order"), distinct="order")
def left_rows(order: np.ndarray, left: int) -> np.ndarray:
    """(left,) the rows that fill no slice."""
    return order[len(order) - left :]


@recipe
def lengths_of_rows(indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(rows,) how many elements some rows have."""
    return indptr[rows + 1] - indptr[rows]


# -- slices: one element of each row at a time ------------------------------------------------


@recipe
def slice_ptr(lengths: np.ndarray, lanes: int) -> np.ndarray:
    """(slices + 1,) the first step of each slice, which has as many as its longest row elements.

    lengths : (slices * lanes,) elements of each row
    """
    return starts(lengths.reshape(-1, lanes).max(axis=1, initial=0))


@recipe(values=NonzerosOf("indptr"))
def slice_slots(
    indptr: np.ndarray, rows: np.ndarray, lengths: np.ndarray, ptr: np.ndarray, lanes: int
) -> np.ndarray:
    """(steps, lanes) the position of each element in a slot; any where a row has ended.

    rows, lengths, ptr : as :func:`rows_of_slices`, :func:`lengths_of_rows`, :func:`slice_ptr`
    """
    step = numbers_within(ptr)[:, None]
    slices = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    first = indptr[rows].reshape(-1, lanes)[slices]
    return np.where(step < lengths.reshape(-1, lanes)[slices], first + step, 0)


# -- long rows: vectors of their elements -----------------------------------------------------


@recipe
def vector_ptr(indptr: np.ndarray, rows: np.ndarray, lanes: int) -> np.ndarray:
    """(rows + 1,) the first vector of each row, of as many as it takes."""
    return starts(-(-lengths_of_rows(indptr, rows) // lanes))


@recipe(values=NonzerosOf("indptr"))
def row_starts(indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(rows,) the position of the first element of some rows, which have elements."""
    return indptr[rows]


@recipe(values=NonzerosOf("indptr", run="lanes"))
def last_vectors(indptr: np.ndarray, rows: np.ndarray, lanes: int) -> np.ndarray:
    """(rows,) where the last vector of some rows begins, which ends with the row.

    rows : of `lanes` elements or more
    """
    return indptr[rows + 1] - lanes


# -- rows as they are -------------------------------------------------------------------------


@recipe(values=RowsOf("indptr"), distinct=True)
def rows_by_length(indptr: np.ndarray, window: int) -> np.ndarray:
    """(m,) the rows sorted by length within windows, up in one and down in the next."""
    number = np.arange(len(indptr) - 1) // window
    return order_in_windows(np.diff(indptr), number, number % 2)


@recipe
def offsets_of_rows(indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(rows + 1,) where some rows begin if they lie one after the other."""
    return starts(lengths_of_rows(indptr, rows))


@recipe(values=NonzerosOf("indptr"))
def positions_of_rows(indptr: np.ndarray, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The positions of the elements of some rows; `offsets` as of :func:`offsets_of_rows`."""
    return np.repeat(indptr[rows], np.diff(offsets)) + numbers_within(offsets)


def _parted(
    indptr: np.ndarray, lanes: int, longest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths of rows, the rows of fewer elements than `longest`, and the others."""
    if longest < lanes:
        raise ScheduleError(
            f"sell_slices: argument 'longest': expected {lanes} or more, got {longest}"
        )
    lengths = np.diff(indptr)
    return lengths, np.flatnonzero(lengths < longest), np.flatnonzero(lengths >= longest)


def _even(
    lengths: np.ndarray, long: np.ndarray, lanes: int, filled: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slices, lanes) rows by length, which of them are about as long; and rows that are over."""
    order = long[np.argsort(lengths[long], kind="stable")]
    whole, over = np.split(order, [len(order) // lanes * lanes])
    whole = whole.reshape(-1, lanes)
    slots = lanes * lengths[whole].max(axis=1, initial=0)
    return whole, 100 * lengths[whole].sum(axis=1) >= filled * slots, over
