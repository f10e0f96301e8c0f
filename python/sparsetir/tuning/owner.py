"""Who is measuring a config, and whether that process is still there."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

# Runs of this process that have not ended.
_runs: set[str] = set()


class Owner:
    """A run of the tuner, as the claims that it makes name it.

    patience : seconds that a claim lasts for a process on another machine, which cannot be looked
        at; longer than a measurement may take
    """

    def __init__(self, patience: float) -> None:
        self.run = uuid.uuid4().hex
        self.patience = patience
        _runs.add(self.run)

    def close(self) -> None:
        """The run has ended: what it still claims is free."""
        _runs.discard(self.run)

    def claim(self) -> dict[str, Any]:
        """What is written beside a config that is being measured: JSON."""
        pid = os.getpid()
        return {
            "run": self.run, "machine": _machine(), "pid": pid, "started": _started(pid),
            "until": time.time() + self.patience,
        }  # fmt: skip

    @staticmethod
    def lives(claim: Mapping[str, Any]) -> bool:
        """Whether the run that made a claim may still be measuring."""
        if claim["machine"] != _machine():
            return time.time() < claim["until"]
        if claim["pid"] == os.getpid():
            return claim["run"] in _runs
        # The number alone may by now be another process's.
        return _started(claim["pid"]) == claim["started"]


@cache
def _machine() -> str:
    """The machine since it started, and the process numbers' namespace: two containers differ."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux
    return "/".join(parts)


def _started(pid: int) -> float | None:
    """When a process began, in seconds since the machine did; None: there is none.

    Not by the clock, which may be set meanwhile.
    """
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return round(process.create_time() - psutil.boot_time(), 2)
    except psutil.NoSuchProcess:
        return None
