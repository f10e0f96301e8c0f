"""The tables of records in a file of SQLite, and how those of older versions become the present.

The file is shared with Optuna, which keeps its tables and its own version there: ours all begin
with "sparsetir_", and our version is in a table of ours.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from sparsetir.tuning.record import FIELDS, Record, record_from_data, record_to_data

__all__ = ["SCHEMA", "SchemaError", "check_schema", "insert", "prepare", "to_record"]

SCHEMA = 2
RECORDS = "sparsetir_records"
_VERSION = "sparsetir_schema"
_JSON = ("config", "statistics", "versions")

# Version 1 knew neither the machine nor statistics.
_TABLE_1 = f"""
CREATE TABLE {RECORDS} (
    id TEXT PRIMARY KEY,
    op TEXT NOT NULL, dtype TEXT NOT NULL, reduce TEXT NOT NULL, heads INTEGER,
    feat INTEGER NOT NULL, threads INTEGER NOT NULL, target TEXT NOT NULL,
    shape_class TEXT NOT NULL, fingerprint TEXT NOT NULL,
    config TEXT NOT NULL, seconds REAL NOT NULL, default_seconds REAL,
    compile_seconds REAL, convert_seconds REAL, padding REAL, bytes INTEGER,
    trials INTEGER NOT NULL, versions TEXT NOT NULL, date TEXT NOT NULL, graph TEXT NOT NULL
)"""
_INDEX_1 = f"CREATE INDEX {RECORDS}_by_fingerprint ON {RECORDS} (fingerprint)"


def _create(connection: sqlite3.Connection) -> None:
    """Tables of version 1, which the migrations then take further."""
    connection.execute(_TABLE_1)
    connection.execute(_INDEX_1)
    connection.execute(f"CREATE TABLE {_VERSION} (version INTEGER NOT NULL)")
    connection.execute(f"INSERT INTO {_VERSION} VALUES (1)")


def _from_1(connection: sqlite3.Connection) -> None:
    """Machine and statistics: unknown for what is there, which so applies nowhere by itself."""
    connection.execute(f"ALTER TABLE {RECORDS} ADD COLUMN device TEXT NOT NULL DEFAULT ''")
    connection.execute(f"ALTER TABLE {RECORDS} ADD COLUMN statistics TEXT NOT NULL DEFAULT '{{}}'")


# By the version that each starts from; a new one is added here, and none ever changed.
_MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {1: _from_1}


class SchemaError(Exception):
    """Tables that this version of the package does not know."""


def check_schema(connection: sqlite3.Connection) -> int:
    """The version of the tables there, 0 where there are none.

    Raises SchemaError for a version later than SCHEMA.
    """
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not connection.execute(query, (_VERSION,)).fetchone()[0]:
        return 0
    rows = connection.execute(f"SELECT version FROM {_VERSION}").fetchall()
    versions = [row[0] for row in rows]
    if len(versions) != 1 or not isinstance(versions[0], int) or versions[0] < 1:
        raise SchemaError(f"table {_VERSION} should hold one version, it holds {versions}")
    if versions[0] > SCHEMA:
        raise SchemaError(
            f"its records have schema version {versions[0]} and this sparsetir knows up to "
            f"version {SCHEMA}; update sparsetir, or use another file"
        )
    return versions[0]


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables, or bring them to the present version; inside a transaction for writing."""
    version = check_schema(connection)
    if version == 0:
        _create(connection)
        version = 1
    if version < SCHEMA:
        for start in range(version, SCHEMA):
            _MIGRATIONS[start](connection)
        connection.execute(f"UPDATE {_VERSION} SET version = ?", (SCHEMA,))


def insert(connection: sqlite3.Connection, record: Record) -> int:
    """Add a record unless one of its id is there; how many were added.

    Raises ValueError for a record with a field of the wrong type.
    """
    data = record_to_data(record)
    for name in _JSON:
        data[name] = json.dumps(data[name], allow_nan=False)
    names, marks = ", ".join(FIELDS), ", ".join("?" for _ in FIELDS)
    command = f"INSERT OR IGNORE INTO {RECORDS} ({names}) VALUES ({marks})"
    return connection.execute(command, [data[name] for name in FIELDS]).rowcount


def to_record(row: sqlite3.Row) -> Record:
    """The record of a row, of any version up to the present.

    Raises ValueError where the row does not hold one.
    """
    data: dict[str, Any] = {"device": "", "statistics": "{}"} | dict(row)  # absent in version 1
    for name in _JSON:
        data[name] = json.loads(data[name])
    return record_from_data(data)
