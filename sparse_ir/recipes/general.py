"""Recipes for schedules of any kind: open numbers, parts, orders, rows of positions."""

from __future__ import annotations

import numpy as np

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.index_arrays import row_numbers, starts
from sparsetir.sparse_ir.recipes.registry import FoundIn, NonzerosOf, RowsOf, SameAs, recipe

# The least number of multiplications of a row in a column part for which parts pay off.
WORK_IN_PART = 1000
# The least nonzeros of a row in a column part: each part loads the row's own operand again.
NONZEROS_IN_PART = 4


@recipe(open=True)
def number(value: int) -> int:
    """A count that callers may choose, and its default, such as 16 blocks."""
    return value


@recipe
def constant(value: int) -> int:
    """A number hidden from LLVM, which callers may not change."""
    return value


@recipe(open=True)
def cache_parts(
    m: int, n: int, nnz: int, feat: int, itemsize: int, cache: int, shared: int = 0
) -> int:
    """The number of column parts for which a cache holds a part's rows of a gathered operand.

    m, n, nnz : sizes of the matrix
    feat, itemsize : elements of a gathered row, and bytes per element
    cache, shared : bytes of a core's own cache, and of one shared by all cores; 0 for none

    The first cache for which rows have enough work in each part is chosen (see `WORK_IN_PART`,
    `NONZEROS_IN_PART`): with fewer elements, starting a row again costs what cached operands save.
    One part if neither cache qualifies.
    """
    for size in filter(None, (cache, shared)):
        parts = max(1, -(-n * feat * itemsize // size))
        if nnz >= parts * m * max(WORK_IN_PART / max(1, feat), NONZEROS_IN_PART):
            return parts
    return 1


@recipe
def equal_work(indptr: np.ndarray, parts: int, cost: int, ahead: int = 0) -> np.ndarray:
    """(parts + 1,) first rows of blocks of about equal work.

    indptr : (m + 1,) offsets of rows
    cost : the cost of starting and writing a row, in nonzeros
    ahead : extra work of the first block, as far as there is any: it is done while the threads of
        the others wake

    The result starts at 0, is non-decreasing and ends at m; with more parts than rows some are
    empty.
    """
    _at_least_one("equal_work", parts)
    m = len(indptr) - 1
    work = indptr.astype("int64") + cost * np.arange(m + 1)
    ahead = min(ahead, work[-1])
    inner = np.searchsorted(work, ahead + (work[-1] - ahead) * np.arange(1, parts) // parts)
    return np.concatenate([[0], inner, [m]]).astype(indptr.dtype)


@recipe
def equal_parts(length: int, parts: int) -> np.ndarray:
    """(parts + 1,) int64, cuts of 0 .. length into parts whose sizes differ by at most one."""
    _at_least_one("equal_parts", parts)
    return length * np.arange(parts + 1, dtype="int64") // parts


@recipe(values=RowsOf("indptr"), found_in=FoundIn("indptr", by_search=True))
def row_of_position(indptr: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """(nnz,) the row of each nonzero.

    order : (nnz,) the order of the nonzeros; storage order by default
    """
    rows = row_numbers(indptr, indptr.dtype)
    return rows if order is None else rows.take(order)


@recipe(values=SameAs("values"), found_in=FoundIn("values", by_search=False))
def in_order(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(nnz,) values[order]: an array over the nonzeros, in another order."""
    return values.take(order)


@recipe(of_values=True)
def packed(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """values[order]: values in the order in which they are read, in the shape of `order`.

    Raises ScheduleError for entries of `order` that are not positions.
    """
    if order.size and not 0 <= order.min() <= order.max() < len(values):
        raise ScheduleError(
            f"packed: argument 'order': expected positions below {len(values)}, got "
            f"{order.min()} to {order.max()}"
        )
    return values.take(order)


@recipe(values=NonzerosOf(indices="indices"), distinct=True)
def order_by_column_parts(indices: np.ndarray, n: int, parts: int) -> np.ndarray:
    """(nnz,) the nonzeros of the first part of the columns, then those of the second, ...

    indices : (nnz,) columns, 0 .. n - 1, in any order
    parts : the number of column parts, as in :func:`column_parts`

    Nonzeros of one part keep their order. Each occurs once.
    """
    _at_least_one("order_by_column_parts", parts)
    if parts == 1:  # a sort takes longer than a product with few nonzeros
        return np.arange(len(indices), dtype=indices.dtype)
    width = max(1, -(-n // parts))
    return np.argsort(indices // width, kind="stable")


@recipe
def column_parts(indptr: np.ndarray, indices: np.ndarray, n: int, parts: int) -> np.ndarray:
    """(m * parts + 1,) the start of each column part of each row.

    indices : (nnz,) columns, 0 .. n - 1, in order within each row
    parts : the number of column parts; each is ceil(n / parts) wide, the last may be narrower

    Raises ScheduleError for more parts of rows than the type of `indptr` can count.
    """
    _at_least_one("column_parts", parts)
    m, largest = len(indptr) - 1, np.iinfo(indptr.dtype).max
    if m * parts > largest:
        raise ScheduleError(
            f"column_parts: argument 'parts': expected parts * rows to be at most {largest} with "
            f"indices of {indptr.dtype}, got {parts} * {m}"
        )
    width = max(1, -(-n // parts))
    place = row_of_position(indptr) * parts + indices // width
    return starts(np.bincount(place, minlength=m * parts), indptr.dtype)


@recipe(counted=True)
def part_numbers(rows: int, parts: int) -> np.ndarray:
    """(rows * parts,) int64, 0 .. parts - 1 for each row."""
    _at_least_one("part_numbers", parts)
    return np.tile(np.arange(parts, dtype="int64"), rows)


@recipe(finite=True)
def inverse_counts(indptr: np.ndarray) -> np.ndarray:
    """(m,) float64, 1 / max(length of the row, 1): turns sums into means."""
    return 1.0 / np.maximum(np.diff(indptr), 1)


@recipe
def least_of_rows(indptr: np.ndarray) -> np.ndarray:
    """(m,) float64, the initial value of each row's maximum: -inf, or 0 if the row is empty."""
    return np.where(np.diff(indptr) > 0, -np.inf, 0.0)


@recipe
def greatest_of_rows(indptr: np.ndarray) -> np.ndarray:
    """(m,) float64, the initial value of each row's minimum: inf, or 0 if the row is empty."""
    return np.where(np.diff(indptr) > 0, np.inf, 0.0)


@recipe
def shared_rows(length: int, **rows: np.ndarray) -> np.ndarray:
    """(length,) int8, 1 for rows that do not occur exactly once in all of these arrays together.

    rows : (pieces,) the row of each piece; negative for none
    """
    counts = np.zeros(length, "int64")
    for places in rows.values():
        counts += np.bincount(places[places >= 0], minlength=length)
    return (counts != 1).astype("int8")


def _at_least_one(caller: str, parts: int) -> None:
    if parts < 1:
        raise ScheduleError(f"{caller}: argument 'parts': expected 1 or more, got {parts}")
