"""SELL-C-sigma: its layout against plain Python, products, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversions import patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import MATRICES

from sparsetir.formats import SELL, Pattern

SIZES = [(1, 1), (2, 1), (4, 4), (3, 6), (4, 1000)]


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


@pytest.mark.parametrize(("c", "sigma"), SIZES)
def test_layout(c: int, sigma: int) -> None:
    for pattern in MATRICES.values():
        check_layout(pattern, c, sigma)


@given(pattern=patterns(), c=st.integers(1, 5), windows=st.integers(0, 5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_layout_of_random_matrices(pattern: Pattern, c: int, windows: int) -> None:
    check_layout(pattern, c, windows * c or 1)
