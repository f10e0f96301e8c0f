"""Matrices of known structure: what simulations, roads and the web are like, in some sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.synthetic import Law, generate

# Nodes within two steps on a grid: those whose functions meet, of quadratic elements.
NEAR = [(i, j) for i in range(-2, 3) for j in range(-2, 3) if abs(i) + abs(j) <= 2]


def _matrix(rows: np.ndarray, columns: np.ndarray, size: int) -> Any:
    """CSR of random values at these places, each once."""
    keys = np.unique(rows.astype(np.int64) * size + columns)
    i, j = np.divmod(keys, size)
    values = np.random.default_rng(0).uniform(-1, 1, len(keys)).astype("float32")
    found = sp.csr_array((values, (i.astype("int32"), j.astype("int32"))), shape=(size, size))
    found.sort_indices()
    return found


def _grid(side: int, steps: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of nodes of a square grid, a step apart."""
    y, x = np.divmod(np.arange(side * side), side)
    rows, columns = [], []
    for dy, dx in steps:
        there = (0 <= y + dy) & (y + dy < side) & (0 <= x + dx) & (x + dx < side)
        rows.append(np.flatnonzero(there))
        columns.append(((y + dy) * side + x + dx)[there])
    return np.concatenate(rows), np.concatenate(columns)


def _finite_elements(side: int = 61, unknowns: int = 3) -> Any:
    """Elasticity on a grid by rows of nodes: 11,163 rows of 39 nonzeros, near the diagonal."""
    i, j = _grid(side, NEAR)
    a, b = np.divmod(np.arange(unknowns**2), unknowns)
    rows, columns = (i[:, None] * unknowns + a).ravel(), (j[:, None] * unknowns + b).ravel()
    return _matrix(rows, columns, side * side * unknowns)


def _banded(size: int = 50_000, each: int = 21, width: int = 128) -> Any:
    """Nonzeros at random within a band."""
    rng = np.random.default_rng(1)
    rows = np.repeat(np.arange(size), each)
    columns = rows + rng.integers(-width, width + 1, len(rows))
    there = (0 <= columns) & (columns < size)
    return _matrix(rows[there], columns[there], size)


def _blocks(size: int = 16_384, block: int = 8, each: int = 4) -> Any:
    """Full blocks at random places."""
    rng = np.random.default_rng(2)
    count = size // block
    i, j = np.repeat(np.arange(count), each), rng.integers(0, count, count * each)
    a, b = np.divmod(np.arange(block**2), block)
    return _matrix((i[:, None] * block + a).ravel(), (j[:, None] * block + b).ravel(), size)


def _roads(side: int = 450, kept: float = 0.65) -> Any:
    """A grid of streets, some of which are missing: 2.6 nonzeros a row, in both directions."""
    i, j = _grid(side, [(0, 1), (1, 0)])
    there = np.random.default_rng(3).random(len(i)) < kept
    i, j = i[there], j[there]
    return _matrix(np.concatenate([i, j]), np.concatenate([j, i]), side * side)


STRUCTURED: dict[str, Callable[[], Any]] = {
    "finite-elements": _finite_elements,
    "banded": _banded,
    "blocks": _blocks,
    "roads": _roads,
    "power-law": lambda: generate(Law(50_000, 800_000)),
}
