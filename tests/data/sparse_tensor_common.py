"""Helpers of the tests of sparse tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparsetir import SparseTensor
from sparsetir.formats import Pattern

FLOATS = ("float16", "bfloat16", "float32", "float64")


def dense(shape: Any = (6, 8), dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """A dense array with an empty row (the third) and few elements."""
    rng = np.random.default_rng(seed)
    out = rng.integers(1, 9, shape) * (rng.random(shape) < 0.3)
    out[2] = 0
    return out.astype(np.dtype(dtype))


def same(matrix: SparseTensor, want: np.ndarray, zeros: bool = False) -> None:
    """The matrix is canonical and equals an array; `zeros` allows stored zeros."""
    assert matrix.shape == want.shape
    assert matrix.dtype == want.dtype and matrix.values.shape == (matrix.nnz,)
    Pattern(matrix.pattern.coords, matrix.shape)  # raises if not canonical
    back = np.zeros_like(want)
    back[tuple(matrix.pattern.coords)] = matrix.values
    np.testing.assert_array_equal(back.astype("float64"), want.astype("float64"))
    if not zeros:
        assert matrix.nnz == np.count_nonzero(want)


def frozen(*arrays: np.ndarray) -> None:
    """Writing to one of them raises from now on."""
    for a in arrays:
        a.flags.writeable = False


def torch_dtype(name: str) -> Any:
    return getattr(torch, name)


def as_torch(array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype("float32")).to(torch.bfloat16)
    return torch.from_numpy(array.copy())


def torch_sparse(array: np.ndarray, layout: str) -> Any:
    t = as_torch(array)
    if layout in ("bsr", "bsc"):
        return getattr(t, f"to_sparse_{layout}")((2, 4))
    return t.to_sparse() if layout == "coo" else getattr(t, f"to_sparse_{layout}")()
