"""Patterns and values that every format has to store."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.formats import Pattern

DTYPES = ("float16", "bfloat16", "float32", "float64")


def _of(mask: np.ndarray, dtype: Any = np.int32) -> Pattern:
    return Pattern([c.astype(dtype) for c in np.nonzero(mask)], mask.shape)


def _random(shape: Any, density: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < density


def _matrices() -> dict[str, Pattern]:
    sparse_rows = _random((17, 12), 0.3)
    sparse_rows[[0, 3, 4, 5, 16]] = False
    dense_row = _random((9, 70), 0.05)
    dense_row[4] = True
    dense_column = _random((23, 9), 0.1)
    dense_column[:, 3] = True
    return {
        "random": _of(_random((13, 11), 0.3)),
        "empty rows": _of(sparse_rows),
        "nothing stored": _of(np.zeros((5, 7), bool)),
        "no rows": _of(np.zeros((0, 7), bool)),
        "no columns": _of(np.zeros((6, 0), bool)),
        "one dense row": _of(dense_row),
        "one dense column": _of(dense_column),
        "one column": _of(_random((21, 1), 0.5)),
        "one row": _of(_random((1, 33), 0.5)),
        "all stored": _of(np.ones((8, 12), bool)),
        "one element": _of(np.arange(15).reshape(3, 5) == 9),
        "last element": _of(np.arange(35).reshape(5, 7) == 34),
        "diagonal": _of(np.eye(10, 14, 2, bool)),
        "band": _of(np.tri(18, 15, 2, bool) & ~np.tri(18, 15, -4, bool)),
        "lower triangle": _of(np.tri(11, 11, dtype=bool)),
        "int64": _of(_random((19, 24), 0.2), np.int64),
    }


def _tensors() -> dict[str, Pattern]:
    relations = _random((4, 9, 11), 0.15)
    relations[2] = False
    relations[1, 3] = True
    return {
        "random": _of(_random((5, 6, 7), 0.1)),
        "relations": _of(relations),
        "nothing stored": _of(np.zeros((2, 3, 4), bool)),
        "no relations": _of(np.zeros((0, 3, 4), bool)),
        "all stored": _of(np.ones((3, 4, 5), bool)),
        "int64": _of(_random((3, 8, 5), 0.3), np.int64),
    }


MATRICES = _matrices()
TENSORS = _tensors()


def values(pattern: Pattern, dtype: str = "float32", seed: int = 1) -> np.ndarray:
    """Values with explicit zeros, and with a NaN and an infinity where they fit."""
    out = np.random.default_rng(seed).standard_normal(pattern.nnz).astype(np.dtype(dtype))
    out[::5] = 0
    if pattern.nnz > 3:
        out[1], out[2] = np.nan, np.inf
    return out
