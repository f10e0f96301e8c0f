"""Records of tuning in an SQLite file that many processes read and write, and their look-up for
plans without a config of the user's.

The file has one table with a row per record: the record as JSON, and the columns that look-ups use.
Connections last for one call: they must not cross a fork, and opening one takes a fraction of a
millisecond.

Recognising a pattern takes a hash of all its indices, which costs as much as a small kernel. So it
is computed only if there is a record of the same problem for a pattern of about these sizes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf, log2
from pathlib import Path
from typing import TypeVar

from sparsetir.records.record import Key, Record, best_of_each, record_from_data, record_to_data
from sparsetir.records.task import Config, Sizes, Task, fingerprint, shape_class
from sparsetir.runtime.file_errors import as_path, first_line, user_path, write_whole
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.search.configs import from_data

BUSY_SECONDS = 60.0  # that a call waits for other processes at most
DAMAGED = (
    "it is damaged, or not a file of records; it is left unchanged: move it away, or set "
    "SPARSETIR_RECORDS to another file"
)
# alike : all fields of a key except the fingerprint, as text
TABLES = (
    "CREATE TABLE IF NOT EXISTS records "
    "(id TEXT PRIMARY KEY, alike TEXT, fingerprint TEXT, data TEXT)",
    "CREATE INDEX IF NOT EXISTS records_alike ON records (alike)",
)
FORMAT = "sparsetir records"
FORMAT_VERSION = 1  # of exported files


class RecordError(Exception):
    """Raised if records cannot be read or written; the message names the file and a remedy."""


def default_path() -> Path | None:
    """The file that records are kept in, or None to keep none.

    `SPARSETIR_RECORDS` names the file, or is empty to keep none; by default it is
    `sparsetir/records.sqlite` in `XDG_CACHE_HOME` or `~/.cache`.
    """
    return user_path("SPARSETIR_RECORDS", "records.sqlite")


class Records:
    """The records in a file; any number of processes and threads may use it at once.

    path : by default :func:`default_path`. Nothing is created before the first write. If records
        are switched off there are none, and added ones are dropped.
    busy_seconds : time that a call waits for other processes

    :meth:`add`, :meth:`load` and :meth:`forget` are transactions: once they return, their changes
    are permanent, even if the process is killed; if they fail, nothing has changed. All methods
    raise RecordError if the file cannot be read or written, as it is damaged, read-only, or the
    disk is full. The file is never deleted or overwritten.
    """

    def __init__(
        self, path: Path | str | None = None, *, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        self.path = default_path() if path is None else Path(path).expanduser()
        self._busy = busy_seconds

    def best(self, key: Key) -> Record | None:
        """The best record of a key for the present versions, by :attr:`Record.order`."""
        return self.best_by_fingerprint(key).get(key.fingerprint)

    def best_by_fingerprint(self, key: Key) -> dict[str, Record]:
        """The best record of each pattern, for keys like `key` in all but the fingerprint."""
        records = self._found("WHERE alike = ?", _group_key(key))
        best = best_of_each(record for record in records if record.is_current)
        return {other.fingerprint: record for other, record in best.items()}

    def add(self, record: Record) -> None:
        """Add a record, unless the file has its id already.

        Raises ValueError for a record with a field of the wrong type.
        """
        record_from_data(record_to_data(record))
        if self.path is not None:
            self._insert([record])

    def all(self) -> list[Record]:
        """Every record, the oldest first."""
        return sorted(self._found(), key=lambda record: record.date)

    def forget(self, key: Key) -> int:
        """Delete the records of a key; return how many there were."""
        if not self._exists():
            return 0
        command = "DELETE FROM records WHERE alike = ? AND fingerprint = ?"
        with self._connection() as connection:
            if not _has_table(connection):
                return 0
            return connection.execute(command, (_group_key(key), key.fingerprint)).rowcount

    def neighbours(self, key: Key, statistics: Mapping[str, float], count: int = 3) -> list[Record]:
        """The best record of each of the most similar problems, the nearest first.

        They share the operator, dtype, reduction, target and device, and differ in the pattern,
        features, heads or threads. The distance is that of the logarithms of statistics, features
        and threads. Records of other versions count, too: searches measure them again.
        """

        def kind(of: Key) -> tuple[object, ...]:
            return of.op, of.dtype, of.reduce, of.target, of.device, of.heads is None

        best = best_of_each(record for record in self._found() if kind(record.key) == kind(key))
        best.pop(key, None)
        return sorted(best.values(), key=lambda r: (_distance(key, statistics, r), r.id))[:count]

    def export(self, path: Path | str, *, replace: bool = False) -> int:
        """Write all records to a JSON file; return how many there are.

        The file appears when it is complete. Raises RecordError if it exists already, unless
        `replace`.
        """
        path = as_path("Records.export", "path", path)
        if path.exists() and not replace:
            raise RecordError(f"{path} exists already; give another name, or replace=True")
        if path.exists() and self.path is not None and path.samefile(self.path):
            raise RecordError(f"{path} is the file of the records themselves; give another name")
        data = [record_to_data(record) for record in self.all()]
        text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "records": data}, indent=1)
        try:
            write_whole(path, text + "\n")
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {error}") from error
        return len(data)

    def load(self, path: Path | str) -> int:
        """Add the records of a file that :meth:`export` wrote; return how many are new.

        Adds all or none: raises RecordError that names the first invalid one.
        """
        path = as_path("Records.load", "path", path)
        if self.path is None:
            raise RecordError("records are switched off; set SPARSETIR_RECORDS to a file")
        return self._insert(_read_export(path))

    def _exists(self) -> bool:
        try:
            there = self.path is not None and self.path.exists()
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error}") from error
        if there and self.path is not None and not self.path.is_file():
            raise RecordError(f"{self.path}: expected a file, which it is not")
        return there

    def _insert(self, records: Iterable[Record]) -> int:
        """Add all records or none; return how many are new."""
        assert self.path is not None
        self._exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{self.path} cannot be made: {error}") from error
        command = "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)"
        with self._connection() as connection:
            for make in TABLES:
                connection.execute(make)
            return sum(connection.execute(command, _row(record)).rowcount for record in records)

    def _found(self, which: str = "", *values: str) -> list[Record]:
        """The records of a query."""
        if not self._exists():
            return []
        records = []
        with self._connection() as connection:
            rows = f"SELECT id, data FROM records {which}"
            for name, data in connection.execute(rows, values) if _has_table(connection) else ():
                try:
                    records.append(record_from_data(json.loads(data)))
                except (ValueError, TypeError, RecursionError) as error:
                    raise RecordError(f"{self.path}: {DAMAGED} (record {name}: {error})") from error
        return records

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the file; errors are those of this module."""
        assert self.path is not None
        connection = None
        try:
            connection = sqlite3.connect(self.path, timeout=self._busy)
            with connection:  # commits, or rolls back
                yield connection
        except (sqlite3.Error, UnicodeError) as error:
            raise RecordError(f"{self.path}: {_advice(error)} ({error})") from error
        finally:
            if connection is not None:
                connection.close()


