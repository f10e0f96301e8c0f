"""What `plan` asks when its user names no config: the records of this machine."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

from sparsetir.schedules.configs import from_data
from sparsetir.tuning.record import Key
from sparsetir.tuning.records import RecordError, Records, default_path
from sparsetir.tuning.task import Task

__all__ = ["recorded_config"]

BUSY_SECONDS = 2.0  # that a plan waits for a process that writes
# A file that was written this short ago may be written again and keep its time stamp.
SETTLED_SECONDS = 2.0
# What was found in the file as it was last seen, by key; None where there is no record.
_seen: tuple[Any, dict[Key, Any]] = (None, {})
_warned: set[str] = set()


def recorded_config(task: Task) -> Any | None:
    """The config that was found best for a task on this machine; None where there is none.

    None too for a config that this version does not know. Where the file cannot be read, warns
    once for each file and gives None.
    """
    path = default_path()
    if path is None:
        return None
    try:
        stat = os.stat(path)
    except OSError:
        return None
    stamp = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    settled = time.time() - stat.st_mtime > SETTLED_SECONDS
    try:
        data = _best(Records(path, busy_seconds=BUSY_SECONDS), Key.of(task), stamp, settled)
    except RecordError as error:
        if str(path) not in _warned:
            _warned.add(str(path))
            warnings.warn(f"plan: records are not used: {error}", RuntimeWarning, stacklevel=3)
        return None
    try:
        return None if data is None else from_data(data)
    except ValueError:
        return None


def _best(records: Records, key: Key, stamp: Any, settled: bool) -> Any:
    """The data of the best config for a key, from what was seen where the file is the same."""
    global _seen
    known, found = _seen
    if known != stamp:
        found = {}
    if key not in found:
        record = records.best(key)
        found[key] = None if record is None else dict(record.config)
    if settled:
        _seen = stamp, found
    return found[key]
