"""Recipes of rows under several parents, cut into the same ranges of rows for all of them.

What a tensor stores by (relation, row) is gone through by ranges of rows: within a range relation
by relation, within a relation by tiles of rows. Ranges hold about as much work each.
"""

from __future__ import annotations

import numpy as np

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.recipes.registry import Below, TilesOf, recipe

RANGES_PER_THREAD = 4
TILES_PER_RANGE = 2  # of a parent
AT_A_TIME = 1 << 18  # rows: what is worked with on the way is no larger, whatever their number


@recipe(open=True)
def row_ranges(
    m: int, rows: int, parents: int, tile: int, row_bytes: int, cache: int, threads: int,
    parent_bytes: int = 0,
) -> int:  # fmt: skip
    """A fit number of ranges: each keeps its rows in a cache, and threads have several each.

    Each range reads what belongs to the parents again. Where that is more than rows that do not
    stay in a cache are read and written, there is one for each thread.

    m : coordinates of rows
    rows, parents : stored ones, and what they hang under
    tile : rows of a tile; ranges are not so many that most tiles of a parent hold fewer, beyond one
        for each thread
    row_bytes : that are written of a coordinate
    cache : bytes
    parent_bytes : that are read for a parent in each range
    """
    wanted = max(-(-m * row_bytes // max(1, cache)), RANGES_PER_THREAD * threads)
    if wanted * parents * parent_bytes > rows * row_bytes:
        return max(1, min(m, threads))
    most = rows // max(1, TILES_PER_RANGE * tile * parents)
    return max(1, min(m, max(min(wanted, most), threads)))


def _cuts(rows: np.ndarray, m: int, parts: int, cost: int, indptr: np.ndarray | None) -> np.ndarray:
    """(parts + 1,) the first coordinates of ranges; from 0, not decreasing, to m."""
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
    """(relations * parts + 1,) the position where each relation's rows of each range begin."""
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

    ptr : (relations + 1,) where the rows of each relation begin
    rows : (nnz_rows,) coordinates, 0 .. m - 1, in order within a relation
    parts : ranges with about as much work each, the same for all relations
    cost : of a row beside its elements, which count as one each
    size : rows of a tile, of which the last of a range may hold fewer
    indptr : (nnz_rows + 1,) where the elements of each row begin

    Raises ScheduleError for coordinates out of order, and for more parts than the type of `ptr`
    counts.
    """
    lengths = np.diff(_segments(ptr, rows, m, parts, cost, indptr))
    return np.append(0, np.cumsum(-(-lengths // size)))


@recipe(tiles=TilesOf("size"))
def range_tile_starts(
    ptr: np.ndarray, rows: np.ndarray, m: int, parts: int, cost: int, size: int,
    indptr: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """(tiles + 1,) the position where each tile begins, and the end; see `range_tile_ptr`."""
    segments = _segments(ptr, rows, m, parts, cost, indptr)
    tiles = -(-np.diff(segments) // size)
    first = np.cumsum(tiles) - tiles
    within = np.arange(tiles.sum()) - np.repeat(first, tiles)
    return np.append(np.repeat(segments[:-1], tiles) + within * size, len(rows))


@recipe(values=Below("size"))
def places_in_tiles(starts: np.ndarray, size: int) -> np.ndarray:
    """(rows,) the number of each position within its tile, below `size`.

    starts : (tiles + 1,) where tiles begin, and the end
    size : the most that a tile holds

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
