"""The records of this machine, by which plans are made when their user names no config.

To know a pattern again takes a hash of all its indices, which costs as much as small kernels do. So
it is computed only where there is a record of the same problem for a pattern of about these sizes.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from sparsetir.records.fingerprint import Sizes, fingerprint, shape_class
from sparsetir.records.record import Key, Record
from sparsetir.records.records import RecordError, Records, default_path
from sparsetir.records.task import Config, Task, Tunable
from sparsetir.runtime.file_errors import first_line
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.search.configs import from_data

T = TypeVar("T")

BUSY_SECONDS = 2.0  # that a plan waits for a process that writes
# A file that was written this short ago may be written again and keep its time stamp.
SETTLED_SECONDS = 2.0
# With one feature these are the same problem, and have the same configs.
ALIKE = {"spmm": "spmv", "spmv": "spmm"}
# What was found in the file as it was last seen: by all that a key says but the fingerprint, the
# data of the best config by fingerprint. Text and numbers of the file alone, for so many keys.
MOST_KEYS = 1024
_seen: tuple[object, dict[object, Mapping[str, object]]] = (None, {})
_warned: set[str] = set()


def there_are_records() -> bool:
    """Whether this machine has a file of them: most have none, and to look is quick."""
    path = default_path()
    return path is not None and os.path.exists(path)


def there_are_records_of(op: str) -> bool:
    """Whether the file has any of an operator or function; quick where the file is as it was."""

    def read(records: Records) -> Mapping[str, object]:
        return {"": {}} if any(record.key.op == op for record in records.all()) else {}

    return bool(_configs(("op", op), read))


def recorded_config(task: Task, pattern: Callable[[], CsrPattern] | None = None) -> Config | None:
    """The config that was found best for a task on this machine; None where there is none.

    pattern : gives that of the task's matrix, as :func:`fingerprint` takes it; the matrix then may
        be :class:`Sizes`. Called only where there are records for about such sizes

    None too for a config that this version does not know. Where the file cannot be read, warns
    once for each file and gives None. With one feature, records of "spmv" serve "spmm" and the
    other way round, where it has none of its own.
    """
    found = recorded_configs(task)
    return _known(found, lambda: fingerprint(task.matrix if pattern is None else pattern()))


def _known(found: Mapping[str, Any], fingerprint: Callable[[], str]) -> Config | None:
    """The config of a pattern, if this version knows it; `fingerprint` is called where any is."""
    data = found.get(fingerprint()) if found else None
    try:
        return None if data is None else from_data(data)
    except ValueError:
        return None


def by_record(
    task: Task, make: Callable[[Config], T], pattern: Callable[[], CsrPattern] | None = None
) -> T | None:
    """Make something of the config recorded for a task; None where there is none, or it fails.

    A failure is warned of: the template may have changed since.

    make : gives it, of a config
    pattern : as for :func:`recorded_config`
    """
    return _made(recorded_config(task, pattern), make)


def program_by_record(task: Tunable, like: Hashable, make: Callable[[Config], T]) -> T | None:
    """As :func:`by_record`, of a program with its arguments.

    like : tells it from all that it is not like, but for the fingerprint; quicker than the key
    """

    def read(records: Records) -> Mapping[str, object]:
        return _data(records.best_by_fingerprint(Key.of(task)))

    found = _configs(("program", like), read)
    return _made(_known(found, lambda: task.identity()["fingerprint"]), make)


def _made(config: Config | None, make: Callable[[Config], T]) -> T | None:
    """See :func:`by_record`."""
    if config is None:
        return None
    try:
        return make(config)
    except Exception as error:
        warn_of_record(config, error, stacklevel=5)
        return None


def warn_of_record(config: Config, error: Exception, stacklevel: int = 3) -> None:
    """Say, once for each config and error, that what is recorded failed and the default serves."""
    text = (
        f"plan: the record with the config {config} is not used, it failed: "
        f"{type(error).__name__}: {first_line(error)}"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def recorded_configs(task: Task) -> Mapping[str, Any]:
    """Data of the best configs for what is like the task in all but the fingerprint, by that."""
    options = (task.reduce, task.heads, task.threads, str(task.target))
    like = (task.op, task.dtype, task.feat, *options, shape_class(task))
    return _configs(like, lambda records: _read(records, task))


def _configs(like: Hashable, read: Callable[[Records], Mapping[str, object]]) -> Mapping[str, Any]:
    """Of the file as it is what `read` gave for it, which is called again when that has changed."""
    global _seen
    path = default_path()
    if path is None:
        return {}
    try:
        stat = os.stat(path)
    except OSError:
        return {}
    stamp = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    settled = time.time() - stat.st_mtime > SETTLED_SECONDS
    known, found = _seen
    if known != stamp:
        found = {}
    if like not in found:
        if len(found) >= MOST_KEYS:
            found = {}
        try:
            found[like] = read(Records(path, busy_seconds=BUSY_SECONDS))
        except RecordError as error:
            if str(path) not in _warned:
                _warned.add(str(path))
                warnings.warn(f"plan: records are not used: {error}", RuntimeWarning, stacklevel=5)
            return {}
    if settled:
        _seen = stamp, found
    return found[like]


def _read(records: Records, task: Task) -> Mapping[str, object]:
    """Read what :func:`recorded_configs` gives from the file."""
    sizes = Sizes(task.matrix.shape, task.matrix.nnz)
    key = Key.of(replace(task, matrix=cast(Any, sizes)))
    found = records.best_by_fingerprint(key)
    if task.feat == 1 and task.op in ALIKE:
        found = {**records.best_by_fingerprint(replace(key, op=ALIKE[task.op])), **found}
    return _data(found)


def _data(records: Mapping[str, Record]) -> Mapping[str, object]:
    """Their configs."""
    return {name: dict(record.config) for name, record in records.items()}
