"""Time of a call on a GPU; calls that take turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeVar

from bench.timing import rotated, turn_statistics

Way = TypeVar("Way", bound=Hashable)
WARM_UP = 3


class Clock:
    """CUDA events around a call, before which the level-2 cache is overwritten.

    Writing the cache takes the GPU longer than a launch takes the CPU, so launches are not part of
    a time.

    torch : with a CUDA device
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, with cold caches."""
        cuda = self._torch.cuda
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def take_turns(
    clock: Any, ways: Mapping[Way, Callable[[int], Any]], rounds: int, calls: int, copies: int
) -> dict[Way, dict[str, float]]:
    """Seconds of ways, which take turns: minimum, median, and the spread among turns.

    ways : functions of the number of a copy of their operands
    calls : timed calls of each way in each round, after some to warm up
    """
    times: dict[Way, list[list[float]]] = {w: [] for w in ways}
    for turn in range(rounds):
        for way in rotated(ways, turn):
            copies_of = [partial(ways[way], copy) for copy in range(copies)]
            for i in range(WARM_UP):
                copies_of[i % copies]()
            times[way].append([clock.seconds(copies_of[i % copies]) for i in range(calls)])
    return {way: turn_statistics(turns) for way, turns in times.items()}
