"""How long calls take: the least of several turns, less for what is slow or hopeless."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from sparsetir.tuning.task import OK, PRUNED

__all__ = ["GROUP", "PROBES", "SLOW", "TURN", "TURNS", "hopeless", "summary", "timed"]

HOPELESS = 3.0  # times the best: not measured to the end
PROBES, PROBE = 3, 0.005  # calls and seconds after which it is seen, when seen twice
LONG = 0.3  # seconds of calls after which fewer are enough
SLOW = 0.02  # seconds of a call for which no turns are taken
TURNS, TURN = 5, 0.02  # their seconds
PAUSE = 0.005  # between turns, for what disturbs one to be over in the next
GROUP = 0.001  # seconds of calls that are waited for together


def timed(
    call: Callable[[], None],
    finish: Callable[[], None] | None,
    best: float | None,
) -> dict[str, Any]:
    """State, least and median seconds of calls, as fields of an Outcome.

    finish : waits for what calls have begun, as on a GPU: short calls are then timed some together,
        as those of a program that looks at no result in between
    best : seconds; calls that take HOPELESS times as long are not measured to the end
    """

    def group(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if finish is not None:
            finish()
        return (time.perf_counter() - start) / count

    gc.collect()
    gc.disable()
    try:

        def probe() -> list[float]:
            times: list[float] = []
            while sum(times) < LONG and (len(times) < PROBES or sum(times) < PROBE):
                times.append(group(1))
            return times

        times = probe()
        if hopeless(times, best):
            time.sleep(PAUSE)  # another process may have had the processor
            times += probe() if sum(times) < LONG else []
            if hopeless(times, best):
                return summary(PRUNED, times)
        each = min(times)
        if each > SLOW:
            while len(times) < PROBES or sum(times) < TURNS * TURN:
                times.append(group(1))
            return summary(OK, times)
        count = 1 if finish is None else max(1, round(GROUP / each))
        times = []  # those up to here were the warm-up
        for _ in range(TURNS):
            time.sleep(PAUSE)
            group(count)
            end = time.perf_counter() + TURN
            while time.perf_counter() < end:
                times.append(group(count))
        return summary(OK, times)
    finally:
        gc.enable()


def hopeless(times: Sequence[float], best: float | None) -> bool:
    """Whether the first calls are so slow that the others need not be seen."""
    return best is not None and min(times) > HOPELESS * best


def summary(state: str, times: Sequence[float]) -> dict[str, Any]:
    """Fields of an Outcome; `extra` says how many times there are."""
    least, median = min(times), statistics.median(times)
    return {"state": state, "seconds": least, "median": median, "extra": {"times": len(times)}}
