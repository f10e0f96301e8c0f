"""ranges, aggregate, and recipes of tiles and pieces: meaning, text, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import strategies as st

import sparsetir
from drawing import examples
from programs.common import compress
from rgms_common import arguments, exact
from schedule_common import gives, read_back
from sparsetir import ScheduleError
from sparsetir.schedules.operators.rgms import Rgms, program
from sparsetir.sparse_ir.recipes import positions as recipes
from sparsetir.sparse_ir.recipes.ranges import (
    places_in_tiles,
    range_tile_ptr,
    range_tile_starts,
    row_ranges,
)

SHAPES = [(3, 9, 5, 0.4), (1, 1, 1, 1.0), (2, 3, 4, 0.0), (2, 14, 7, 0.7)]


def opened(problem: Rgms | None = None, sizes: tuple[int, int] = (3, 5)) -> tuple[Any, list[Any]]:
    """A schedule of the plain program for these feature sizes, and its loops."""
    sch = sparsetir.Schedule(program(problem or Rgms()))
    loops = sch.get_sp_iters(sch.get_sparse_iteration("rgms"))
    for loop, size in zip(loops[3:], sizes, strict=True):
        sch.bound(loop, size, "exact")
    return sch, loops


def check(func: Any, problem: Rgms, run: Any) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        mask = rng.random(shape[:3]) < shape[3]
        args = arguments(rng, mask, 3, 5, problem.dtype, problem.idtype, problem.weighted)
        args |= {
            "relations": shape[0], "nnz_rows": len(args["rows"]), "nnz": len(args["indices"]),
            "feat_in": 3, "feat": 5,
        }  # fmt: skip
        run(func, args)
        rough = problem.dtype == "float16"
        np.testing.assert_allclose(
            args["out"], exact(mask, args), rtol=1e-4, atol=1e-2 if rough else 1e-5
        )


@pytest.mark.parametrize("problem", [Rgms(), Rgms("float16", "int64", weighted=False)], ids=str)
@pytest.mark.parametrize("parts", [3, "parts"])
def test_the_result_stays(problem: Rgms, parts: Any) -> None:
    """Interpreted after each step; the text parses back and the trace replays."""
    sch, (_, i, j, _, _) = opened(problem)
    _, tiles, rows = sch.ranges(i, parts, 4, default=2)
    check(sch.func, problem, sparsetir.interpret)
    steps = sch.aggregate("Y", tiles, rows, [j], dtype=problem.accumulator)
    assert [step.name for step in steps] == [
        f"rgms_{step}" for step in ("start", "sums", "product", "write")
    ]
    check(sch.func, problem, sparsetir.interpret)
    read_back(sch, program(problem))


SUMS_OF_ROWS = """
@T.prim_func
def weights(
    a: T.handle, x: T.handle, g: T.handle, w: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    K = T.dense_fixed(4)
    L = T.dense_fixed(6)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (N, K), "float32")
    G = T.match_sparse_buffer(g, (I, L), "float32")
    W = T.match_sparse_buffer(w, (K, L), "float32")
    with T.sp_iter([I, J, K, L], "RRSS", "weights") as [i, j, k, l]:
        with T.init():
            W[k, l] = 1.0
        W[k, l] = W[k, l] + A[i, j] * X[j, k] * G[i, l]
