"""Records: what is kept stays, whatever else happens to process, file and disk."""

import contextlib
import multiprocessing
import os
import resource
import shutil
import sqlite3
import stat
import time

import pytest

from records_common import KEY, RECORD, query, record, run_sql
from sparsetir.records.records import RecordError, Records

# A child that begins with what is imported here, in no time.
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "folder" / "records.sqlite")


# --- damage ----------------------------------------------------------------------------------


def damaged_files(path):
    """What becomes of the bytes of a file, by name."""
    whole = path.read_bytes()
    return {
        "no database": b"these are not the records you are looking for" * 100,
        "short": whole[: len(whole) // 2],
        "cut within a page": whole[: len(whole) - 1000],
        "overwritten": whole[:200] + b"\xff" * 9000 + whole[9200:],
    }


@pytest.mark.parametrize("name", ["no database", "short", "cut within a page", "overwritten"])
def test_a_damaged_file_is_refused_and_left_as_it_is(records, name):
    for number in range(5):
        records.add(record(number, graph="x" * 5000))
    damaged = damaged_files(records.path)[name]
    records.path.write_bytes(damaged)
    for call in (records.all, lambda: records.add(RECORD), lambda: records.best(KEY)):
        with pytest.raises(RecordError, match="it is damaged, or no file of records") as caught:
            call()
        assert str(records.path) in str(caught.value)
        assert "SPARSETIR_RECORDS" in str(caught.value)
    assert records.path.read_bytes() == damaged


def test_an_empty_file_holds_no_records(records):
    records.path.parent.mkdir()
    records.path.touch()
    assert records.all() == []
    records.add(RECORD)
    assert records.all() == [RECORD]


@pytest.mark.parametrize(
    "change, message",
    [
        ("UPDATE sparsetir_records SET config = '{'", "it is damaged.*record [0-9a-f]{32}"),
        ("UPDATE sparsetir_records SET seconds = 'fast'", "'seconds': expected a number above 0"),
        ("ALTER TABLE sparsetir_records DROP COLUMN config", "it is damaged.*: 'config'"),
        ("DROP TABLE sparsetir_records", "no such table"),
        ("DELETE FROM sparsetir_schema", "should hold one version"),
    ],
)
def test_damaged_tables(records, change, message):
    records.add(RECORD)
    run_sql(records.path, change)
    with pytest.raises(RecordError, match=message):
        records.all()


def test_a_folder_for_a_file(records):
    records.path.mkdir(parents=True)
    for call in (records.all, lambda: records.add(RECORD)):
        with pytest.raises(RecordError, match="expected a file, which it is not"):
            call()


def test_a_file_for_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot be made"):
        Records(tmp_path / "file" / "records.sqlite").add(RECORD)


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
    """What was kept is there, and nothing of what was not."""
    out, end = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_fill, args=(records.path, 100_000, end))
    process.start()
    number, message = out.recv()
    process.join()
    assert "the disk is full or failing; what was recorded before is kept" in message
    assert number > 10
    assert [r.config["tile"] for r in records.all()] == list(range(number))
    records.add(RECORD)  # with room again
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
    told = 20
    with contextlib.suppress(EOFError):
        while True:
            told = out.recv()
    process.join()
    kept = [r.config["tile"] for r in records.all()]
    assert kept in (list(range(told + 1)), list(range(told + 2)))
    check_file(records.path)
    records.add(RECORD)
    assert len(records.all()) == len(kept) + 1


def test_what_a_writer_left_half_done_is_taken_back(records, tmp_path):
    """As of a process killed while it wrote: the file has new pages, the journal the old ones."""
    for number in range(30):
        records.add(record(number))
    connection = sqlite3.connect(records.path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")  # so that pages go to the file before the end
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE sparsetir_records SET graph = hex(zeroblob(2000))")
    copy = Records(tmp_path / "copy.sqlite")
    shutil.copy(records.path, copy.path)
    shutil.copy(f"{records.path}-journal", f"{copy.path}-journal")
    connection.execute("ROLLBACK")
    connection.close()
    assert copy.path.read_bytes() != records.path.read_bytes()
    assert copy.all() == records.all()
    check_file(copy.path)


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
    found = dict(counts.get() for _ in writers)
    for writer in writers:
        writer.join()
    assert min(found.values()) > 0
    for name, count in found.items():
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
