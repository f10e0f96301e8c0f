"""Recipes of computed parameters for loops cut in position space.

Tiles are runs of the stored elements of each row: of a constant number of positions, or with
coordinates in one range. Pieces are a chunk's shares of rows, where chunks of nonzeros are cut
without regard to rows: equal work for each chunk, whatever the rows. (Senanayake's thesis,
chapters 5 and 6; the cut is that of merge path.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.index_arrays import row_numbers
from sparsetir.sparse_ir.recipes.registry import NonzerosOf, TilesOf, recipe


@recipe
def last_of(offsets: np.ndarray) -> int:
    """The last offset of an array: the number of elements that the offsets delimit."""
    return int(offsets[-1])


@recipe(steps="size")
def tile_count(length: int, size: int) -> int:
    """The number of tiles of `size`, at least one."""
    return max(1, -(-length // size))


@recipe(tiles=TilesOf("size"))
def tile_cuts(length: int, size: int) -> np.ndarray:
    """(tile_count + 1,) int64, cuts of 0 .. length at multiples of `size`."""
    return np.minimum(np.arange(tile_count(length, size) + 1, dtype="int64") * size, length)


@recipe
def equal_parts_of_rows(indptr: np.ndarray, parts: int) -> np.ndarray:
    """(m * parts + 1,) offsets of the parts of each row, whose sizes differ by at most one.

    Raises ScheduleError for more parts than the type of `indptr` can count.
    """
    m, largest = len(indptr) - 1, np.iinfo(indptr.dtype).max
    if not 0 < parts or m * parts > largest:
        raise ScheduleError(
            f"equal_parts_of_rows: argument 'parts': expected 1 or more, and parts * rows to be at "
            f"most {largest} with indices of {indptr.dtype}, got {parts} * {m}"
        )
    lengths = np.diff(indptr).astype("int64")
    inner = lengths[:, None] * np.arange(parts, dtype="int64") // parts
    starts = (indptr[:-1, None] + inner).ravel()
    return np.append(starts, indptr[-1]).astype(indptr.dtype)


# -- tiles of each row ------------------------------------------------------------------------


@recipe(tiles=TilesOf("size", unless="indices"))
def tile_starts(indptr: np.ndarray, size: int, indices: np.ndarray | None = None) -> np.ndarray:
    """(tiles + 1,) the first position of each tile of a row, and the end.

    indptr : (m + 1,) offsets of rows
    size : positions per tile, or coordinates in its range if `indices` are given
    indices : (nnz,) coordinates, non-decreasing within a row

    Tiles are not empty. Raises ScheduleError for coordinates out of order.
    """
    rows = row_numbers(indptr)
    if indices is None:
        begins = (np.arange(len(rows)) - indptr[:-1][rows]) % size == 0
    else:
        if np.any((indices[1:] < indices[:-1]) & (rows[1:] == rows[:-1])):
            raise ScheduleError(
                "tile_starts: argument 'indices': expected coordinates in order within each row"
            )
        tile = indices // size
        begins = np.ones(len(rows), bool)
        begins[1:] = (tile[1:] != tile[:-1]) | (rows[1:] != rows[:-1])
    return np.append(np.flatnonzero(begins), indptr[-1]).astype(indptr.dtype)


@recipe
def tile_ptr(
    indptr: np.ndarray, size: int, within: int = 0, indices: np.ndarray | None = None
) -> np.ndarray:
    """Offsets of each row's tiles, (m + 1,), or of those in each tile of size `within`."""
    starts = tile_starts(indptr, size, indices)[:-1]
    above = tile_starts(indptr, within, indices) if within else indptr
    return np.searchsorted(starts, above).astype(indptr.dtype)


