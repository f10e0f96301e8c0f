"""A turn of calls: the part that every measurement with a clock of this machine is made of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def alone() -> Iterator[None]:
    """Without Python's collector of cycles, which would run in some calls and not in others."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def warm_up(once: Callable[[], float], seconds: float = 0.0) -> None:
    """Calls that do not count, for so many seconds, at least one; `once` as for :func:`turn`."""
    end = time.perf_counter() + seconds
    once()
    while time.perf_counter() < end:
        once()


def turn(once: Callable[[], float], seconds: float, least: int = 1) -> list[float]:
    """Seconds of each of some calls in a row.

    once : makes a call, or some of them together, and gives the seconds of one
    seconds : of the turn; least : calls
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        times.append(once())
    return times
