"""Records survive failures of process, file and disk; foreign or absurd ones do no harm."""

import contextlib
import json
import multiprocessing
import os
import resource
import sqlite3
import stat
import time

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import SparseMatrix, plan
from sparsetir.cli import main
from sparsetir.planning.plan import plan_candidates
from sparsetir.planning.plan import requested as request
from sparsetir.records.record import Record, record_to_data
from sparsetir.records.records import RecordError, Records
from sparsetir.schedules.search.configs import to_data
from tuning.records_common import KEY, RECORD, query, record, run_sql

# A child that begins with what is imported here, in no time.
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "folder" / "records.sqlite")


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no database", "short", "overwritten"])
def test_a_damaged_file_is_refused_and_left_as_it_is(records, name):
    for number in range(5):
        records.add(record(number, graph="x" * 5000))
    whole = records.path.read_bytes()
    damaged = {
        "no database": b"these are not the records you are looking for" * 100,
        "short": whole[: len(whole) // 2],
        "overwritten": whole[:200] + b"\xff" * 9000 + whole[9200:],
    }[name]
    records.path.write_bytes(damaged)
    for call in (records.all, lambda: records.add(RECORD), lambda: records.best(KEY)):
        with pytest.raises(RecordError, match="it is damaged, or not a file of records") as caught:
            call()
        assert str(records.path) in str(caught.value)
        assert "SPARSETIR_RECORDS" in str(caught.value)
    assert records.path.read_bytes() == damaged


def test_an_empty_file_holds_no_records(records):
    records.path.parent.mkdir()
    records.path.touch()
    assert records.all() == [] and records.forget(KEY) == 0
    assert records.path.read_bytes() == b""
    records.add(RECORD)
    assert records.all() == [RECORD]


@pytest.mark.parametrize(
    "change, message",
    [
        ("UPDATE records SET data = '{'", "it is damaged.*record [0-9a-f]{32}"),
        ("UPDATE records SET data = '" + "[" * 100_000 + "'", "it is damaged"),
        ("UPDATE records SET data = x'00ff'", "it is damaged"),
        (
            "UPDATE records SET data = replace(data, '0.30000000000000004', '\"fast\"')",
            "'seconds': expected float",
        ),
        ("ALTER TABLE records DROP COLUMN data", "no such column"),
    ],
)
def test_damaged_tables(records, change, message):
    records.add(RECORD)
    run_sql(records.path, change)
    with pytest.raises(RecordError, match=message):
        records.all()


def test_files_that_are_no_files(tmp_path):
    """No call waits for a pipe, or reads without end."""
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
    with pytest.raises(TypeError, match="^Records.load: argument 'path': expected a path"):
        good.load(None)
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot be made"):
        Records(tmp_path / "file" / "records.sqlite").add(RECORD)


def test_export_does_not_replace_the_records(tmp_path):
    records = Records(tmp_path / "a.sqlite")
    records.add(record(1))
    (tmp_path / "b").symlink_to(tmp_path / "a.sqlite")
    for name in ("a.sqlite", "b"):
        with pytest.raises(RecordError, match=f"{name} is the file of the records themselves"):
            records.export(tmp_path / name, replace=True)
    assert len(records.all()) == 1


def test_list_has_no_codes_of_terminals(tmp_path, capsys):
    """Exported files may have any name; an encoding mark is optional."""
    codes = {"graph": "\x1b[31mred\n<b>", "op": "o\x1b[2J", "config": {"template": "\x1b[1mX"}}
    data = {"format": "sparsetir records", "version": 1}
    data["records"] = [{**record_to_data(record(1)), **codes}]
    (tmp_path / "a.json").write_text(json.dumps(data), encoding="utf-8-sig")
    path = str(tmp_path / "a.sqlite")
    assert main(["records", "import", str(tmp_path / "a.json"), "--records", path]) == 0
    assert main(["records", "list", "--records", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[31mred\\n<b>" in out and "\\x1b[1mX" in out


@pytest.mark.parametrize(
    "changes",
    [{"tile": 10**9}, {"lanes": 10**12}, {"blocks": 2**62}, {"tile": [1]}, {"tile": 32.0},
     {"template": "__import__"}, {"zz": 1}],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:plan. the record with the config")
def test_absurd_configs_harm_no_plan(tmp_path, monkeypatch, changes):
    matrix = sp.random_array((48, 48), density=0.1, format="csr", dtype="float32", rng=0)
    config = to_data(plan_candidates("spmm", matrix, 32)[0])
    key = request("spmm", SparseMatrix(matrix), 32, target="llvm").key()
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "a.sqlite"))
    Records().add(Record(key, {**config, **changes}, 1e-9, 1.0))
    b = np.ones((48, 32), "float32")
    np.testing.assert_allclose(plan("spmm", matrix, 32)(b), matrix @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("folder", [False, True])
def test_read_only(records, folder):
    records.add(RECORD)
    where = records.path.parent if folder else records.path
    mode = where.stat().st_mode
    where.chmod(mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        if os.access(where, os.W_OK):
            pytest.skip("nothing is read-only for this user")
        assert records.all() == [RECORD]
        with pytest.raises(RecordError, match="check the permissions"):
            records.add(record(1))
    finally:
        where.chmod(mode)
    assert records.all() == [RECORD]


def _fill(path, size, out):
    """Write records to a file that may not grow beyond a size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    records = Records(path)
    for number in range(10_000):
        try:
            records.add(record(number, graph="x" * 2000))
        except RecordError as error:
            out.send((number, str(error)))
            return


def test_full_disk(records):
    """Kept records are there, and nothing else."""
    out, end = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_fill, args=(records.path, 100_000, end))
    process.start()
    number, message = out.recv()
    process.join()
    assert "the disk is full or failing; what was recorded before is kept" in message
    assert number > 10
    assert [r.config["tile"] for r in records.all()] == list(range(number))
    records.add(RECORD)  # with free space again
    assert len(records.all()) == number + 1


# --- several processes -----------------------------------------------------------------------


def check_file(path):
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def _tell(path, out):
    """Write records and tell of each when it is kept."""
    records = Records(path)
    for number in range(1_000_000):
        records.add(record(number, graph="x" * 20_000))
        out.send(number)


def test_a_killed_writer_loses_nothing_that_it_was_told_is_kept(records):
    out, end = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_tell, args=(records.path, end))
    process.start()
    end.close()
    while out.recv() < 20:
        pass
    process.kill()
    count = 20
    with contextlib.suppress(EOFError):
        while True:
            count = out.recv()
    process.join()
    kept = [r.config["tile"] for r in records.all()]
    assert kept in (list(range(count + 1)), list(range(count + 2)))
    check_file(records.path)
    records.add(RECORD)
    assert len(records.all()) == len(kept) + 1


def _write(path, name, seconds, counts):
    records = Records(path)
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        records.add(record(count, graph=name))
        count += 1
    counts.put((name, count))


def test_two_writers_at_once(records):
    """All records of both, on a file that neither finds there."""
    counts = FORK.SimpleQueue()
    writers = [FORK.Process(target=_write, args=(records.path, name, 1.0, counts)) for name in "ab"]
    for writer in writers:
        writer.start()
    counts_by_name = dict(counts.get() for _ in writers)
    for writer in writers:
        writer.join()
    assert min(counts_by_name.values()) > 0
    for name, count in counts_by_name.items():
        kept = [r.config["tile"] for r in records.all() if r.graph == name]
        assert sorted(kept) == list(range(count))
    check_file(records.path)


def test_a_reader_waits_for_a_writer_only_so_long(tmp_path):
    records = Records(tmp_path / "records.sqlite", busy_seconds=0.05)
    records.add(RECORD)
    other = sqlite3.connect(records.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for call in (records.all, lambda: records.add(record(1))):
        with pytest.raises(RecordError, match="other processes keep it locked"):
            call()
    other.close()
    assert records.all() == [RECORD]
