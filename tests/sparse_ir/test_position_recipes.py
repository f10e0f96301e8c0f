"""Recipes of tiles and pieces, against what they are to be by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from programs.common import compress
from sparsetir import ScheduleError
from sparsetir.sparse_ir.recipes import positions as recipes

LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 5, 17, 40]), max_size=8)
TYPES = st.sampled_from(["int32", "int64"])


@settings(deadline=None)
@given(LENGTHS, TYPES, st.integers(1, 60), st.integers(0, 3), st.integers(0, 9))
def test_pieces(lengths: list[int], dtype: str, parts: int, cost: int, size: int) -> None:
    """No matrix, empty rows, a giant row, more chunks than rows or elements."""
    indptr, m = compress(lengths, dtype), len(lengths)
    if size:
        parts = recipes.tile_count(int(indptr[-1]) + cost * m, size)
    how: dict[str, Any] = {"indptr": indptr, "parts": parts, "cost": cost, "size": size}
    ptr, rows = recipes.piece_ptr(**how), recipes.piece_ids(**how)
    starts = recipes.piece_starts(**how)
    assert len(ptr) == parts + 1 and ptr[0] == 0 and ptr[-1] == len(rows)
    assert np.all(np.diff(ptr) >= 0) and np.all(np.diff(starts) >= 0)
    assert len(starts) == len(rows) + 1 and starts[0] == 0 and starts[-1] == indptr[-1]
    ends = starts[1:]
    assert np.all((indptr[rows] <= starts[:-1]) & (ends <= indptr[rows + 1]))
    owner = starts[:-1] == indptr[rows] if m else np.zeros(0, bool)
    np.testing.assert_array_equal(rows[owner], np.arange(m))  # each row has one
    rest = recipes.piece_rest(indptr, ptr, rows, starts)
    for chunk, (first, end) in enumerate(zip(ptr, ptr[1:], strict=False)):
        assert np.all(owner[first + 1 : end])  # only the first piece can be of another's row
        assert np.all(np.diff(rows[first:end]) > 0)
        carried = first < end and not owner[first]
        assert rest[chunk] == (rows[first] if carried else -1)
        held = starts[end] - starts[first] + cost * owner[first:end].sum()
        least = size or -(-(int(indptr[-1]) + cost * m) // parts)
        assert held <= least + cost


@settings(deadline=None)
@given(LENGTHS, TYPES, st.integers(1, 9), st.sampled_from([0, 2, 3]), st.booleans())
def test_tiles(lengths: list[int], dtype: str, size: int, times: int, by_index: bool) -> None:
    indptr = compress(lengths, dtype)
    rng = np.random.default_rng(sum(lengths))
    place = [np.sort(rng.choice(50, n, replace=False)) for n in lengths]
    indices = np.concatenate([np.zeros(0, int), *place]).astype(dtype) if by_index else None
    within = size * times
    parent: dict[tuple[int, int], list[int]] = {}
    starts, ids = [], []
    seen: set[tuple[int, int]] = set()
    for row, columns in enumerate(place):
        parent.setdefault((row, -1), [])
        for n, column in enumerate(columns):
            at = int(column) if by_index else n
            if (row, at // size) not in seen:
                seen.add((row, at // size))
                parent.setdefault((row, at // within if within else -1), []).append(at // size)
                starts.append(int(indptr[row]) + n)
                ids.append(at // size % times if within else at // size)
    counts = [len(v) for (_, p), v in parent.items() if (p >= 0) == bool(within)]
    ptr = recipes.tile_ptr(indptr, size, within, indices)
    np.testing.assert_array_equal(ptr, [0, *np.cumsum(counts)])
    np.testing.assert_array_equal(recipes.tile_starts(indptr, size, indices), [*starts, indptr[-1]])
    assert recipes.last_of(ptr) == len(starts)
    if indices is not None:
        np.testing.assert_array_equal(recipes.tile_ids(indptr, size, indices, within), ids)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 7))
def test_equal_parts_of_rows(lengths: list[int], parts: int) -> None:
    cuts = recipes.equal_parts_of_rows(compress(lengths, "int32"), parts)
    sizes = np.diff(cuts).reshape(len(lengths), parts)
    np.testing.assert_array_equal(sizes.sum(1), lengths)
    assert not lengths or np.all(sizes.max(1) - sizes.min(1) <= 1)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 30))
def test_tile_cuts(length: int, size: int) -> None:
    cuts = recipes.tile_cuts(length, size)
    assert cuts[0] == 0 and cuts[-1] == length and len(cuts) == recipes.tile_count(length, size) + 1
    assert np.all(np.diff(cuts)[:-1] == size)


def test_refused() -> None:
    indptr = np.array([0, 2, 4], "int32")
    with pytest.raises(ScheduleError, match="'indices': expected coordinates in order within each"):
        recipes.tile_starts(indptr, 4, np.array([0, 9, 8, 1], "int32"))
    assert list(recipes.tile_starts(indptr, 4, np.array([0, 9, 1, 8], "int32"))) == [0, 1, 2, 3, 4]
    with pytest.raises(ScheduleError, match="'parts': expected 1 or more, got 0"):
        recipes.piece_ptr(indptr, 0, 0)
    with pytest.raises(
        ScheduleError, match=r"at most 2147483647 with indices of int32, got .*\* 2"
    ):
        recipes.equal_parts_of_rows(indptr, 2**30)