def _has_table(connection: sqlite3.Connection) -> bool:
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'records'")
    return bool(tables.fetchone()[0])


def _advice(error: Exception) -> str:
    """A remedy for an error of SQLite."""
    text = str(error).lower()
    if "locked" in text or "busy" in text:
        return "other processes keep it locked; try again, or use another file"
    if "full" in text or "disk i/o" in text:
        return "the disk is full or failing; what was recorded before is kept"
    if "readonly" in text or "unable to open" in text:
        return "it cannot be opened for this; check the permissions of file and folder"
    return DAMAGED


def _group_key(key: Key) -> str:
    """The fields of a key except the fingerprint."""
    return json.dumps({**asdict(key), "fingerprint": ""}, sort_keys=True)


def _row(record: Record) -> tuple[str, str, str, str]:
    data = json.dumps(record_to_data(record))
    return record.id, _group_key(record.key), record.key.fingerprint, data


def _distance(key: Key, statistics: Mapping[str, float], record: Record) -> float:
    """The distance of a problem from a record's; infinite if one of them has no statistics."""
    known = [name for name in statistics if name in record.statistics]
    if not known:
        return inf
    pairs = [(statistics[name], record.statistics[name]) for name in known]
    pairs += [(key.feat, record.key.feat), (key.threads, record.key.threads)]
    return sum((log2(1 + abs(a)) - log2(1 + abs(b))) ** 2 for a, b in pairs)


def _read_export(path: Path) -> list[Record]:
    if path.exists() and not path.is_file():
        raise RecordError(f"{path}: expected a file, which it is not")
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} holds no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordError(f'{path} holds no records: expected "format": "{FORMAT}"')
    if data.get("version") != FORMAT_VERSION or not isinstance(data.get("records"), list):
        raise RecordError(f'{path}: expected "version": {FORMAT_VERSION} and a list "records"')
    records = []
    for number, item in enumerate(data["records"], 1):
        try:
            records.append(record_from_data(item))
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path}: record {number}: {error}") from error
    return records


# -- look-up for plans -----------------------------------------------------------------------------


T = TypeVar("T")
Configs = Mapping[str, Mapping[str, object]]  # data of configs, by fingerprint

