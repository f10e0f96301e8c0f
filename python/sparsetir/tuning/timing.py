"""Timing of calls in several turns, fewer for slow or hopeless ones.

A machine may slow down for seconds, because of other programs or heat. So calls take turns with
those of a yardstick, and are measured relative to them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from sparsetir.records.task import OK, PRUNED, Outcome

TOO_SLOW = 3.0  # ratio to the best from which a config is given up
PROBES, PROBE = 3, 0.005  # calls and seconds of a probe, which is repeated before giving up
LONG = 0.3  # seconds after which a probe ends early
SLOW = 0.02  # seconds of a call from which turns are single calls
TURNS, TURN = 5, 0.02  # number of turns, and seconds of each
PAUSE = 0.005  # seconds between turns, for a disturbance to pass
GROUP = 0.001  # seconds of calls that are synchronised together

# Seconds of calls, and of the yardstick's in between, if there is one.
Turn = tuple[Sequence[float], Sequence[float]]


def timed(
    call: Callable[[], None],
    finish: Callable[[], None] | None,
    best: float | None,
    yardstick: tuple[Callable[[], None], float] | None = None,
) -> Outcome:
    """Time calls: state, minimum and median seconds.

    finish : synchronises with asynchronous calls, as on a GPU: short calls are then timed in
        groups, like those of a program that reads no result in between
    best : seconds; calls that take TOO_SLOW times as long are given up
    yardstick : a reference call of relative times, and its nominal seconds; None for absolute ones
    """
    calls, seconds = [call], None
    if yardstick is not None:
        calls, seconds = [call, yardstick[0]], yardstick[1]

    def group(run: Callable[[], None], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        if finish is not None:
            finish()
        return (time.perf_counter() - start) / count

    def probe(run: Callable[[], None]) -> list[float]:
        times: list[float] = []
        while sum(times) < LONG and (len(times) < PROBES or sum(times) < PROBE):
            times.append(group(run, 1))
        return times

    def timed_turn(run: Callable[[], None], count: int) -> list[float]:
        time.sleep(PAUSE)
        warm_up(lambda: group(run, count))
        return turn(lambda: group(run, count), TURN)

    with without_gc():
        first = _each(calls, probe)
        if too_slow(first, best, seconds):
            time.sleep(PAUSE)  # another process may have had the processor
            again = first if sum(first[0]) >= LONG else _each(calls, probe)
            first = [*first[0], *again[0]], [*first[1], *again[1]]
            if too_slow(first, best, seconds):
                return summary(PRUNED, [first], seconds)
        if min(first[0]) > SLOW:
            turns = [first]
            while len(turns) < TURNS and (len(turns) < PROBES or _passed(turns) < TURNS * TURN):
                turns.append(_each(calls, lambda run: [group(run, 1)], len(turns)))
            return summary(OK, turns, seconds)
        count = 1 if finish is None else max(1, round(GROUP / min(first[0])))
        turns = [_each(calls, lambda run: timed_turn(run, count), n) for n in range(TURNS)]
        return summary(OK, turns, seconds)


def _each(
    calls: Sequence[Callable[[], None]],
    times: Callable[[Callable[[], None]], list[float]],
    number: int = 0,
) -> Turn:
    """A turn of the calls and the yardstick's, in alternating order."""
    if len(calls) == 1:
        return times(calls[0]), []
    if number % 2:
        others = times(calls[1])
        return times(calls[0]), others
    return times(calls[0]), times(calls[1])


def _passed(turns: Sequence[Turn]) -> float:
    """The total seconds of all calls, without the yardstick's."""
    return sum(sum(times) for times, _ in turns)


def too_slow(turn: Turn, best: float | None, seconds: float | None = None) -> bool:
    """Whether the first calls are so slow that the config can be given up.

    seconds : nominal seconds of the yardstick
    """
    return best is not None and _least([turn], seconds) > TOO_SLOW * best


def summary(state: str, turns: Sequence[Turn], seconds: float | None = None) -> Outcome:
    """The outcome of turns.

    seconds : nominal seconds of the yardstick; then the median over turns counts, since the
        machine's speed may differ between turns
    """
    every = [x for times, _ in turns for x in times]
    extra: dict[str, object] = {"times": len(every), "measured": min(every)}
    if seconds is not None:
        extra["yardstick"] = min(x for _, others in turns for x in others)
    least = _least(turns, seconds)
    typical = median(every)
    if seconds is not None:
        typical = least * median(median(times) / min(times) for times, _ in turns)
    return Outcome(state, least, typical, extra=extra)


def _least(turns: Sequence[Turn], seconds: float | None) -> float:
    """The seconds of the fastest calls."""
    if seconds is None:
        return min(x for times, _ in turns for x in times)
    return seconds * median(min(times) / min(others) for times, others in turns)


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable Python's garbage collector, which would run in some calls and not in others."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def warm_up(once: Callable[[], float], seconds: float = 0.0) -> None:
    """Run untimed calls for some seconds, at least one; once : see :func:`turn`."""
    end = time.perf_counter() + seconds
    once()
    while time.perf_counter() < end:
        once()


def turn(once: Callable[[], float], seconds: float, least: int = 1) -> list[float]:
    """Time consecutive calls; return the seconds of each.

    once : makes a call, or a group of them, and returns the seconds of one
    seconds : duration of the turn; least : minimum number of calls
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        times.append(once())
    return times
