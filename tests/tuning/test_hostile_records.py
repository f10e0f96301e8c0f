"""Records, kept measurements and URLs of databases that are foreign, forged or absurd."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
import traceback

import numpy as np
import pytest
import scipy.sparse as sp

from records_common import record
from sparsetir import SparseMatrix, plan
from sparsetir.cli import main
from sparsetir.planning.matrix_request import matrix_request as request
from sparsetir.planning.plan import plan_candidates
from sparsetir.records.record import Key, Record, record_to_data
from sparsetir.records.records import RecordError, Records
from sparsetir.schedules.search.configs import to_data
from sparsetir.tuning import trial_store

EXPORT = {"format": "sparsetir records", "version": 1}


def test_files_that_are_no_files(tmp_path):
    """No call waits for a pipe, or reads what never ends."""
    os.mkfifo(tmp_path / "a")
    (tmp_path / "b").symlink_to("/dev/zero")
    (tmp_path / "c").mkdir()
    good = Records(tmp_path / "good.sqlite")
    for name in "abc":
        path = tmp_path / name
        for call in (
            lambda path=path: Records(path).all(),
            lambda path=path: Records(path).add(record(1)),
            lambda path=path: good.load(path),
        ):
            with pytest.raises(RecordError, match=f"^{path}: expected a file, which it is not"):
                call()
    for wrong in (None, 5, b"a"):
        with pytest.raises(TypeError, match="^Records.load: argument 'path': expected a path"):
            good.load(wrong)


def test_export_does_not_replace_the_records(tmp_path):
    records = Records(tmp_path / "a.sqlite")
    records.add(record(1))
    (tmp_path / "b").symlink_to(tmp_path / "a.sqlite")
    for name in ("a.sqlite", "b"):
        with pytest.raises(RecordError, match=f"{name} is the file of the records themselves"):
            records.export(tmp_path / name, replace=True)
    assert len(records.all()) == 1


def test_list_has_no_codes_of_terminals(tmp_path, capsys):
    """What others exported may be named in any way; with a mark of its encoding or without."""
    codes = {"graph": "\x1b[31mred\n<b>", "op": "o\x1b[2J", "config": {"template": "\x1b[1mX"}}
    data = {**EXPORT, "records": [{**record_to_data(record(1)), **codes}]}
    (tmp_path / "a.json").write_text(json.dumps(data), encoding="utf-8-sig")
    path = str(tmp_path / "a.sqlite")
    assert main(["records", "import", str(tmp_path / "a.json"), "--records", path]) == 0
    assert main(["records", "list", "--records", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[31mred\\n<b>" in out and "\\x1b[1mX" in out


@pytest.mark.parametrize(
    "changes",
    [
        {"tile": 10**9}, {"tile": -1}, {"lanes": 10**12}, {"parts": 10**9}, {"blocks": 2**62},
        {"tile": [1]}, {"tile": 32.0}, {"template": "__import__"}, {"zz": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:plan. the record with the config")
def test_absurd_configs_harm_no_plan(tmp_path, monkeypatch, changes):
    matrix = sp.random_array((48, 48), density=0.1, format="csr", dtype="float32", rng=0)
    config = to_data(plan_candidates("spmm", matrix, 32)[0])
    key = Key.of(request("spmm", SparseMatrix(matrix), 32, target="llvm").task())
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "a.sqlite"))
    Records().add(Record(key, {**config, **changes}, 1e-9, 1.0))
    b = np.ones((48, 32), "float32")
    np.testing.assert_allclose(plan("spmm", matrix, 32)(b), matrix @ b, rtol=1e-5, atol=1e-6)


def test_rows_without_end(tmp_path):
    """A view that never ends in place of the table is told by its first row."""
    path = tmp_path / "a.sqlite"
    Records(path).add(record(1))
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE sparsetir_records")
        rows = "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id FROM c"
        connection.execute(f"CREATE VIEW sparsetir_records AS {rows}")
    connection.close()
    start = time.process_time()
    with pytest.raises(RecordError, match="a.sqlite: it is damaged"):
        Records(path).all()
    assert time.process_time() - start < 10


# -- databases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "nonsense", "", "://", "sqlite:////", "http://user:s3cret@host/",
        "postgres://user:s3cret@host/db", "postgresql+psycopg://user:s3cret@host:port/db",
        "oracle://user:s3cret@host", "http://user:s3c@r/et@host/db",
        "nonsense://host/db?user=a&password=s3cret", "redis://:s3cret@host/0",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_database(url):
    """No text, nor what it was raised from, has the password."""
    with pytest.raises(ValueError, match="^tune: argument 'storage': ") as raised:
        trial_store._sqlite_file(url)
    text = "".join(traceback.format_exception(raised.value)[-1:])
    for word in ("s3c", "r/et", "cret"):
        assert word not in text.replace("trial_store", "")


def test_servers_that_do_not_answer(monkeypatch):
    """They are waited for no longer than is said; the text has no password."""
    pytest.importorskip("psycopg")
    monkeypatch.setattr(trial_store, "CONNECT_SECONDS", 2)  # its least
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        port = listening.getsockname()[1]
        url = f"postgresql+psycopg://user:s3cret@127.0.0.1:{port}/db"
        with pytest.raises(trial_store._errors()) as raised:
            trial_store._storage(url)
    assert "s3cret" not in trial_store._cause(raised.value, url)
    assert trial_store._shown(url) == f"postgresql+psycopg://user:***@127.0.0.1:{port}/db"
