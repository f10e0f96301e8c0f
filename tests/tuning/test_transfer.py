"""What a search takes from records of similar matrices, and what it leaves there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.sparse as sp

import sparsetir
from fake_measurer import install, seconds_of
from sparsetir.planning import matrix_request
from sparsetir.records.fingerprint import fingerprint, statistics
from sparsetir.records.records import Records
from sparsetir.records.task import Outcome
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.search.spaces import Branch, Space
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.tuning.search import tune


def matrix(seed):
    return sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=seed)


def run(file, seed, **options):
    options = {"trials": 8, "threads": 1, "sampler": "random", "records": file, **options}
    return tune("spmm", matrix(seed), 32, **options)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "records.sqlite"


def test_the_best_of_a_neighbour_comes_right_after_the_default(monkeypatch, file):
    rare = RowBlocks(tile=16, lanes=16, prefetch=16, parts=4)  # not among the rules of thumb
    known = sparsetir.plan_candidates("spmm", matrix(1), 32, threads=1)
    assert rare not in known
    chosen = {"tile": (16,), "prefetch": (16,), "parts": (1, 4)}
    space = Space((Branch("RowBlocks", chosen, lambda **c: RowBlocks(lanes=16, **c)),))
    monkeypatch.setattr(matrix_request, "space", lambda *given: space)
    install(monkeypatch, lambda c: Outcome("ok", seconds=1e-6 if c == rare else seconds_of(c)))
    assert run(file, 1).config == rare
    second = run(file, 2)
    assert [trial.config for trial in second.trials[:3]] == [known[0], rare, known[1]]
    alone = run(file, 3, transfer=False)
    assert [trial.config for trial in alone.trials[: len(known)]] == known


def test_a_config_that_does_not_serve_is_left_out(monkeypatch, file):
    install(monkeypatch)
    tuned = run(file, 1, trials=1)
    (record,) = Records(file).all()
    other = RowBlocks(tile=24, lanes=8, feat=24)  # one feature size, another one
    Records(file).add(replace(record, id="1" * 32, seconds=1e-9, config=to_data(other)))
    tuned = run(file, 2)
    assert other not in [trial.config for trial in tuned.trials] and not tuned.warnings


def test_a_record_of_another_version_is_left_out(monkeypatch, file):
    install(monkeypatch)
    run(file, 1, trials=1)
    (record,) = Records(file).all()
    Records(file).add(replace(record, id="1" * 32, seconds=1e-9, config={"template": "Gone"}))
    tuned = run(file, 2)
    assert len(tuned.trials) == 8
    (warning,) = tuned.warnings
    assert "Gone" in warning


def test_what_is_recorded(monkeypatch, file):
    def measure(config):
        return Outcome("ok", seconds=seconds_of(config), compile_seconds=0.5, convert_seconds=0.25,
                       padding=0.125, bytes=1000)  # fmt: skip

    install(monkeypatch, measure)
    tuned = run(file, 1, graph="a graph")
    (record,) = Records(file).all()
    assert record.key == tuned.key and record.key.fingerprint == fingerprint(tuned.task.matrix)
    assert record.config == to_data(tuned.config)
    assert record.seconds == tuned.best.outcome.seconds
    assert record.default_seconds == seconds_of(tuned.default)
    outcome = (record.compile_seconds, record.convert_seconds, record.padding, record.bytes)
    assert outcome == (0.5, 0.25, 0.125, 1000)
    assert record.statistics == statistics(tuned.task.matrix)
    assert record.trials == 8 and record.graph == "a graph"


def test_no_file_where_there_is_to_be_none(monkeypatch, tmp_path):
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run("", 1)
    monkeypatch.setenv("SPARSETIR_RECORDS", "")
    run(None, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_default_file(monkeypatch, tmp_path):
    install(monkeypatch)
    monkeypatch.delenv("SPARSETIR_RECORDS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run(None, 1, trials=2)
    (record,) = Records(tmp_path / "sparsetir" / "records.sqlite").all()
    assert record.trials == 2
