"""Recipes of computed parameters for slices of rows of similar length, processed side by side.

Rows are of three kinds: those in slices of `lanes` rows, one element of every row at a time; long
ones, in vectors of `lanes` elements; and the remainder, fewer than `lanes` rows, that fill no
slice. See :mod:`sparsetir.sparse_ir.schedule.sell_slices`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.index_arrays import numbers_within, stable_order, starts
from sparsetir.sparse_ir.recipes.registry import NonzerosOf, RowsOf, SameAs, recipe


def order_in_windows(lengths: np.ndarray, number: np.ndarray, down: Any) -> np.ndarray:
    """(rows,) rows by window, then by length, then in their original order.

    lengths, number : (rows,) the length of each row, and its window
    down : true where longer rows come first
    """
    most = int(lengths.max(initial=0))
    return stable_order(number * (most + 1) + np.where(down, most - lengths, lengths))


# -- choice of rows ---------------------------------------------------------------------------


@recipe(values=RowsOf("indptr"), distinct=True)
def row_order(
    indptr: np.ndarray, lanes: int, longest: int, window: int, filled: int,
    taken: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """(m,) the rows, each once: those in slices, slice by slice, then long ones, then the others.

    Rows that are `taken` follow those in slices.

    indptr : (m + 1,) offsets of rows
    lanes : rows per slice
    longest : the least number of elements of a long row, at least `lanes`
    window : rows that are sorted by length together
    filled : long rows are in slices, too, if this many percent of the slots hold elements
    taken : the first rows of slices of diagonals, whose rows belong to none of these
    """
    if window < 1:
        raise ScheduleError(f"sell_slices: argument 'window': expected 1 or more, got {window}")
    lengths, short, long = _parted(indptr, lanes, longest, taken)
    number = short // window
    # Lengths increase in one window and decrease in the next, for slices that span both.
    order = order_in_windows(lengths[short], number, number % 2)
    left, rest = np.split(short[order], [len(short) % lanes])
    whole, even, others = _even(lengths, long, lanes, filled)
    others = np.sort(np.concatenate([whole[~even].ravel(), others]))
    return np.concatenate([rest, whole[even].ravel(), _taken(taken, lanes), others, left])


@recipe(steps="lanes")
def slice_count(
    indptr: np.ndarray, lanes: int, longest: int, filled: int, taken: np.ndarray | None = None
) -> int:
    """The number of slices; arguments as for :func:`row_order`."""
    lengths, short, long = _parted(indptr, lanes, longest, taken)
    return len(short) // lanes + int(_even(lengths, long, lanes, filled)[1].sum())


@recipe
def left_count(
    indptr: np.ndarray, lanes: int, longest: int, taken: np.ndarray | None = None
) -> int:
    """The number of rows that fill no slice."""
    return len(_parted(indptr, lanes, longest, taken)[1]) % lanes


@recipe
def long_count(
    indptr: np.ndarray, slices: int, lanes: int, left: int, taken: np.ndarray | None = None
) -> int:
    """The number of long rows, which are in no slice."""
    return len(indptr) - 1 - slices * lanes - left - len(_taken(taken, lanes))


@recipe(values=SameAs("order"), distinct="order")
def rows_of_slices(order: np.ndarray, slices: int, lanes: int) -> np.ndarray:
    """(slices * lanes,) the rows of the slices, given the order of :func:`row_order`."""
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
    """(rows,) the lengths of some rows."""
    return indptr[rows + 1] - indptr[rows]


# -- slices: one element of each row at a time ------------------------------------------------


@recipe
def slice_ptr(lengths: np.ndarray, lanes: int) -> np.ndarray:
    """(slices + 1,) the first step of each slice, which has as many as its longest row.

    lengths : (slices * lanes,) elements of each row
    """
    return starts(lengths.reshape(-1, lanes).max(axis=1, initial=0))


@recipe(values=NonzerosOf("indptr"))
def slice_slots(
    indptr: np.ndarray, rows: np.ndarray, lengths: np.ndarray, ptr: np.ndarray, lanes: int
) -> np.ndarray:
    """(steps, lanes) the position of the element in each slot; arbitrary past the end of a row.

    rows, lengths, ptr : from :func:`rows_of_slices`, :func:`lengths_of_rows`, :func:`slice_ptr`
    """
    step = numbers_within(ptr)[:, None]
    slices = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    first = indptr[rows].reshape(-1, lanes)[slices]
    return np.where(step < lengths.reshape(-1, lanes)[slices], first + step, 0)


# -- long rows, in vectors --------------------------------------------------------------------


@recipe
def vector_ptr(indptr: np.ndarray, rows: np.ndarray, lanes: int) -> np.ndarray:
    """(rows + 1,) the first vector of each row, which has as many as it needs."""
    return starts(-(-lengths_of_rows(indptr, rows) // lanes))


@recipe(values=NonzerosOf("indptr"))
def row_starts(indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(rows,) the first position of some rows, none of them empty."""
    return indptr[rows]


@recipe(values=NonzerosOf("indptr", run="lanes"))
def last_vectors(indptr: np.ndarray, rows: np.ndarray, lanes: int) -> np.ndarray:
    """(rows,) the start of the last vector of some rows, which ends with the row.

    rows : rows of at least `lanes` elements
    """
    return indptr[rows + 1] - lanes


# -- rows as stored ---------------------------------------------------------------------------


@recipe(values=RowsOf("indptr"), distinct=True)
def rows_by_length(indptr: np.ndarray, window: int) -> np.ndarray:
    """(m,) the rows sorted by length within windows, alternately increasing and decreasing."""
    number = np.arange(len(indptr) - 1) // window
    return order_in_windows(np.diff(indptr), number, number % 2)


@recipe
def offsets_of_rows(indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(rows + 1,) offsets of some rows, stored one after the other."""
    return starts(lengths_of_rows(indptr, rows))


@recipe(values=NonzerosOf("indptr"))
def positions_of_rows(indptr: np.ndarray, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The positions of the elements of some rows; `offsets` from :func:`offsets_of_rows`."""
    return np.repeat(indptr[rows], np.diff(offsets)) + numbers_within(offsets)


def _taken(first: np.ndarray | None, lanes: int) -> np.ndarray:
    """The rows of slices of diagonals, given their first ones."""
    return np.zeros(0, np.int64) if first is None else np.add.outer(first, np.arange(lanes)).ravel()


def _parted(
    indptr: np.ndarray, lanes: int, longest: int, taken: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths of rows, the rows shorter than `longest`, and the others, without those taken."""
    if longest < lanes:
        raise ScheduleError(
            f"sell_slices: argument 'longest': expected {lanes} or more, got {longest}"
        )
    lengths = np.diff(indptr)
    free = np.ones(len(lengths), bool)
    free[_taken(taken, lanes)] = False
    short, long = (np.flatnonzero(free & x) for x in (lengths < longest, lengths >= longest))
    return lengths, short, long


def _even(
    lengths: np.ndarray, long: np.ndarray, lanes: int, filled: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slices, lanes) rows by length; whether each slice is filled; and the remaining rows."""
    order = long[np.argsort(lengths[long], kind="stable")]
    whole, over = np.split(order, [len(order) // lanes * lanes])
    whole = whole.reshape(-1, lanes)
    slots = lanes * lengths[whole].max(axis=1, initial=0)
    return whole, 100 * lengths[whole].sum(axis=1) >= filled * slots, over
