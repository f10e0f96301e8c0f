"""Records of tuning: one file that many processes read and write.

A file of SQLite with a rollback journal: a write-ahead log is faster for many writers, yet needs
memory that all of them share, which network file systems do not have, and two more files beside
this one. Records come at most every few seconds, so writers wait for each other. Connections live
as long as one call: they may not be taken through a fork, and opening one takes a fraction of a
millisecond.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf, log2
from pathlib import Path
from typing import Any

from sparsetir.records.files import write_whole
from sparsetir.records.record import Key, Record, best_of_each, record_from_data, record_to_data
from sparsetir.records.schema import RECORDS, SchemaError, check_schema, insert, prepare, to_record
from sparsetir.runtime.file_errors import as_path

BUSY_SECONDS = 60.0  # that a call waits for other processes
DAMAGED = (
    "it is damaged, or no file of records; it is left as it is: move it away, or set "
    "SPARSETIR_RECORDS to another file"
)
# The rows of a key; also those of other devices, as files hold the records of several.
_COLUMNS = ("op", "dtype", "reduce", "heads", "feat", "threads", "target")
LIKE = "WHERE " + " AND ".join(f"{name} IS ?" for name in _COLUMNS)
SAME = f"{LIKE} AND fingerprint = ?"
FORMAT = "sparsetir records"
FORMAT_VERSION = 1  # of exported files


class RecordError(Exception):
    """Records cannot be read or written; the message names the file and what to do."""


def default_path() -> Path | None:
    """Where records are kept, None for nowhere.

    `SPARSETIR_RECORDS` names the file, or is empty to keep none; by default it is
    `sparsetir/records.sqlite` in `XDG_CACHE_HOME` or `~/.cache`.
    """
    named = os.environ.get("SPARSETIR_RECORDS")
    if named is not None:
        return Path(os.path.expanduser(named)) if named else None
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "sparsetir", "records.sqlite")


class Records:
    """The records in a file; any number of processes and threads may use it at once.

    path : by default :func:`default_path`. Nothing is created until something is written. Where
        records are switched off there are none, and what is added is not kept.
    busy_seconds : that a call waits for other processes

    What :meth:`add`, :meth:`load` and :meth:`forget` have done when they return stays done,
    whatever then happens to the process; otherwise all is as before. All methods raise
    RecordError where the file cannot be read or written: it is damaged, of another version of this
    package, not ours to write, or the disk is full. It is never deleted or begun anew.
    """

    def __init__(
        self, path: Path | str | None = None, *, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        self.path = default_path() if path is None else Path(path).expanduser()
        self._busy = busy_seconds

    def best(self, key: Key) -> Record | None:
        """The best record for a key of the present versions, by :attr:`Record.order`."""
        with self._found(SAME, *_same(key)) as found:
            return best_of_each(r for r in found if r.is_current).get(key)

    def best_by_fingerprint(self, key: Key) -> dict[str, Record]:
        """As :meth:`best` of each pattern, for what is like `key` in all but the fingerprint."""
        with self._found(LIKE, *_same(key)[:-1]) as found:
            best = best_of_each(r for r in found if r.is_current)
        return {
            other.fingerprint: record
            for other, record in best.items()
            if other == replace(key, fingerprint=other.fingerprint)
        }

    def add(self, record: Record) -> None:
        """Keep a record beside all others; nothing happens where its id is there already.

        Raises ValueError for a record with a field of the wrong type.
        """
        record_to_data(record)
        if self.path is not None:
            self._insert([record])

    def all(self) -> list[Record]:
        """Every record, the oldest first."""
        with self._found("ORDER BY date, rowid") as found:
            return list(found)

    def forget(self, key: Key) -> int:
        """Delete the records of a key; how many there were."""
        if not self._exist():
            return 0
        with self._writing() as connection:
            rows = connection.execute(f"SELECT * FROM {RECORDS} {SAME}", _same(key))
            ids = [record.id for record in self._records(rows) if record.key == key]
            command = f"DELETE FROM {RECORDS} WHERE id = ?"
            connection.executemany(command, [(name,) for name in ids])
        return len(ids)

    def neighbours(self, key: Key, statistics: Mapping[str, float], count: int = 3) -> list[Record]:
        """Records of the most similar problems, the nearest first, the best one of each.

        Of the same operator, dtype, reduction, target and device; of other patterns, or of this
        one with other features, heads or threads. Distance is that of the logarithms of
        statistics, features and threads. Those of other versions too: searches measure them anew.
        """
        same = "WHERE op = ? AND dtype = ? AND reduce = ? AND target = ?"
        with self._found(same, key.op, key.dtype, key.reduce, key.target) as found:
            best = best_of_each(found)
        alike = [
            record
            for other, record in best.items()
            if other != key
            and other.device == key.device
            and (other.heads is None) == (key.heads is None)
        ]
        return sorted(alike, key=lambda r: (_distance(key, statistics, r), r.id))[:count]

    def export(self, path: Path | str, *, replace: bool = False) -> int:
        """Write all records to a file of JSON; how many they are.

        The file appears when it is complete. Raises RecordError where it exists already, unless
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
        """Add the records of a file that :meth:`export` wrote; how many were not here before.

        All of them or none: raises RecordError that names the first which is not right.
        """
        path = as_path("Records.load", "path", path)
        if self.path is None:
            raise RecordError("records are switched off; set SPARSETIR_RECORDS to a file")
        return self._insert(_read_export(path))

    def _exist(self) -> bool:
        try:
            there = self.path is not None and self.path.exists()
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error}") from error
        if there and self.path is not None and not self.path.is_file():
            raise RecordError(f"{self.path}: expected a file, which it is not")
        return there

    def _insert(self, records: Iterable[Record]) -> int:
        with self._writing() as connection:
            return sum(insert(connection, record) for record in records)

    @contextmanager
    def _found(self, which: str, *values: Any) -> Iterator[Iterator[Record]]:
        """Records of the rows of a query, read one by one as they are asked for."""
        if not self._exist():
            yield iter(())
            return
        with self._connection("rw") as connection:
            # Opened for writing, so that SQLite may take back what a killed writer left half done.
            connection.execute("PRAGMA query_only = ON")
            connection.execute("BEGIN")
            self._refuse_cut(connection)
            if not check_schema(connection):
                yield iter(())
            else:
                rows = connection.execute(f"SELECT * FROM {RECORDS} {which}", values)
                yield self._records(rows)

    def _records(self, rows: Iterable[sqlite3.Row]) -> Iterator[Record]:
        for row in rows:
            try:
                record = to_record(row)
                record = replace(record, key=record.key.with_features())
            except (ValueError, TypeError, LookupError) as error:
                name = dict(row).get("id")
                raise RecordError(f"{self.path}: {DAMAGED} (record {name}: {error})") from error
            yield record

    def _refuse_cut(self, connection: sqlite3.Connection) -> None:
        """Raise where the file ends within a page, which SQLite takes for zeros there."""
        assert self.path is not None
        page = connection.execute("PRAGMA page_size").fetchone()[0]
        # Only now is the file locked against those who write, and what they left taken back.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if os.path.getsize(self.path) % page:
            raise RecordError(f"{self.path}: {DAMAGED} (it ends within a page)")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, with tables of the present version in a file that is made if need be."""
        assert self.path is not None
        self._exist()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{self.path} cannot be made: {error}") from error
        with self._connection("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")
            self._refuse_cut(connection)
            prepare(connection)
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _connection(self, mode: str) -> Iterator[sqlite3.Connection]:
        """A connection whose transaction ends with it; errors are those of this module."""
        assert self.path is not None
        connection = None
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, uri=True, timeout=self._busy, isolation_level=None)
            connection.row_factory = sqlite3.Row
            yield connection
        except SchemaError as error:
            raise RecordError(f"{self.path}: {error}") from error
        except sqlite3.Error as error:
            raise RecordError(f"{self.path}: {_advice(error)} ({error})") from error
        finally:
            if connection is not None:
                connection.close()


def _advice(error: sqlite3.Error) -> str:
    """What an error of SQLite means for the user of the file."""
    text = str(error).lower()
    if "locked" in text or "busy" in text:
        return "other processes keep it locked; try again, or use another file"
    if "full" in text or "disk i/o" in text:
        return "the disk is full or failing; what was recorded before is kept"
    if "readonly" in text or "unable to open" in text:
        return "it cannot be opened for this; check the permissions of file and folder"
    return DAMAGED


def _same(key: Key) -> list[Any]:
    """The values in SAME."""
    return [*(getattr(key, name) for name in _COLUMNS), key.fingerprint]


def _distance(key: Key, statistics: Mapping[str, float], record: Record) -> float:
    """Between a problem and that of a record; infinite where nothing is known of either."""
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
    if data.get("version") != FORMAT_VERSION:
        raise RecordError(
            f"{path} has version {data.get('version')!r} of the format, and this sparsetir knows "
            f"version {FORMAT_VERSION}"
        )
    if set(data) != {"format", "version", "records"} or not isinstance(data["records"], list):
        raise RecordError(f'{path}: expected a list "records" and no other field')
    found = []
    for number, item in enumerate(data["records"], 1):
        try:
            found.append(record_from_data(item))
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path}: record {number}: {error}") from error
    return found
