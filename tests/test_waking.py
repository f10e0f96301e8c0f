"""From how much work on threads are woken."""

import json
from datetime import date, timedelta

import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import waking
from sparsetir._versions import VERSIONS
from sparsetir.schedules.versions import WORK_OF_THREADS

TODAY = date.today()


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "below" / "records.sqlite"))
    monkeypatch.setattr(waking.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    waking._kept.cache_clear()
    yield tmp_path / "below" / "waking.json"
    waking._kept.cache_clear()


def test_break_even():
    found = waking.break_even(5e-6, 20e-6, 5e-6 + 25936 * 32 * 5e-11, 2)
    assert found["waking"] == pytest.approx(15e-6) and found["multiplication"] == pytest.approx(
        5e-11
    )
    assert found["work"] == pytest.approx(600_000, rel=1e-3)
    assert waking.break_even(5e-6, 4e-6, 50e-6, 2)["work"] == waking.LEAST  # it costs nothing
    assert waking.break_even(5e-6, 1, 6e-6, 2)["work"] == waking.MOST


def test_it_is_measured_once_and_kept(kept, monkeypatch):
    asked = []
    monkeypatch.setattr(waking, "pool", lambda: 4)
    monkeypatch.setattr(waking, "measure", lambda n: asked.append(n) or {"work": 123_456})
    assert waking.work_of_threads(2, 10**6) == 123_456
    waking._kept.cache_clear()  # as another process
    assert waking.work_of_threads(2, 10**6) == 123_456 and asked == [2]
    assert waking.work_of_threads(4, 10**6) == 123_456 and asked == [2, 4]
    assert len(json.loads(kept.read_text())) == 2
    a = sp.random_array((500, 500), density=0.1, format="csr", dtype="float32", rng=0)
    for feat, parallel in ((4, False), (8, True)):
        assert sparsetir.plan("spmm", a, feat, threads=2).config.parallel == parallel
    kept.write_text("no JSON")
    waking._kept.cache_clear()
    assert waking.work_of_threads(2, 10**6) == 123_456 and asked == [2, 4, 2]


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ({}, True),
        ({"date": str(TODAY - timedelta(days=29))}, True),
        ({"date": str(TODAY - timedelta(days=31))}, False),
        ({"date": str(TODAY + timedelta(days=31))}, False),  # the clock was wrong
        ({"date": "long ago"}, False),
        ({"date": None}, False),
        ({"versions": VERSIONS | {"apache-tvm": "0.26.0"}}, False),
        ({"versions": None}, False),
    ],
    ids=range(8),
)
def test_it_is_measured_again_after_a_month_and_by_other_versions(
    kept, monkeypatch, written, taken
):
    asked = []
    monkeypatch.setattr(waking, "pool", lambda: 2)
    monkeypatch.setattr(waking, "measure", lambda n: asked.append(n) or {"work": 123_456})
    waking.work_of_threads(2, 10**6)
    (key, found), *_ = json.loads(kept.read_text()).items()
    kept.write_text(json.dumps({key: {**found, **written}}))
    waking._kept.cache_clear()
    waking.work_of_threads(2, 10**6)
    assert len(asked) == (1 if taken else 2)
    assert json.loads(kept.read_text())[key] == ({**found, **written} if taken else found)


def test_what_is_measured_on_a_busy_machine_is_not_kept(kept, monkeypatch):
    monkeypatch.setattr(waking, "pool", lambda: 2)
    monkeypatch.setattr(waking, "measure", lambda n: {"work": 123_456})
    monkeypatch.setattr(waking.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(waking.os, "getloadavg", lambda: (4.5, 0.5, 0.5))
    assert waking.work_of_threads(2, 10**6) == 123_456 and not kept.exists()
    waking._kept.cache_clear()
    monkeypatch.setattr(waking.os, "getloadavg", lambda: (3.5, 0.5, 0.5))
    assert waking.work_of_threads(2, 10**6) == 123_456 and kept.exists()


def test_it_is_not_measured_where_the_answer_is_known(kept, monkeypatch):
    monkeypatch.setattr(waking, "measure", lambda n: pytest.fail("measured"))
    for threads, work in ((1, 10**6), (2, 1000), (2, 1 << 24)):
        assert waking.work_of_threads(threads, work) == WORK_OF_THREADS
    monkeypatch.setattr(waking, "pool", lambda: 1)
    assert waking.work_of_threads(2, 10**6) == WORK_OF_THREADS  # there is nobody to wake
    monkeypatch.setattr(waking, "pool", lambda: 2)
    monkeypatch.setenv("SPARSETIR_RECORDS", "")
    assert waking.work_of_threads(2, 10**6) == WORK_OF_THREADS


def test_what_is_measured(kept):
    found = waking.measure(2)
    assert found["waking"] > 0 and waking.LEAST <= found["work"] <= waking.MOST
    assert 1e-12 < found["multiplication"] < 1e-7


def test_one_thread_wakes_none(monkeypatch):
    monkeypatch.setattr(waking, "work_of_threads", lambda threads, work: 1000)
    assert [waking.pays(2, work) for work in (999, 1000)] == [False, True]
    assert not waking.pays(1, 10**9)
