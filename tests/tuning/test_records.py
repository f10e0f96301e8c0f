"""Records: what is kept, found and exchanged."""

import json
import re
from dataclasses import fields, replace

import pytest

from sparsetir.records.record import Key, Record, record_to_data
from sparsetir.records.records import RecordError, Records, default_path
from tuning.records_common import KEY, RECORD, record


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "folder" / "records.sqlite")


# --- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f.name for f in fields(Key)])
def test_a_record_is_for_all_of_its_key(records, name):
    records.add(RECORD)
    value = getattr(KEY, name)
    other = "1" * 32 if name == "fingerprint" else value + "x" if isinstance(value, str) else 7
    assert records.best(replace(KEY, **{name: other})) is None
    assert replace(KEY, **{name: other}).text() != KEY.text()


def test_reading_creates_nothing(records, tmp_path):
    assert records.best(KEY) is None
    assert records.all() == [] == records.neighbours(KEY, {"m": 1.0})
    assert records.forget(KEY) == 0
    assert list(tmp_path.iterdir()) == []


def test_forget(records):
    other = replace(KEY, feat=64)
    for number in range(3):
        records.add(record(number))
    records.add(record(9, other))
    assert records.forget(KEY) == 3
    assert records.forget(KEY) == 0
    assert [r.key for r in records.all()] == [other]


def test_neighbours_are_nearest_first(records):
    def near(rows, key, seconds=1.0):
        stats = {"m": float(rows), "row_mean": 8.0}
        records.add(Record(key, {"template": "T", "of": rows}, seconds, statistics=stats))

    near(1000, replace(KEY, fingerprint="1" * 32), seconds=2.0)
    near(1001, replace(KEY, fingerprint="1" * 32), seconds=1.0)  # better, of the same problem
    near(8000, replace(KEY, fingerprint="2" * 32))
    near(100, replace(KEY, fingerprint="3" * 32))
    near(1010, replace(KEY, feat=64))  # this pattern
    records.add(record(0, replace(KEY, fingerprint="4" * 32)))  # nothing known of it
    for name, value in {
        "op": "sddmm", "dtype": "float16", "reduce": "max", "target": "cuda", "device": "another",
        "heads": 1,
    }.items():  # fmt: skip
        near(1000, replace(KEY, fingerprint="5" * 32, **{name: value}))
    near(1000, KEY)  # itself

    def found(count):
        return [
            r.config.get("of")
            for r in records.neighbours(KEY, {"m": 1000.0, "row_mean": 8.0}, count)
        ]

    assert found(2) == [1001, 1010]
    assert found(9) == [1001, 1010, 8000, 100, None]


def test_default_path(monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSETIR_RECORDS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "sparsetir" / "records.sqlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "sparsetir" / "records.sqlite"
    monkeypatch.setenv("SPARSETIR_RECORDS", "~/mine.sqlite")
    assert default_path() == tmp_path / "mine.sqlite" == Records().path


def test_switched_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = Records()
    assert default_path() is None is records.path
    records.add(RECORD)
    assert records.all() == []
    with pytest.raises(RecordError, match="switched off"):
        records.load(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seconds": float("nan")}, "'seconds': expected float, got nan"),
        ({"seconds": 0}, "expected 'seconds' and 'default_seconds' above 0"),
        ({"statistics": {"m": float("inf")}}, "'statistics': expected"),
        ({"config": 5}, "'config': expected Mapping, got 5"),
        ({"bytes": 1.5}, "'bytes': expected int | None, got 1.5"),
        ({"key": replace(KEY, threads=True)}, "'threads': expected int, got True"),
    ],
)
def test_what_is_no_record_is_not_kept(records, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        records.add(replace(RECORD, **changes))
    assert records.all() == []


# --- exchange --------------------------------------------------------------------------------


def test_export_and_load(records, tmp_path):
    for number in range(5):
        records.add(record(number))
    records.add(RECORD)
    path = tmp_path / "records.json"
    assert records.export(path) == 6
    other = Records(tmp_path / "other.sqlite")
    other.add(RECORD)
    assert other.load(path) == 5
    assert other.load(path) == 0  # nothing twice
    assert sorted(other.all(), key=lambda r: r.id) == sorted(records.all(), key=lambda r: r.id)
    assert [p.name for p in tmp_path.glob(".*")] == []  # nothing unfinished stays


def test_export_replaces_only_when_told(records, tmp_path):
    records.add(RECORD)
    path = tmp_path / "records.json"
    path.write_text("mine")
    with pytest.raises(RecordError, match=r"records.json exists already; .* replace=True"):
        records.export(path)
    assert path.read_text() == "mine"
    assert records.export(path, replace=True) == 1
    assert json.loads(path.read_text())["records"][0]["id"] == RECORD.id


def whole(items):
    return {"format": "sparsetir records", "version": 1, "records": items}


GOOD = record_to_data(record(0))
LOADS = [
    (whole([GOOD, {**GOOD, "colour": 1}]), "record 2: unknown field 'colour'"),
    (whole([{n: x for n, x in GOOD.items() if n != "op"}]), "record 1: field 'op' is missing"),
    (whole([GOOD, GOOD, {**GOOD, "feat": "32"}]), "record 3: field 'feat': expected int, got '32'"),
    (whole([{**GOOD, "seconds": 10**400}]), "record 1: field 'seconds'"),
    (whole([GOOD, 5]), "record 2: expected a dict, got int"),
    (whole({}), 'and a list "records"'),
    ({**whole([]), "version": 2}, 'expected "version": 1'),
    ([], "holds no records"),
]


@pytest.mark.parametrize("data, message", LOADS)
def test_what_is_not_right_is_refused_as_a_whole(records, tmp_path, data, message):
    path = tmp_path / "records.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=message) as caught:
        records.load(path)
    assert str(path) in str(caught.value)
    assert not records.path.exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\0"])
def test_what_is_no_json(records, tmp_path, text):
    path = tmp_path / "records.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="holds no JSON"):
        records.load(path)
    with pytest.raises(RecordError, match="cannot be read"):
        records.load(tmp_path / "none.json")
