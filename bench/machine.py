"""A process that finds out what this machine can do; `limits` asks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.timing import copy_bandwidth
from sparsetir.tuning.serving import serve

PEAK_SIZE = 1536


class Machine:
    """What the hardware can do with as many threads as the peers have."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def bandwidth(self, size: int, seconds: float) -> dict[str, Any]:
        """Bytes per second of a copy of that size."""
        return {"bytes_per_second": copy_bandwidth(size, self.threads, seconds)}

    def peak(self, seconds: float) -> dict[str, Any]:
        """Floating-point operations per second of a dense float32 product."""
        a, b = (np.ones((PEAK_SIZE, PEAK_SIZE), "float32") for _ in range(2))
        out = np.empty_like(a)
        best, end = float("inf"), time.perf_counter() + seconds
        while best == float("inf") or time.perf_counter() < end:
            start = time.perf_counter()
            np.matmul(a, b, out=out)
            best = min(best, time.perf_counter() - start)
        return {"flops_per_second": 2 * PEAK_SIZE**3 / best}


def serve_peer(answers: int, parent: int, words: Sequence[str]) -> None:
    """Answer until stdin ends; words : a name and the number of threads."""
    serve(answers, parent, lambda: Machine(int(words[1])))
