"""Records for tests, and a look into their file that is not through `Records`."""

import sqlite3

from sparsetir.records.record import Key, Record

KEY = Key(
    op="spmm", dtype="float32", reduce="sum", heads=None, feat=32, threads=2, target="llvm",
    device="a CPU", shape_class="m8-n8-z12-f5", fingerprint="0" * 32,
)  # fmt: skip
RECORD = Record(
    KEY, {"template": "RowTile", "tile": 64, "format": {"format": "Hyb", "c": 1}}, 0.1 + 0.2,
    default_seconds=0.5, compile_seconds=0.25, convert_seconds=0.1, padding=0.125, bytes=1 << 40,
    statistics={"m": 300.0, "row_mean": 10.0}, trials=64, graph="cora's",
)  # fmt: skip


def record(number, key=KEY, **changes):
    return Record(key, {"template": "RowTile", "tile": number}, 1.0 + number, **changes)


def run_sql(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as connection:
        connection.executescript(script)
    connection.close()


def query(path, text):
    connection = sqlite3.connect(path)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()
