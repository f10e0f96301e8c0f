"""What this machine can do, and the least time that a case can take on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.peers.cases import bytes_of, flops_of
from bench.peers.turns import Worker
from sparsetir.tuning.case import Case
from sparsetir.tuning.rates import copy_bandwidth, dense_rate
from sparsetir.tuning.serving import serve


def limit(case: Case, bytes_per_second: float, flops_per_second: float) -> dict[str, float]:
    """Seconds in which each array is moved once, and in which all is multiplied and added.

    bytes_per_second : of a copy whose two sides have the size of all arrays together
    flops_per_second : of a dense product
    """
    memory, compute = bytes_of(case) / bytes_per_second, flops_of(case) / flops_per_second
    about = {"bytes": bytes_of(case), "flops": flops_of(case)}
    about |= {"copy_bytes_per_second": bytes_per_second, "memory_seconds": memory}
    return {**about, "compute_seconds": compute, "seconds": max(memory, compute)}


class Machine:
    """Measures both rates with a number of threads, in a process of its own."""

    def __init__(self, threads: int, seconds: float) -> None:
        self.worker = Worker("machine", threads, {}, module="bench.machine", ahead=True)
        self.seconds = seconds
        self._peak = 0.0

    @property
    def peak(self) -> float:
        """Floating-point operations per second."""
        if not self._peak:
            self._peak = self.worker.ask("peak", seconds=self.seconds)["flops_per_second"]
        return self._peak

    def limit(self, case: Case) -> dict[str, Any]:
        """See `limit`, with the rates of this machine."""
        found = self.worker.ask("bandwidth", size=bytes_of(case), seconds=self.seconds)
        return limit(case, found["bytes_per_second"], self.peak)


class Rates:
    """What the process answers: with as many threads as the peers have."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def bandwidth(self, size: int, seconds: float) -> dict[str, Any]:
        """Bytes per second of a copy of that size."""
        return {"bytes_per_second": copy_bandwidth(size, self.threads, seconds)}

    def peak(self, seconds: float) -> dict[str, Any]:
        """Floating-point operations per second of a dense float32 product."""
        return {"flops_per_second": dense_rate(seconds)}


def serve_peer(answers: int, parent: int, words: Sequence[str]) -> None:
    """Answer until stdin ends; words : a name and the number of threads."""
    serve(answers, parent, lambda: Rates(int(words[1])))
