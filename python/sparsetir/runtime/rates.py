"""Rates of a CPU by NumPy: the bandwidth of copies, the rate of dense products."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.lib.stride_tricks import as_strided

MOST_REPEATED = 2 * 2**20  # bytes of a part that is copied many times in one call
LEAST_REPEATED = 600  # NumPy keeps the interpreter's lock below 500 elements
PEAK_SIZE = 1536


def copy_bandwidth(size: int, threads: int, seconds: float) -> float:
    """Bytes per second, read plus written, of copies whose two sides are `size` bytes together.

    Each thread copies its own part repeatedly, so that small parts stay in caches, as in the
    measured call. Returns the best of five, and at least the rate of one thread.
    """
    part = max(64, size // (2 * threads))
    pairs = [(np.ones(part, np.uint8), np.zeros(part, np.uint8)) for _ in range(threads)]

    def work(pair: tuple[np.ndarray, np.ndarray], turns: int) -> None:
        if part > MOST_REPEATED:
            for _ in range(turns):
                np.copyto(pair[1], pair[0])
            return
        # A single call for all turns, as threads would wait for each other's interpreter lock:
        # arrays whose elements are the whole part, all at the same address.
        source, target = (as_strided(x.view(f"V{part}"), (turns,), (0,)) for x in pair)
        np.copyto(target, source)

    least = 3 if part > MOST_REPEATED else LEAST_REPEATED
    start = time.perf_counter()
    work(pairs[0], least)
    each = (time.perf_counter() - start) / least
    turns = max(1 if part > MOST_REPEATED else least, int(seconds / 5 / each))
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(work, pairs, [turns] * threads))
            best = max(best, 2 * part * threads * turns / (time.perf_counter() - start))
    return best if threads == 1 else max(best, copy_bandwidth(size, 1, seconds))


def dense_rate(seconds: float) -> float:
    """Floating-point operations per second of a dense float32 product, by NumPy's BLAS."""
    a, b = (np.ones((PEAK_SIZE, PEAK_SIZE), "float32") for _ in range(2))
    out = np.empty_like(a)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        np.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * PEAK_SIZE**3 / best
