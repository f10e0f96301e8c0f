"""Matrices that `scipy.sparse.save_npz` wrote, checked before SciPy sees them.

Its classes round indices that are no integers, and take more time and memory for diagonals and
blocks than a short file has use for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp

# By format, the arrays that are integers and those that are values; dimensions of the latter.
ARRAYS = {
    "csr": (("indices", "indptr"), 1), "csc": (("indices", "indptr"), 1),
    "bsr": (("indices", "indptr"), 3), "dia": (("offsets",), 2), "coo": (("row", "col"), 1),
}  # fmt: skip
MOST_LENGTH = 2**62


def saved_matrix(arrays: Mapping[str, np.ndarray]) -> Any:
    """A sparse array of SciPy in the format that was saved; ValueError for what is none.

    arrays : those of the file; they are read as they are asked for
    """
    if "format" not in arrays:
        raise ValueError("holds no matrix that scipy.sparse.save_npz wrote: it has no 'format'")
    form = _format(arrays["format"])
    integers, ndim = ARRAYS[form]
    missing = [n for n in ("shape", "data", *integers) if n not in arrays]
    if missing:
        raise ValueError(f"expected a matrix in the format {form}, got one without {missing}")
    given = {name: _array(name, arrays[name], "iu", 1) for name in ("shape", *integers)}
    shape = tuple(given.pop("shape").tolist())
    if len(shape) != 2 or not all(0 <= length < MOST_LENGTH for length in shape):
        raise ValueError(f"shape: expected two integers from 0 on, below 2**62, got {list(shape)}")
    data = _array("data", arrays["data"], "biuf", ndim)
    if form == "dia":
        offsets = given["offsets"]
        if len(offsets) != len(data) or len(np.unique(offsets)) != len(offsets):
            raise ValueError(f"offsets: expected {len(data)} that differ, got {len(offsets)}")
        rows, columns, data = _diagonals(data, offsets, shape)
        return sp.coo_array((data, (rows, columns)), shape=shape)
    if form == "coo":
        return sp.coo_array((data, (given["row"], given["col"])), shape=shape)
    indptr, indices = given["indptr"], given["indices"]
    if form != "bsr":
        kind = sp.csr_array if form == "csr" else sp.csc_array
        return kind((data, indices, indptr), shape=shape)
    _, height, width = data.shape
    if not height or not width or shape[0] % height or shape[1] % width:
        raise ValueError(f"expected blocks that divide {shape}, got {(height, width)}")
    return sp.bsr_array((data, indices, indptr), shape=shape)


def _format(array: np.ndarray) -> str:
    found = array.item() if array.size == 1 else array.tolist()
    form = found.decode("ascii", "replace") if isinstance(found, bytes) else found
    if not isinstance(form, str) or form not in ARRAYS:
        raise ValueError(f"format: expected one of {', '.join(ARRAYS)}, got {form!r}")
    return form


def _array(name: str, array: np.ndarray, kinds: str, ndim: int) -> np.ndarray:
    what = "integers" if kinds == "iu" else "real numbers"
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name}: expected {what}, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {array.shape}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _diagonals(
    data: np.ndarray, offsets: np.ndarray, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and values of what lies inside a matrix; zeros are stored."""
    columns = np.arange(min(data.shape[1], shape[1]))
    # Offsets that are far outside would wrap around.
    near = np.abs(offsets.astype(np.float64)) < 2.0**62
    rows = columns - offsets[near].astype(np.int64)[:, None]
    inside = (rows >= 0) & (rows < shape[0])
    values = data[near, : len(columns)][inside]
    return rows[inside], np.broadcast_to(columns, inside.shape)[inside], values
