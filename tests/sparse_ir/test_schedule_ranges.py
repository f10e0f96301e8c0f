"""ranges and aggregate: what they make, that it means the same, and what they refuse."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from positions_common import layer
from rgms_common import arguments, exact
from sparsetir import ScheduleError
from sparsetir.schedules.operators.rgms import Rgms, program
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
        f"rgms_{what}" for what in ("start", "sums", "product", "write")
    ]
    check(sch.func, problem, sparsetir.interpret)
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    again = sch.trace.apply(program(problem)).func
    assert tvm_ffi.structural_equal(again, sch.func, map_free_vars=True)


def test_kernels_give_the_same() -> None:
    sch, (_, i, j, _, _) = opened()
    _, tiles, rows = sch.ranges(i, 2, 4)
    sch.aggregate("Y", tiles, rows, [j])
    kernel = sparsetir.build(sch)
    check(kernel, Rgms(), lambda kernel, args: kernel(**args))


def test_tiles_of_dense_rows() -> None:
    """A layer of a graph convolution: sums before weights, whatever cut the rows into tiles."""
    sch = sparsetir.Schedule(layer)
    i, j, _, _ = sch.get_sp_iters(sch.get_sparse_iteration("layer"))
    sch.pos(i)
    tiles, rows = sch.split(i, [None, 3])
    sch.aggregate("Y", tiles, rows, [j])
    kernel = sparsetir.build(sch)
    for m, density in itertools.product((1, 7, 9), (0.0, 0.4)):
        a = sp.random(m, 5, density, "csr", "float32", random_state=0)
        rng = np.random.default_rng(m)
        args = {
            "a": a.data, "x": rng.random((5, 4), "float32"), "w": rng.random((4, 6), "float32"),
            "y": np.full((m, 6), np.nan, "float32"), "indptr": a.indptr, "indices": a.indices,
            "m": m, "n": 5, "nnz": a.nnz,
        }  # fmt: skip
        for run in (
            lambda given: sparsetir.interpret(sch.func, given),
            lambda given: kernel(**given),
        ):
            args["y"][:] = np.nan
            run(args)
            np.testing.assert_allclose(args["y"], 1 + a @ args["x"] @ args["w"], rtol=1e-5)


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
        given = (ptr, rows, m, parts, 3, size, np.arange(len(rows) + 1) * 2)
        tile_ptr, starts = range_tile_ptr(*given), range_tile_starts(*given)
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
    """As rows fit a cache, but not more than leave tiles full, beyond one for each thread."""
    assert row_ranges(10**6, 10**6, 10, 8, 128, 10**6, 2) == 128
    assert row_ranges(10**6, 3200, 10, 8, 128, 10**6, 2) == 20
    assert row_ranges(10**6, 30, 10, 8, 128, 10**6, 2) == 2
    # Read again for each range: less than the rows are, and more.
    assert row_ranges(10**4, 10**5, 27, 6, 2000, 10**6, 2, parent_bytes=10**5) == 20
    assert row_ranges(10**4, 10**5, 27, 6, 2000, 10**6, 2, parent_bytes=10**6) == 2
    assert row_ranges(1, 1, 1, 8, 128, 10**6, 2) == row_ranges(0, 0, 0, 8, 0, 0, 1) == 1
