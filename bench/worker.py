"""A process for one peer: `python -m sparsetir.bench.worker NAME THREADS [KEY=VALUE ...]`.

Requests come as lines of JSON on stdin, answers go to stdout. One process for each peer, because
OpenMP runtimes in one process wait for each other.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.bench import operators
from sparsetir.bench.peers import PEERS, Missing, Peer
from sparsetir.bench.timing import copy_bandwidth

WARM_UP = 0.002  # seconds of calls before those that count, at least one call
SLOW = 0.03  # a call that takes longer is timed once in a turn
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG: a stopped process does not see that its parent is gone
PEAK_SIZE = 1536


class Server:
    """What the process can be asked for; `op` of a request is the name of a method."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.calls: dict[str, Callable[[], Any]] = {}

    def prepare(self, folder: str, case: dict[str, Any]) -> dict[str, Any]:
        """Load a case and run each way of computing it once; results are left in the folder."""
        self.release()
        loaded = operators.load(Path(folder), **case)
        refused = {}
        for name, call in self.peer.prepare(loaded).items():
            try:
                result = self.peer.to_numpy(call())
            except (NotImplementedError, RuntimeError, TypeError) as error:
                if loaded.dtype in ("float32", "float64"):
                    raise
                refused[name] = str(error).splitlines()[0]
                continue
            self.calls[name] = call
            np.save(Path(folder) / f"result-{name}.npy", result)
        if refused and not self.calls:
            raise Missing("; ".join(f"{name}: {why}" for name, why in refused.items()))
        return {"variants": list(self.calls), "about": self.peer.about(), "refused": refused}

    def turn(self, variant: str, seconds: float, least: int) -> dict[str, Any]:
        """Nanoseconds of each of some calls, after a warm-up.

        `switches` : how often another process took a processor away meanwhile
        """
        call, clock = self.calls[variant], time.perf_counter_ns
        times: list[int] = []
        gc.collect()
        gc.disable()
        start = clock()
        call()
        slow = clock() - start > SLOW * 1e9
        while not slow and clock() - start < WARM_UP * 1e9:
            call()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        end = clock() + seconds * 1e9
        while len(times) < (1 if slow else least) or (clock() < end and not slow):
            start = clock()
            call()
            times.append(clock() - start)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
        gc.enable()
        return {"times": times, "switches": switches}

    def release(self) -> dict[str, Any]:
        """Forget the case."""
        self.calls = {}
        self.peer.release()
        gc.collect()
        return {}

    def totals(self) -> dict[str, Any]:
        """What the process has used up to now."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"bytes": most, "compilations": self.peer.compilations()}


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


def serve(name: str, threads: int, options: dict[str, str]) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this one
    try:
        server = Machine(threads) if name == "machine" else Server(PEERS[name](threads, options))
        first = {}
    except (ImportError, Missing) as error:
        server, first = None, {"missing": str(error)}
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin if server is not None else ():
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("op"))(**request)
        except (Missing, NotImplementedError) as error:
            answer = {"missing": str(error).splitlines()[0]}
        except Exception as error:  # told by the driver, under the name of the peer
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), dict(w.split("=", 1) for w in sys.argv[3:]))
