"""Time of a call on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
        """Of one call, with nothing of it in the caches."""
        cuda = self._torch.cuda
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        cuda.synchronize()
        return start.elapsed_time(end) / 1e3