PLAN_BUSY_SECONDS = 2.0  # that a plan waits for a process that writes
# A file written more recently than this may be written again without a new time stamp.
SETTLED_SECONDS = 2.0
# With one feature these are the same problem, and have the same configs.
COUNTERPARTS = {"spmm": "spmv", "spmv": "spmm"}
# The state of the file when it was last read, and the data of the best configs by fingerprint, for
# this many keys without fingerprints.
MOST_KEYS = 1024
_seen: tuple[object, dict[Hashable, Configs]] = (None, {})
_warned: set[str] = set()


def there_are_records() -> bool:
    """Whether this machine has a file of records; most have none, and the check is quick."""
    path = default_path()
    return path is not None and os.path.exists(path)


def there_are_records_of(op: str) -> bool:
    """Whether the file has a record of an operator or function; quick while it is unchanged."""

    def read(records: Records) -> dict[str, Record]:
        return {record.id: record for record in records.all() if record.key.op == op}

    return bool(_configs(("op", op), read))


def recorded_config(task: Task, pattern: Callable[[], CsrPattern] | None = None) -> Config | None:
    """The best config recorded for a task on this machine, or None.

    pattern : returns the pattern of the task's matrix, for :func:`fingerprint`; the matrix may then
        be :class:`Sizes`. Called only if there are records for about these sizes

    Also None for a config that this version does not know. If the file cannot be read, warns once
    per file and returns None. With one feature, records of "spmv" serve "spmm" and vice versa, if
    the operator has none of its own.
    """
    configs = recorded_configs(task)
    return _known(configs, lambda: fingerprint(task.matrix if pattern is None else pattern()))


def _known(configs: Configs, fingerprint: Callable[[], str]) -> Config | None:
    """The config of a pattern, if this version knows it; calls `fingerprint` if there is any."""
    data = configs.get(fingerprint()) if configs else None
    try:
        return None if data is None else from_data(data)
    except ValueError:
        return None


def recorded_of_program(key: Callable[[], Key], like: Hashable) -> Config | None:
    """Do the same as :func:`recorded_config` for a program with its arguments.

    key : returns the key
    like : equal for keys that differ in the fingerprint alone; faster to compute
    """
    configs = _configs(("program", like), lambda records: records.best_by_fingerprint(key()))
    return _known(configs, lambda: key().fingerprint)


def by_record(config: Config | None, make: Callable[[Config], T]) -> T | None:
    """Call `make` on a recorded config; None if there is none, or it fails.

    Warns of a failure: the template may have changed since.
    """
    if config is None:
        return None
    try:
        return make(config)
    except Exception as error:
        warn_of_record(config, error, stacklevel=4)
        return None


def warn_of_record(config: Config, error: Exception, stacklevel: int = 3) -> None:
    """Warn, once per config and error, that a recorded config failed and the default is used."""
    text = (
        f"plan: the record with the config {config} is not used, it failed: "
        f"{type(error).__name__}: {first_line(error)}"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def recorded_configs(task: Task) -> Configs:
    """Data of the best configs by fingerprint, for tasks that differ in the fingerprint alone."""
    if not there_are_records():
        return {}
    options = (task.reduce, task.heads, task.threads, str(task.target))
    like = (task.op, task.dtype, task.feat, *options, shape_class(task))
    return _configs(like, lambda records: _read(records, task))


def _configs(like: Hashable, read: Callable[[Records], Mapping[str, Record]]) -> Configs:
    """Configs of the records that `read` returns, which is called again once the file changes."""
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
    known, configs = _seen
    if known != stamp:
        configs = {}
    if like not in configs:
        if len(configs) >= MOST_KEYS:
            configs = {}
        try:
            read_now = read(Records(path, busy_seconds=PLAN_BUSY_SECONDS))
            configs[like] = {name: dict(record.config) for name, record in read_now.items()}
        except RecordError as error:
            if str(path) not in _warned:
                _warned.add(str(path))
                warnings.warn(f"plan: records are not used: {error}", RuntimeWarning, stacklevel=5)
            return {}
    if settled:
        _seen = stamp, configs
    return configs[like]


def _read(records: Records, task: Task) -> Mapping[str, Record]:
    """Read the configs of :func:`recorded_configs` from the file."""
    key = Key.of(replace(task, matrix=Sizes(task.matrix.shape, task.matrix.nnz)))
    best = records.best_by_fingerprint(key)
    if task.feat == 1 and task.op in COUNTERPARTS:
        best = {**records.best_by_fingerprint(replace(key, op=COUNTERPARTS[task.op])), **best}
    return best
