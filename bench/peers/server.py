"""The process of a peer, in which :class:`bench.peers.turns.Worker` times calls.

There is one per peer, because OpenMP runtimes in one process wait for each other.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import cases
from bench.peers.libraries import PEERS, Peer
from bench.timing import timed
from sparsetir.runtime.file_errors import first_line
from sparsetir.tuning.serving import Missing, serve
from sparsetir.tuning.timing import turn, warm_up

WARM_UP = 0.002  # seconds of calls before those that count, at least one call
SLOW = 0.03  # a call that takes longer is timed once per turn


class Server:
    """The requests that the process answers; `op` names a method."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.calls: dict[str, Callable[[], Any]] = {}

    def prepare(self, folder: str, case: dict[str, Any]) -> dict[str, Any]:
        """Load a case and run each of its ways once; results are left in the folder."""
        self.release()
        loaded = cases.load(Path(folder), **case)
        refused = {}
        for name, call in self.peer.prepare(loaded).items():
            try:
                result = self.peer.to_numpy(call())
            except (NotImplementedError, RuntimeError, TypeError) as error:
                if loaded.dtype in ("float32", "float64"):
                    raise
                refused[name] = first_line(error)
                continue
            self.calls[name] = call
            np.save(Path(folder) / f"result-{name}.npy", result)
        if refused and not self.calls:
            raise Missing("; ".join(f"{name}: {why}" for name, why in refused.items()))
        return {"variants": list(self.calls), "about": self.peer.about(), "refused": refused}

    def turn(self, variant: str, seconds: float, least: int) -> dict[str, Any]:
        """Nanoseconds of each of some calls, after a warm-up.

        `switches` : the number of involuntary context switches meanwhile
        """
        once = timed(self.calls[variant])
        gc.collect()
        gc.disable()  # it would run in some calls and not in others; `release` collects
        slow = once() > SLOW
        if not slow:
            warm_up(once, WARM_UP)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        times = [once()] if slow else turn(once, seconds, least)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
        return {"times": [round(1e9 * t) for t in times], "switches": switches}

    def release(self) -> dict[str, Any]:
        """Forget the case."""
        self.calls = {}
        self.peer.release()
        gc.collect()
        return {}


def serve_peer(answers: int, parent: int, words: Sequence[str]) -> None:
    """Answer requests until stdin ends.

    words : name of the peer, threads, modules to import
    """
    name, threads, *modules = words

    def make() -> Server:
        for module in modules:
            import_module(module)
        try:
            return Server(PEERS[name](int(threads)))
        except ImportError as error:
            raise Missing(str(error)) from error

    serve(answers, parent, make)
