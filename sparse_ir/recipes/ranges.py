"""Recipes for rows under several parents, cut into ranges of rows that are equal for all of them.

A tensor stored by (relation, row) is visited by ranges of rows: within a range by relation, within
a relation by tiles of rows. Ranges have about equal work.
"""

from __future__ import annotations

import numpy as np

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.index_arrays import row_numbers
from sparsetir.sparse_ir.recipes.registry import Below, TilesOf, recipe

RANGES_PER_THREAD = 4
TILES_PER_RANGE = 2  # per parent
AT_A_TIME = 1 << 18  # rows: the most that temporary arrays hold, whatever the number of rows


@recipe(open=True)
def row_ranges(
    m: int, rows: int, parents: int, tile: int, row_bytes: int, cache: int, threads: int,
    parent_bytes: int = 0,
) -> int:  # fmt: skip
    """A suitable number of ranges: each keeps its rows in a cache, and threads have several each.

    Each range reads the parents' operands again. If that exceeds the traffic of rows that do not
    stay in a cache, there is one range per thread.

    m : row coordinates
    rows, parents : stored rows, and their parents
    tile : rows per tile; beyond one per thread, ranges are few enough for most tiles of a parent to
        be full
    row_bytes : bytes written per coordinate
    cache : bytes
    parent_bytes : bytes read per parent in each range
    """
    wanted = max(-(-m * row_bytes // max(1, cache)), RANGES_PER_THREAD * threads)
    if wanted * parents * parent_bytes > rows * row_bytes:
        return max(1, min(m, threads))
    most = rows // max(1, TILES_PER_RANGE * tile * parents)
    return max(1, min(m, max(min(wanted, most), threads)))


def _cuts(rows: np.ndarray, m: int, parts: int, cost: int, indptr: np.ndarray | None) -> np.ndarray:
    """(parts + 1,) the first coordinates of ranges, non-decreasing from 0 to m."""
    work = np.zeros(m)
    for begin in range(0, len(rows), AT_A_TIME):
        mine = rows[begin : begin + AT_A_TIME]
        elements = 0 if indptr is None else np.diff(indptr[begin : begin + len(mine) + 1])
        work += np.bincount(mine, np.broadcast_to(elements + cost, mine.shape), minlength=m)
    until = np.append(0, np.cumsum(work))
    inner = np.searchsorted(until, until[-1] * np.arange(1, parts) / parts)
    return np.concatenate([[0], np.minimum(inner, m), [m]])


def _segments(
    ptr: np.ndarray, rows: np.ndarray, m: int, parts: int, cost: int, indptr: np.ndarray | None
) -> np.ndarray:
    """(relations * parts + 1,) the first position of each relation's rows of each range."""
    relations, largest = len(ptr) - 1, np.iinfo(ptr.dtype).max
    if parts < 1 or relations * parts > largest:
        raise ScheduleError(
            f"ranges: argument 'parts': expected 1 or more, and parts * parents to be at most "
            f"{largest} with indices of {ptr.dtype}, got {parts} * {relations}"
        )
    inner = _cuts(rows, m, parts, cost, indptr)[1:-1]
    lengths, last = np.zeros(relations * parts, "int64"), 0
    for begin in range(0, len(rows), AT_A_TIME):
        mine = rows[begin : begin + AT_A_TIME]
        relation = np.searchsorted(ptr, np.arange(begin, begin + len(mine)), "right") - 1
        place = relation * parts + np.searchsorted(inner, mine, "right")
        if place[0] < last or np.any(place[1:] < place[:-1]):
            raise ScheduleError("ranges: expected coordinates in order under each parent")
        first, last = place[0], place[-1]
        lengths[first : last + 1] += np.bincount(place - first)
    return np.append(0, np.cumsum(lengths))


@recipe
def range_tile_ptr(
    ptr: np.ndarray, rows: np.ndarray, m: int, parts: int, cost: int, size: int,
    indptr: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """(relations * parts + 1,) the first tile of each relation's rows of each range.

    ptr : (relations + 1,) offsets of the rows of each relation
    rows : (nnz_rows,) coordinates, 0 .. m - 1, in order within a relation
    parts : the number of ranges of about equal work, the same for all relations
    cost : of a row, in elements
    size : rows per tile; the last tile of a range may have fewer
    indptr : (nnz_rows + 1,) offsets of the elements of each row

    Raises ScheduleError for coordinates out of order, and for more parts than the type of `ptr` can
    count.
    """
    lengths = np.diff(_segments(ptr, rows, m, parts, cost, indptr))
    return np.append(0, np.cumsum(-(-lengths // size)))


@recipe(tiles=TilesOf("size"))
def range_tile_starts(
    ptr: np.ndarray, rows: np.ndarray, m: int, parts: int, cost: int, size: int,
    indptr: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """(tiles + 1,) the first position of each tile, and the end; see `range_tile_ptr`."""
    segments = _segments(ptr, rows, m, parts, cost, indptr)
    tiles = -(-np.diff(segments) // size)
    first = np.cumsum(tiles) - tiles
    within = np.arange(tiles.sum()) - np.repeat(first, tiles)
    return np.append(np.repeat(segments[:-1], tiles) + within * size, len(rows))


@recipe(values=Below("size"))
def places_in_tiles(starts: np.ndarray, size: int) -> np.ndarray:
    """(rows,) the number of each position within its tile, below `size`.

    starts : (tiles + 1,) the first position of each tile, and the end
    size : the most rows of a tile

    Raises ScheduleError for larger tiles.
    """
    if np.any(np.diff(starts) > size):
        raise ScheduleError(
            f"places_in_tiles: argument 'starts': expected tiles of at most {size}, got "
            f"{np.diff(starts).max()}"
        )
    places = np.arange(starts[-1], dtype=starts.dtype)
    places -= np.repeat(starts[:-1], np.diff(starts))
    return places


@recipe
def range_cuts(indptr: np.ndarray, indices: np.ndarray, n: int, parts: int) -> np.ndarray:
    """(rows, parts + 1) the positions where each row passes from one range to the next.

    indptr : (rows + 1,) offsets of rows
    indices : (nnz,) coordinates, 0 .. n - 1, whose ranges hold about equally many elements
    parts : the number of ranges

    If the elements of a row are not in the order of ranges, all elements are in the first part.
    """
    work = np.cumsum(np.bincount(indices, minlength=n))
    inner = np.searchsorted(work, len(indices) * np.arange(1, parts) // parts, "right")
    range_of = np.cumsum(np.bincount(inner, minlength=n + 1)[:n])
    rows, first = len(indptr) - 1, row_numbers(indptr) * parts
    place = first + range_of[indices]
    if np.any(place[1:] < place[:-1]):
        place = first
    counts = np.bincount(place, minlength=rows * parts).reshape(rows, parts)
    return indptr[:-1, None] + np.cumsum(np.insert(counts, 0, 0, axis=1), axis=1)
