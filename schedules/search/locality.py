"""Distances between uses of a row of B by a matrix: the misses of a cache of a number of rows.

Nonzeros per column tell how often a row of B is used, not whether it is still in a cache when it is
reused: both a mesh and a random graph have tens of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Nonzeros of a window; the first half fills the cache, the second is counted.
WINDOW = 1 << 15
# One window per `SHARE` windows of nonzeros, and the most of them.
SHARE, WINDOWS = 8, 4
STEPS = 16  # shares are rounded, so that similar patterns have equal ones
FIRST = 3  # the smallest cache has 2^3 rows


@dataclass(frozen=True)
class Locality:
    """Distances between uses of the same row of B, for a pattern.

    misses : shares of the nonzeros whose row of B is not among the last 8, 16, 32, ... distinct
        ones
    """

    misses: tuple[float, ...]

    @staticmethod
    def of(columns: Any) -> Locality:
        """Measure (nnz,) columns, at least one, in the order of visits.

        The working set of Denning (1968): the times between uses of a column determine the misses
        in windows of any length, and their sum the number of columns in a window.

        Samples 4 windows of 32,768 nonzeros, or an eighth of fewer than 2^20. Rows that are
        used once in a window count as missed.
        """
        nnz = len(columns)
        count = min(WINDOWS, max(1, nnz // (SHARE * WINDOW)))
        size = min(WINDOW, max(nnz // (SHARE * count), min(nnz, WINDOW // SHARE)))
        bits = max(1, size.bit_length() - 1)
        size, half = min(nnz, 1 << bits), max(1, min(nnz, 1 << bits) // 2)
        times = np.zeros(half + 1, np.int64)
        for start in np.linspace(0, nnz - size, count + 2).astype(np.int64)[1:-1]:
            times += _times(np.asarray(columns[start : start + size]), half, bits)
        # Share of the nonzeros whose last use lies farther back, for each time.
        farther = 1 - np.cumsum(times[:-1]) / (max(1, size - half) * count)
        held = np.cumsum(farther)
        rows = 1 << np.arange(FIRST, bits + 1)
        window = np.minimum(np.searchsorted(held, rows), half - 1)
        misses = (np.ceil(farther[window] * STEPS) / STEPS).tolist()
        return Locality(tuple(float(x) for x in misses))

    def missed(self, rows: int) -> float:
        """The share of nonzeros that miss a cache of this many rows."""
        if rows < 1 << FIRST or not self.misses:
            return 1.0
        return self.misses[min(rows.bit_length() - 1 - FIRST, len(self.misses) - 1)]


def _times(columns: np.ndarray, half: int, bits: int) -> np.ndarray:
    """Counts of nonzeros of the second half by the time since their row was used, longest last.

    bits : that represent a position in the window
    """
    keys = np.sort((columns.astype(np.int64) << bits) | np.arange(len(columns)))
    column, place = keys >> bits, keys & ((1 << bits) - 1)
    again = np.flatnonzero((column[1:] == column[:-1]) & (place[1:] >= len(columns) - half))
    times = np.minimum(place[again + 1] - place[again], half)
    return np.bincount(times, minlength=half + 1)[: half + 1]