@recipe
def tile_ids(indptr: np.ndarray, size: int, indices: np.ndarray, within: int = 0) -> np.ndarray:
    """(tiles,) the number of each tile's range, relative to its range of size `within`."""
    numbers = indices[tile_starts(indptr, size, indices)[:-1]] // size
    return numbers % (within // size) if within else numbers


@recipe(values=NonzerosOf("indptr"))
def row_lasts(indptr: np.ndarray) -> np.ndarray:
    """(m,) the last position of each row; for an empty row the position before it, or 0."""
    return np.maximum(indptr[1:] - 1, 0)


@recipe
def rows_of_blocks(indptr: np.ndarray, size: int, blocks: int | None = None) -> np.ndarray:
    """(blocks + 1,) the row of each block's first element, and of the last element.

    indptr : (m + 1,) offsets of rows
    size : elements per block
    blocks : by default as many as are needed; those past the end get the last element's row
    """
    nnz = int(indptr[-1])
    count = -(-nnz // size) if blocks is None else blocks
    firsts = np.minimum(np.arange(count + 1, dtype="int64") * size, nnz - 1)
    return rows_of_positions(indptr, firsts)


@recipe
def rows_of_positions(indptr: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The row that holds each position; 0 for positions outside of all rows."""
    rows = np.searchsorted(indptr, positions, "right") - 1
    return np.clip(rows, 0, max(len(indptr) - 2, 0)).astype(indptr.dtype)


# -- pieces of rows in chunks of nonzeros -----------------------------------------------------


class _Cut(NamedTuple):
    """The cuts between chunks.

    first : (chunks + 1,) the first piece of each chunk
    rows : (pieces,) the row of each piece; a row's first piece is its owner
    starts : (pieces + 1,) the first position of each, and the end
    """

    first: np.ndarray
    rows: np.ndarray
    starts: np.ndarray


def _cut(indptr: np.ndarray, parts: int, cost: int, size: int) -> _Cut:
    """Each row has an owner piece, at its start; a cut within a row starts a further piece."""
    if parts < 1:
        raise ScheduleError(f"pieces: argument 'parts': expected 1 or more, got {parts}")
    m = len(indptr) - 1
    offsets = indptr.astype("int64")
    work = offsets + cost * np.arange(m + 1)
    inner = np.arange(1, parts, dtype="int64")
    at = np.minimum(inner * size, work[-1]) if size else work[-1] * inner // parts
    row = np.clip(np.searchsorted(work, at, "right") - 1, 0, max(m - 1, 0))
    end = offsets[np.minimum(row + 1, m)]
    position = np.minimum(offsets[row] + (at - work[row]), end)
    whole = position >= end  # the row is complete: cut before the next one
    row = np.minimum(np.where(whole, row + 1, row), m)
    inside = ~whole & (position > offsets[row])
    again = np.zeros(len(at), bool)  # with more chunks than elements some have no piece
    again[1:] = (row[1:] == row[:-1]) & (position[1:] == position[:-1])
    inside &= ~again
    first = row + np.cumsum(inside)
    further = row[inside]
    rows = np.repeat(np.arange(m), 1 + np.bincount(further, minlength=m)[:m])
    starts = np.insert(offsets, further + 1, position[inside])
    return _Cut(np.concatenate([[0], first, [len(rows)]]), rows, starts)


@recipe(pieces=True)
def piece_ptr(indptr: np.ndarray, parts: int, cost: int, size: int = 0) -> np.ndarray:
    """(parts + 1,) the first piece of each chunk.

    indptr : (m + 1,) offsets of rows
    parts : the number of chunks of about equal work
    cost : of a row, in elements; if 0, chunks have equal numbers of elements
    size : elements and costs per chunk, instead of equal chunks
    """
    return _cut(indptr, parts, cost, size).first


@recipe
def piece_ids(indptr: np.ndarray, parts: int, cost: int, size: int = 0) -> np.ndarray:
    """(pieces,) the row of each piece; see :func:`piece_ptr`."""
    return _cut(indptr, parts, cost, size).rows


@recipe
def piece_starts(indptr: np.ndarray, parts: int, cost: int, size: int = 0) -> np.ndarray:
    """(pieces + 1,) the first position of each piece, and the end; see :func:`piece_ptr`."""
    return _cut(indptr, parts, cost, size).starts


@recipe
def piece_rest(
    indptr: np.ndarray, ptr: np.ndarray, rows: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """(chunks,) the row that a chunk starts within, if its owner is in another chunk, else -1.

    ptr, rows, starts : results of :func:`piece_ptr`, :func:`piece_ids` and :func:`piece_starts`
    """
    there = np.flatnonzero(ptr[:-1] < ptr[1:])
    first = ptr[there]
    out = np.full(len(ptr) - 1, -1, rows.dtype)
    out[there] = np.where(starts[first] > indptr[rows[first]], rows[first], -1)
    return out
