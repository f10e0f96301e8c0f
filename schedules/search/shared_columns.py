"""Columns that neighbouring rows have in common, or side by side, and what pays for them.

Rows of finite elements, of Jacobians and of some pruned weights agree in groups, in matrices whose
share of nonzeros says nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparsetir.schedules.targets import l2_bytes
from sparsetir.schedules.templates.spmv import DIAGONAL
from sparsetir.sparse_ir.recipes.diagonals import slice_diagonals

# Places in which a pattern is sampled, and the most nonzeros of each.
WINDOWS, MOST = 4, 1 << 13
# The most places of a table of columns in row panels per nonzero; beyond it nonzeros are sorted.
TABLE = 24
# The least nonzeros per row and column, and per distinct column of a row panel, for which it pays.
LENGTH, SHARED = 24, 1.7
# The least share of nonzeros in slices of diagonals for which code for them pays.
ON_DIAGONALS = 0.25
# Multiple of the L2 cache beyond which scattered gathers and writes are slower.
CACHES = 4


def shared_columns(indptr: np.ndarray, indices: np.ndarray, n: int, rows: int) -> float:
    """Nonzeros per distinct column in panels of `rows` rows: 1 if none is shared, at most `rows`.

    n : columns

    Of up to 32,768 nonzeros, in four places: 0.1 to 1 ms.
    """
    held = distinct = 0
    for first, last in _windows(indptr, rows, MOST):
        panels = -(-(last - first) // rows)
        panel = np.repeat(np.arange(last - first) // rows * n, np.diff(indptr[first : last + 1]))
        places = panel + indices[indptr[first] : indptr[last]]
        held += len(places)
        if panels * n <= TABLE * len(places):
            table = np.zeros(panels * n, np.bool_)
            table[places] = True
            distinct += np.count_nonzero(table)
        else:
            places = np.sort(places)
            distinct += np.count_nonzero(places[1:] != places[:-1]) + 1
    return held / max(1, distinct)


def on_diagonals(
    indptr: np.ndarray, indices: np.ndarray, n: int, lanes: int, dense: int = DIAGONAL
) -> bool:
    """Whether enough nonzeros are in slices of diagonals, of `lanes` rows, for code for them.

    n : columns
    dense : the least percentage of slots of such a slice with a nonzero

    Of up to 8,192 nonzeros, in four places: 0.1 to 0.4 ms.
    """
    held = stored = 0
    for first, last in _windows(indptr, lanes, MOST // 4):
        ptr = indptr[first : last + 1]
        size = {"n": n, "lanes": lanes, "dense": dense}
        diagonals = slice_diagonals(ptr - ptr[0], indices[ptr[0] : ptr[-1]], **size)
        held, stored = held + np.count_nonzero(diagonals >= 0), stored + ptr[-1] - ptr[0]
    return bool(held >= ON_DIAGONALS * max(1, stored))


def _windows(indptr: np.ndarray, rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole panels of `rows` rows with about `most` nonzeros, in some places."""
    m, nnz = len(indptr) - 1, int(indptr[-1])
    size = min(-(-nnz // WINDOWS), most)
    for begin in np.linspace(0, nnz - size, WINDOWS).astype(indptr.dtype):
        ends = np.array([begin, begin + size], indptr.dtype)  # of its type, which is searched as is
        first, last = np.searchsorted(indptr, ends, "right") - 1
        yield first // rows * rows, min(m, -(-last // rows) * rows)


def long_rows(m: int, n: int, nnz: int) -> bool:
    """Whether rows are long enough for panels, and rows of B read often enough for their copy."""
    return min(m, n) > 0 and nnz >= LENGTH * max(m, n)


def stays_near(rows: int, bytes: int) -> bool:
    """Whether rows of a number of bytes each stay near enough for visits in another order."""
    return rows * bytes <= CACHES * l2_bytes()
