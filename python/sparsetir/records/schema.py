"""The tables of records in a file of SQLite.

The file is shared with Optuna, which keeps its tables and its own version there: ours all begin
with "sparsetir_", and our version is in a table of ours.
"""

from __future__ import annotations

import json
import sqlite3

from sparsetir.records.record import FIELDS, Record, record_from_data, record_to_data

SCHEMA = 2
RECORDS = "sparsetir_records"
_VERSION = "sparsetir_schema"
_JSON = ("config", "statistics", "versions")

_TABLES = (
    f"""
CREATE TABLE {RECORDS} (
    id TEXT PRIMARY KEY,
    op TEXT NOT NULL, dtype TEXT NOT NULL, reduce TEXT NOT NULL, heads INTEGER,
    feat INTEGER NOT NULL, threads INTEGER NOT NULL, target TEXT NOT NULL,
    shape_class TEXT NOT NULL, fingerprint TEXT NOT NULL,
    config TEXT NOT NULL, seconds REAL NOT NULL, default_seconds REAL,
    compile_seconds REAL, convert_seconds REAL, padding REAL, bytes INTEGER,
    trials INTEGER NOT NULL, versions TEXT NOT NULL, date TEXT NOT NULL, graph TEXT NOT NULL,
    device TEXT NOT NULL, statistics TEXT NOT NULL
)""",
    f"CREATE INDEX {RECORDS}_by_fingerprint ON {RECORDS} (fingerprint)",
    f"CREATE TABLE {_VERSION} (version INTEGER NOT NULL)",
    f"INSERT INTO {_VERSION} VALUES ({SCHEMA})",
)


class SchemaError(Exception):
    """Tables that this version of the package does not know."""


def check_schema(connection: sqlite3.Connection) -> bool:
    """Whether there are tables.

    Raises SchemaError for those of another version than SCHEMA.
    """
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not connection.execute(query, (_VERSION,)).fetchone()[0]:
        return False
    rows = connection.execute(f"SELECT version FROM {_VERSION}").fetchall()
    versions = [row[0] for row in rows]
    if len(versions) != 1 or not isinstance(versions[0], int) or versions[0] < 1:
        raise SchemaError(f"table {_VERSION} should hold one version, it holds {versions}")
    if versions[0] != SCHEMA:
        update = "update sparsetir, or " if versions[0] > SCHEMA else ""
        raise SchemaError(
            f"its records have schema version {versions[0]} and this sparsetir knows version "
            f"{SCHEMA}; {update}use another file"
        )
    return True


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables unless they are there; inside a transaction for writing."""
    if not check_schema(connection):
        for command in _TABLES:
            connection.execute(command)


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
    """The record of a row.

    Raises ValueError where the row does not hold one.
    """
    data = dict(row)
    for name in _JSON:
        data[name] = json.loads(data[name])
    return record_from_data(data)