"""


@pytest.mark.parametrize("inside", [False, True])
def test_rows_with_factors_of_their_own(inside: bool) -> None:
    """Sums of rows meet a row of an operand: the gradient of a layer for its weights. The init runs
    before all tiles, or where a visit of the loops around them has all terms."""
    sch = sparsetir.Schedule(sparsetir.from_source(SUMS_OF_ROWS))
    it = sch.get_sparse_iteration("weights")
    i, j, k, l = sch.get_sp_iters(it)
    sch.pos(i)
    tiles, rows = sch.split(i, [None, 3])
    sch.sparse_reorder(it, [*([l] if inside else []), tiles, rows, j, k, *([] if inside else [l])])
    steps = sch.aggregate("W", tiles, rows, [j])
    names = [f"weights_{step}" for step in ("init", "start", "sums", "product")]
    assert [step.name for step in steps] == names[not inside :]
    kernel = sparsetir.build(sch)
    for m, density in itertools.product((1, 7, 9), (0.0, 0.4)):
        a = sp.random(m, 5, density, "csr", "float32", random_state=0)
        rng = np.random.default_rng(m)
        args = {
            "a": a.data, "x": rng.random((5, 4), "float32"), "g": rng.random((m, 6), "float32"),
            "w": np.zeros((4, 6), "float32"), "indptr": a.indptr, "indices": a.indices,
            "m": m, "n": 5, "nnz": a.nnz,
        }  # fmt: skip
        gives(sch, args, {"w": 1 + (a @ args["x"]).T @ args["g"]}, kernel=kernel)


def test_ranges_do_not_meet() -> None:
    """The same ranges for all relations are free of races."""
    sch, (_, i, _, _, _) = opened()
    ranges, _, _ = sch.ranges(i, 2, 4)
    sch.parallelize(ranges)


def test_recipes() -> None:
    """Ranges are the same for all relations, tiles full but for the last of each."""
    rng = np.random.default_rng(1)
    for relations, m, parts, size in itertools.product((1, 5), (1, 40), (1, 3, 60), (1, 4)):
        mask = rng.random((relations, m)) < 0.5
        ptr = np.append(0, np.cumsum(mask.sum(axis=1))).astype("int32")
        rows = mask.nonzero()[1].astype("int32")
        args = (ptr, rows, m, parts, 3, size, np.arange(len(rows) + 1) * 2)
        tile_ptr, starts = range_tile_ptr(*args), range_tile_starts(*args)
        assert len(tile_ptr) == relations * parts + 1
        assert (starts[0], starts[-1], len(starts)) == (0, len(rows), tile_ptr[-1] + 1)
        assert np.all((np.diff(starts) > 0) & (np.diff(starts) <= size))
        of_tile = np.repeat(np.arange(relations * parts), np.diff(tile_ptr))
        part = np.repeat(of_tile % parts, np.diff(starts))
        owner = np.full(m, -1)
        for row, its in zip(rows, part, strict=True):
            assert owner[row] in (-1, its)
            owner[row] = its
        assert np.all(np.diff(owner[owner >= 0]) >= 0)
        np.testing.assert_array_equal(
            np.repeat(of_tile // parts, np.diff(starts)), mask.nonzero()[0]
        )
        places = places_in_tiles(starts, size)
        np.testing.assert_array_equal(
            places + np.repeat(starts[:-1], np.diff(starts)), np.arange(len(rows))
        )
    with pytest.raises(ScheduleError, match="ranges: expected coordinates in order"):
        range_tile_ptr(np.array([0, 2]), np.array([3, 1]), 4, 2, 1, 2)
    with pytest.raises(ScheduleError, match="ranges: argument 'parts': expected 1 or more"):
        range_tile_ptr(np.array([0, 2], "int32"), np.array([1, 3]), 4, 2**31, 1, 2)
    with pytest.raises(ScheduleError, match="places_in_tiles: argument 'starts'"):
        places_in_tiles(np.array([0, 3]), 2)


def test_how_many_ranges() -> None:
    """Ranges fit a cache, but leave tiles full, and beyond that each thread has one."""
    assert row_ranges(10**6, 10**6, 10, 8, 128, 10**6, 2) == 128
    assert row_ranges(10**6, 3200, 10, 8, 128, 10**6, 2) == 20
    assert row_ranges(10**6, 30, 10, 8, 128, 10**6, 2) == 2
    # Read again for each range: less than the rows are, and more.
    assert row_ranges(10**4, 10**5, 27, 6, 2000, 10**6, 2, parent_bytes=10**5) == 20
    assert row_ranges(10**4, 10**5, 27, 6, 2000, 10**6, 2, parent_bytes=10**6) == 2
    assert row_ranges(1, 1, 1, 8, 128, 10**6, 2) == row_ranges(0, 0, 0, 8, 0, 0, 1) == 1


LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 5, 17, 40]), max_size=8)
TYPES = st.sampled_from(["int32", "int64"])


@examples(
    60, 1000, lengths=LENGTHS, dtype=TYPES, parts=st.integers(1, 60), cost=st.integers(0, 3),
    size=st.integers(0, 9),
)  # fmt: skip
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


@examples(
    60, 1000, lengths=LENGTHS, dtype=TYPES, size=st.integers(1, 9),
    times=st.sampled_from([0, 2, 3]), by_index=st.booleans(),
)  # fmt: skip
def test_tiles(lengths: list[int], dtype: str, size: int, times: int, by_index: bool) -> None:
    indptr = compress(lengths, dtype)
    rng = np.random.default_rng(sum(lengths))
    place = [np.sort(rng.choice(50, n, replace=False)) for n in lengths]
    indices = np.concatenate([np.zeros(0, int), *place]).astype(dtype) if by_index else None
    within = size * times
    parent: dict[tuple[int, int], list[int]] = {}
    starts, ids = [], []
    tiles: set[tuple[int, int]] = set()
    for row, columns in enumerate(place):
        parent.setdefault((row, -1), [])
        for n, column in enumerate(columns):
            key = int(column) if by_index else n
            if (row, key // size) not in tiles:
                tiles.add((row, key // size))
                parent.setdefault((row, key // within if within else -1), []).append(key // size)
                starts.append(int(indptr[row]) + n)
                ids.append(key // size % times if within else key // size)
    counts = [len(v) for (_, p), v in parent.items() if (p >= 0) == bool(within)]
    ptr = recipes.tile_ptr(indptr, size, within, indices)
    np.testing.assert_array_equal(ptr, [0, *np.cumsum(counts)])
    np.testing.assert_array_equal(recipes.tile_starts(indptr, size, indices), [*starts, indptr[-1]])
    assert recipes.last_of(ptr) == len(starts)
    if indices is not None:
        np.testing.assert_array_equal(recipes.tile_ids(indptr, size, indices, within), ids)


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
