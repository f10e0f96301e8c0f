"""Matrices of a skew sweep (Senanayake's thesis, section 8.4, figure 8-7).

"The number of nonzeros in row i is given by the formula k * c^i. [...] For every c, I choose k so
that the number of nonzeros for the entire matrix is always 400 million. Nonzeros are generated
uniformly random within a row and then all rows are shuffled."

Neither the number of rows and columns nor the values of c are given in the text; those here are our
choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

# c = 1 + s / rows. The longest row then has about s times as many elements as the mean one.
SKEWS = (0, 1, 4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Size:
    """Of all matrices of a sweep."""

    rows: int
    columns: int
    nnz: int

    def factors(self) -> list[float]:
        """The values of c of a sweep, as far as the columns hold the longest row."""
        found = [1 + s / self.rows for s in SKEWS]
        return [c for c in found if lengths(c, self).max() <= self.columns]


SIZES = {
    "quick": Size(64, 600, 2_000),
    "counts": Size(4_096, 65_536, 262_144),
    "cpu": Size(1_000, 200_000, 200_000),
    "cuda": Size(200_000, 400_000, 40_000_000),
    "full": Size(1_000_000, 1_000_000, 400_000_000),
}


def lengths(c: float, size: Size) -> np.ndarray:
    """(rows,) int64: k * c^i elements of row i, in whole numbers whose sum is `size.nnz`."""
    weights = np.exp(np.log(c) * (np.arange(size.rows) - size.rows))
    ends = np.rint(np.cumsum(weights) / weights.sum() * size.nnz).astype("int64")
    return np.diff(ends, prepend=0)


def skewed(c: float, size: Size, seed: int = 0) -> Any:
    """CSR, float32 and int32, sorted columns; rows are shuffled.

    Raises ValueError if a row would have more elements than there are columns.
    """
    rng = np.random.default_rng(seed)
    count = lengths(c, size)
    if count.max() > size.columns:
        raise ValueError(
            f"skewed: argument 'c': expected rows of at most {size.columns} elements, got one of "
            f"{count.max()} with c = {c}"
        )
    rng.shuffle(count)
    return random_rows(count, size.columns, rng)


def random_rows(count: np.ndarray, columns: int, rng: np.random.Generator) -> Any:
    """CSR, float32 and int32, with so many elements in each row, in random columns, sorted.

    count : (rows,) at most `columns` each
    """
    indptr = np.concatenate([[0], np.cumsum(count)])
    row = np.repeat(np.arange(len(count), dtype="int32"), count)
    # Sorted within a row, and its n-th one moved n columns to the right: no column comes twice.
    keys = rng.random(len(row))
    keys += row
    keys.sort()
    keys -= row
    room = (columns - count + 1)[row]
    drawn = np.minimum((keys * room).astype("int64"), room - 1)  # rounding makes a few keys 1
    found = (drawn + np.arange(len(row)) - indptr[row]).astype("int32")
    values = rng.random(len(row), dtype="float32")
    return sp.csr_array((values, found, indptr.astype("int32")), (len(count), columns))
