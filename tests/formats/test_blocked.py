"""BSR, DBSR and SRBCRS: converters against inference, scipy and plain Python; products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from conversions import as_inferred, patterns, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import MATRICES

from sparsetir.formats import BSR, DBSR, SRBCRS, Pattern


def random_pattern(shape: tuple[int, int], nnz: int, dtype: Any = np.int32) -> Pattern:
    flat = np.unique(np.random.default_rng(nnz).integers(0, shape[0] * shape[1], nnz))
    return Pattern([c.astype(dtype) for c in (flat // shape[1], flat % shape[1])], shape)


# -- conversion -----------------------------------------------------------------------------------


@given(
    pattern=patterns(),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    kind=st.sampled_from([BSR, DBSR, SRBCRS]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_random_patterns(pattern: Pattern, size: tuple[int, int], kind: Any) -> None:
    as_inferred(kind(*size), pattern)
    round_trip(kind(*size), pattern, ("float32",))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 4)])
@pytest.mark.parametrize(
    "pattern",
    [
        random_pattern((1500, 1201), 60_000),  # several tables, with few and with many blocks
        random_pattern((300, 900), 200_000, np.int64),
        random_pattern((3000, 2999), 700),  # sorted
        random_pattern((100_000, 99_999), 900),  # more blocks than int32 counts
    ],
    ids=["tables", "full table", "sorted", "int64 keys"],
)
def test_large_grids(pattern: Pattern, size: tuple[int, int]) -> None:
    as_inferred(BSR(*size), pattern)
    as_inferred(SRBCRS(*size), pattern)


@pytest.mark.parametrize("size", [(2, 2), (4, 3), (1, 5), (5, 1)])
def test_bsr_of_scipy(size: tuple[int, int]) -> None:
    """Shapes, which scipy's blocks have to divide, are padded for it."""
    rows, cols = size
    for pattern in MATRICES.values():
        m, n = pattern.shape
        high, wide = -(-m // rows), -(-n // cols)
        if not high or not wide:
            continue
        data = np.arange(1, pattern.nnz + 1, dtype="float32")
        matrix = sp.coo_array((data, pattern.coords), (high * rows, wide * cols)).tocsr()
        want = matrix.tobsr(size)
        want.sort_indices()
        args = BSR(rows, cols).convert(pattern).arguments(False, A=data)
        tail = f"bsr_{rows}_{cols}"
        np.testing.assert_array_equal(args[f"indptr_jo_{tail}"], want.indptr)
        np.testing.assert_array_equal(args[f"indices_jo_{tail}"], want.indices)
        np.testing.assert_array_equal(args[f"a_{tail}"], want.data)
        np.testing.assert_array_equal(args[f"mask_{tail}"], want.data != 0)


def slow_sr_bcrs(pattern: Pattern, data: np.ndarray, t: int, g: int) -> tuple[Any, Any, Any]:
    """indptr of the groups, columns of the tiles, and tiles, element by element."""
    stored = {(int(i), int(j)): v for i, j, v in zip(*pattern.coords, data, strict=True)}
    indptr, columns, tiles = [0], [], []
    for top in range(0, pattern.shape[0], t):
        for j in range(pattern.shape[1]):
            tile = [stored.get((top + ii, j)) for ii in range(t)]
            if any(v is not None for v in tile):
                columns.append(j)
                tiles.append([0 if v is None else v for v in tile])
        while len(columns) % g:
            columns.append(-1)
            tiles.append([0] * t)
        indptr.append(len(columns) // g)
    return indptr, columns, np.reshape(np.array(tiles, data.dtype), (-1, t))


@pytest.mark.parametrize(("t", "g"), [(1, 1), (2, 3), (4, 2), (8, 32)])
def test_sr_bcrs_of_loops(t: int, g: int) -> None:
    for pattern in MATRICES.values():
        data = np.arange(1, pattern.nnz + 1, dtype="float32")
        conv = SRBCRS(t, g).convert(pattern)
        args, tail = conv.arguments(False, A=data), f"sr_bcrs_{t}_{g}"
        indptr, columns, tiles = slow_sr_bcrs(pattern, data, t, g)
        np.testing.assert_array_equal(args[f"indptr_g_{tail}"], indptr)
        np.testing.assert_array_equal(args[f"indices_g_{tail}"], np.zeros(indptr[-1]))
        np.testing.assert_array_equal(args[f"indices_jt_{tail}"], columns)
        np.testing.assert_array_equal(args[f"a_{tail}"], tiles)
        assert conv.places == indptr[-1] * g * t
        # Each tile holds an element, so one of its t places (SparseTIR, section 4.3.2).
        assert pattern.nnz >= np.count_nonzero(np.array(columns) >= 0)


# -- full blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 16, 64, 128])
def test_full_blocks_are_found(size: int) -> None:
    """The largest power of two, whatever blocks were meant."""
    mask = np.random.default_rng(size).random((5, 7)) < 0.4
    mask[:, 0], mask[2] = True, False
    mask[0, :2] = True, False
    full = np.kron(mask, np.ones((size, size), bool))
    wanted = min(64, size & -size)
    assert Pattern(list(np.nonzero(full)), full.shape).full_block == wanted


def test_blocks_that_are_not_full() -> None:
    full = np.kron(np.eye(6, dtype=bool), np.ones((4, 4), bool))
    assert Pattern(list(np.nonzero(full)), full.shape).full_block == 4
    for change in (
        lambda a: a.__setitem__((5, 5), False),
        lambda a: a.__setitem__((0, slice(8, 12)), True),  # a row is longer
        lambda a: a.__setitem__(slice(0, 4), np.roll(a[:4], 1, axis=1)),  # not where blocks begin
        lambda a: a.__setitem__(1, np.roll(a[1], 4)),  # rows as long, of other columns
    ):
        other = full.copy()
        change(other)
        assert Pattern(list(np.nonzero(other)), other.shape).full_block == 1
    assert Pattern(list(np.nonzero(full)), (24, 25)).full_block == 1
    for shape in ((0, 8), (8, 8)):
        assert Pattern([np.zeros(0, int)] * 2, shape).full_block == 1
