"""Clocks: interleaved repetitions."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

WARM_UP = 3


def progress(text: str) -> None:
    """Print what is being measured, on one line of a terminal or on one each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def clock_of(threads: int) -> Callable[[], float]:
    """The clock for measuring: for one thread CPU time, which other work changes less."""
    return time.process_time if threads == 1 else time.perf_counter


def timed(
    call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Seconds of each call."""

    def once() -> float:
        start = clock()
        call()
        return clock() - start

    return once


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    seconds: float,
    least: int = 5,
    most: int = 1000,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = WARM_UP,
) -> dict[str, dict[str, float]]:
    """Minimum and median in seconds of calls that take turns, after a warm-up.

    seconds : duration, with at least `least` rounds and at most `most`
    clock : returns seconds
    warm_up : rounds that do not count
    """
    steps = {name: timed(call, clock) for name, call in calls.items()}
    return in_turns(steps, seconds, least, most, clock, warm_up)


def in_turns(
    steps: Mapping[Any, Callable[[], float]],
    seconds: float,
    least: int,
    most: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 0,
) -> dict[Any, dict[str, float]]:
    """The same for steps that return their own seconds.

    Every second round is in reverse order: a call finds in caches what the previous one left.
    """
    times: dict[Any, list[float]] = {name: [] for name in steps}
    end = clock() + seconds
    rounds = 0
    while rounds < least + warm_up or (rounds < most and clock() < end):
        for name in list(steps)[:: -1 if rounds % 2 else 1]:
            times[name].append(steps[name]())
        rounds += 1
    return {name: shortest(t[warm_up:], rounds=rounds) for name, t in times.items()}


def shortest(times: Sequence[float], **more: Any) -> dict[str, Any]:
    """Minimum and median of times, with further entries."""
    return {"min": min(times), "median": statistics.median(times), **more}


def turn_statistics(turns: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Minimum and median of turns of calls; noise: a quarter of turns were that near to it."""
    every, best = [t for turn in turns for t in turn], sorted(map(min, turns))
    noise = best[len(best) // 4] / best[0] - 1
    return shortest(every, noise=noise, turns=len(turns), calls=len(every))


def rotated(names: Iterable[Any], turn: int) -> list[Any]:
    """Names in the order of a turn: each turn starts with another one."""
    names = list(names)
    first = turn % max(1, len(names))
    return names[first:] + names[:first]
