"""Formats against scipy and plain Python: their arrays, products, what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from conversions import as_inferred, converted, patterns
from hypothesis import strategies as st
from zoo import MATRICES

from drawing import examples
from sparsetir.formats import BSR, DBSR, SELL, SRBCRS, EnumeratedPatterns, Pattern


def random_pattern(shape: tuple[int, int], nnz: int, dtype: Any = np.int32) -> Pattern:
    flat = np.unique(np.random.default_rng(nnz).integers(0, shape[0] * shape[1], nnz))
    return Pattern([c.astype(dtype) for c in (flat // shape[1], flat % shape[1])], shape)


# -- conversion -----------------------------------------------------------------------------------


@examples(
    60, 1000, pattern=patterns(), size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    kind=st.sampled_from([BSR, DBSR, SRBCRS]),
)  # fmt: skip
def test_random_patterns(pattern: Pattern, size: tuple[int, int], kind: Any) -> None:
    converted(kind(*size), pattern)


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


Column = tuple[int, int, int, list[int]]


def slow_columns(pattern: Pattern, rows: int) -> list[Column]:
    """(panel, bit mask, column, rows in the panel) of all columns of panels, sorted."""
    stored: dict[tuple[int, int], list[int]] = {}
    for i, j in zip(*(c.tolist() for c in pattern.coords), strict=True):
        stored.setdefault((i // rows, j), []).append(i % rows)
    return sorted((p, sum(1 << r for r in rs), j, rs) for (p, j), rs in stored.items())


def columns_of(part: Any) -> list[tuple[int, int, list[int]]]:
    """(panel, column, rows) that the index arrays of a part say."""
    names = ("indptr_jc", "indices_jc", "indices_ii")
    indptr, columns, rows = (part.indices[part.rule.renamed(n)] for n in names)
    panel = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    rows = rows.reshape(len(columns), int(part.rule.axis("II").nnz_cols)).tolist()
    return list(zip(panel.tolist(), columns.tolist(), rows, strict=True))


@examples(25, 500, pattern=patterns(), rows=st.integers(1, 16))
def test_random_groups(pattern: Pattern, rows: int) -> None:
    fmt = EnumeratedPatterns(rows)
    conv = converted(fmt, pattern, places=False)
    want = [(p, j, rs) for p, _, j, rs in slow_columns(pattern, rows)]
    have = [c for part in conv.parts for c in columns_of(part)]
    assert sorted(have) == sorted(want)
    stats = fmt.patterns(pattern)
    bits = np.array([int(m).bit_count() for m in stats.mask], int)
    stored = [(stats.columns * bits)[bits == q].sum() for q in range(1, rows + 1)]
    assert stored == [p.stored for p in conv.parts]


@examples(20, 500, pattern=patterns(longest=12), rows=st.integers(1, 5))
def test_by_pattern(pattern: Pattern, rows: int) -> None:
    """A rule for each pattern, whose columns are its own and whose places are all filled."""
    conv = converted(EnumeratedPatterns(rows, "pattern"), pattern)
    columns = slow_columns(pattern, rows)
    for mask, part in enumerate(conv.parts, 1):
        indptr, indices = (
            part.indices[part.rule.renamed(f"{n}_jc")] for n in ("indptr", "indices")
        )
        panel = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        want = [(p, j) for p, m, j, _ in columns if m == mask]
        assert list(zip(panel.tolist(), indices.tolist(), strict=True)) == want
        assert part.full and part.rule.name == f"enum_{rows}_p{mask}"
    assert conv.padding == 0


def test_more_groups_than_16_bits_count() -> None:
    rows = np.arange(70_000, dtype=np.int32)
    pattern = Pattern([rows, rows % 3], (70_000, 3))
    as_inferred(EnumeratedPatterns(1), pattern)


def slow_sell(pattern: Pattern, data: np.ndarray, c: int, sigma: int) -> tuple[Any, ...]:
    """step_ptr, and row, column and value of each lane of each step, row by row."""
    rows = [[] for _ in range(pattern.shape[0])]
    for i, j, v in zip(*pattern.coords, data, strict=True):
        rows[i].append((int(j), v))
    order: list[int] = []
    for top in range(0, len(rows), sigma):
        order += sorted(range(top, min(top + sigma, len(rows))), key=lambda i: -len(rows[i]))
    step_ptr, of_lane, columns, values = [0], [], [], []
    for first in range(0, len(order), c):
        lanes = order[first : first + c]
        steps = max(len(rows[i]) for i in lanes)
        for t in range(steps):
            for lane in range(c):
                row = lanes[lane] if lane < len(lanes) else -1
                stored = row >= 0 and t < len(rows[row])
                of_lane.append(row)
                columns.append(rows[row][t][0] if stored else -1)
                values.append(rows[row][t][1] if stored else 0)
        step_ptr.append(step_ptr[-1] + steps)
    return step_ptr, of_lane, columns, values


def check_layout(pattern: Pattern, c: int, sigma: int) -> None:
    fmt = SELL(c, sigma)
    conv, data = fmt.convert(pattern), np.arange(1, pattern.nnz + 1, dtype="float32")
    args = conv.arguments(A=data)
    step_ptr, rows, columns, stored = slow_sell(pattern, data, c, sigma)
    np.testing.assert_array_equal(args[f"indptr_jw_{fmt.name}"], step_ptr)
    np.testing.assert_array_equal(args[f"indices_ir_{fmt.name}"], rows)
    np.testing.assert_array_equal(args[f"indices_jc_{fmt.name}"], columns)
    np.testing.assert_array_equal(args[f"a_{fmt.name}"], stored)
    assert args[f"n_s_{fmt.name}"] == len(step_ptr) - 1 == -(-pattern.shape[0] // c)
    assert args[f"n_jw_{fmt.name}"] == max(np.diff(step_ptr), default=0)
    assert conv.places == len(columns) == fmt.places(pattern)


@examples(20, 500, pattern=patterns(), c=st.integers(1, 5), windows=st.integers(0, 5))
def test_layout_of_random_matrices(pattern: Pattern, c: int, windows: int) -> None:
    check_layout(pattern, c, windows * c or 1)
