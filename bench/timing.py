"""Clocks: interleaved repetitions, and the copy bandwidth that results are held against."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

WARM_UP = 3
MOST_REPEATED = 2 * 2**20  # bytes of a part that is copied many times in one call
LEAST_REPEATED = 600  # NumPy keeps the interpreter's lock below 500 elements


def progress(text: str) -> None:
    """Say what is being measured, on one line of a terminal or on one each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def clock_of(threads: int) -> Callable[[], float]:
    """Of one thread that of the processor, which others who use the machine change less."""
    return time.process_time if threads == 1 else time.perf_counter


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    seconds: float,
    least: int = 5,
    most: int = 1000,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = WARM_UP,
) -> dict[str, dict[str, float]]:
    """Minimum and median in seconds of calls that take turns, after a warm-up.

    Every second round goes backwards: what a call leaves in caches serves the one that follows.

    seconds : how long to go on, at least `least` rounds and at most `most`
    clock : of seconds
    warm_up : rounds that do not count
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = clock() + seconds
    rounds = 0
    while rounds < least + warm_up or (rounds < most and clock() < end):
        for name in list(calls)[:: -1 if rounds % 2 else 1]:
            start = clock()
            calls[name]()
            found[name].append(clock() - start)
        rounds += 1
    return {name: shortest(t[warm_up:], rounds=rounds) for name, t in found.items()}


def shortest(times: Sequence[float], **more: Any) -> dict[str, Any]:
    """Minimum and median of times, and what else there is to say."""
    return {"min": min(times), "median": statistics.median(times), **more}


def copy_bandwidth(size: int, threads: int, seconds: float) -> float:
    """Bytes per second, read plus written, of copies whose two sides are `size` bytes together.

    Each thread copies a part of its own again and again: what is small stays in caches here as it
    does in the measured call. The best of five, and at least what one thread reaches.
    """
    part = max(64, size // (2 * threads))
    pairs = [(np.ones(part, np.uint8), np.zeros(part, np.uint8)) for _ in range(threads)]

    def work(pair: tuple[np.ndarray, np.ndarray], turns: int) -> None:
        if part > MOST_REPEATED:
            for _ in range(turns):
                np.copyto(pair[1], pair[0])
            return
        # One call for all turns, or threads waited for each other to get the interpreter's lock:
        # arrays whose elements are the whole part, all of them at the same place.
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
