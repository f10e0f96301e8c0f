"""Searches that go on: after a kill, beside other processes, and where the database fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
import scipy.sparse as sp

from fake_measurer import install, seconds_of, text
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.records.records import RecordError, Records
from sparsetir.records.task import Outcome
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.tuning import trial_store
from sparsetir.tuning.search import forget_trials, tune
from sparsetir.tuning.trial_store import TrialStore

MATRIX = sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=0)
TRIALS = 11
# Tunes as `run` below does. Arguments: the file of records, and the number of the measurement that
# never ends, 0 for none. Says what it measures.
SCRIPT = f"""
import sys, time; {WITHOUT_TORCH}
sparsetir.tune
assert "optuna" not in sys.modules  # slow to import, and may not be there
import machines, pytest
machines.settle()
from fake_measurer import install, seconds_of, text
from test_resume import Outcome, run
hang = int(sys.argv[2])
def measure(config):
    print(text(config), flush=True)
    if len(fake.log) == hang:
        time.sleep(1000)
    return Outcome("ok", seconds=seconds_of(config))
fake = install(pytest.MonkeyPatch(), measure)
print("ready", flush=True)
sys.stdin.readline()
run(sys.argv[1])
"""


def run(file, **options):
    options = {"trials": TRIALS, "threads": 1, "records": file, "sampler": "tpe", **options}
    return tune("spmm", MATRIX, 32, **options)


@contextmanager
def another(file, hang=0):
    """A process that has loaded everything and waits for a line to begin."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file), str(hang)], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def order(tuned):
    return [text(trial.config) for trial in tuned.trials]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "records.sqlite"


@pytest.mark.slow
def test_kill_9_costs_the_trial_that_was_measured(monkeypatch, file):
    install(monkeypatch)
    whole = order(run(""))  # what is tried without an interruption
    with another(file, hang=5) as process:
        begin(process)
        theirs = [process.stdout.readline().strip() for _ in range(5)]
        assert theirs == whole[:5]
        # While it measures one, others take the next ones.
        fake = install(monkeypatch)
        beside = run(file, trials=7)
        assert order(beside)[:4] == theirs[:4] and theirs[4] not in order(beside)
        process.send_signal(signal.SIGKILL)
        process.wait()
    fake = install(monkeypatch)
    tuned = run(file)
    assert not {*order(beside)} & {*fake.log[: TRIALS - 7]}
    assert len(set(order(tuned))) == len(tuned.trials) >= TRIALS - 1
    # Nothing is left to try.
    fake = install(monkeypatch)
    assert order(run(file)) == order(tuned)
    assert len(fake.log) == 3 * 3


def test_what_goes_on_goes_on_as_if_it_had_not_stopped(monkeypatch, file):
    """Proposals depend on the seed and on what was tried alone."""
    install(monkeypatch)
    whole = order(run("", trials=16))
    run(file, trials=12)
    assert order(run(file, trials=16)) == whole
    assert file.with_name("records-trials.sqlite").exists()
    (record,) = {r.key for r in Records(file).all()}
    forget_trials(Records(file), record)
    fake = install(monkeypatch)
    run(file, trials=3)
    assert fake.log[:3] == whole[:3]


def tile(number):
    return RowTile(tile=number, lanes=1)


def store(file, patience=60.0):
    return TrialStore("name", file, tile(1), patience)


def tried(store):
    return [config for config, _ in store.tried()]


def test_a_trial_that_runs_is_taken_for_as_long_as_it_may_take(tmp_path):
    first = store(tmp_path / "db")
    first.claim(tile(2))
    assert tried(first) == [tile(2)] == tried(store(tmp_path / "db"))
    assert tried(store(tmp_path / "db", patience=0.0)) == []
    first.claim(tile(1))  # the default, which each process measures itself
    assert tried(store(tmp_path / "db")) == [tile(2)]
    first.close()
    assert tried(store(tmp_path / "db")) == []


@pytest.mark.parametrize("of", ["to_data", "asdict"])
def test_trials_of_another_version_are_left_out(tmp_path, monkeypatch, of):
    mine = store(tmp_path / "db")
    monkeypatch.setattr(trial_store, of, lambda _: {"template": "Gone"})
    mine.finish(mine.claim(tile(1)), Outcome("ok", seconds=1.0), 1.0)
    assert mine.done() and store(tmp_path / "db").done() == []


def test_a_full_disk(monkeypatch, file):
    """Files cannot grow from the sixth measurement on: all results come back, with a warning."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def measure(config):
        if len(fake.log) == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        return Outcome("ok", seconds=seconds_of(config))

    fake = install(monkeypatch, measure)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # Optuna's, between attempts
    try:
        tuned = run(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(tuned.trials) == TRIALS and tuned.finals
    in_memory, not_recorded = tuned.warnings
    assert "kept in memory only" in in_memory
    assert "the result is not recorded" in not_recorded and "full" in not_recorded
    # What was written before is there.
    fake = install(monkeypatch)
    assert order(run(file))[:5] == order(tuned)[:5]


def test_files_that_hold_something_else(monkeypatch, file):
    """A file of trials costs a warning; one of records is not begun with."""
    install(monkeypatch)
    trials = file.with_name("records-trials.sqlite")
    trials.write_text("my notes\n" * 100)
    tuned = run(file)
    assert len(tuned.trials) == TRIALS and "kept in memory only" in tuned.warnings[0]
    file.write_text("my notes\n" * 100)
    with pytest.raises(RecordError, match="damaged, or not a file of records"):
        run(file)
    assert file.read_text() == trials.read_text() == "my notes\n" * 100


def test_another_search_makes_the_tables_of_the_file_first(monkeypatch, file):
    """The one that was second, and failed, opens the file once more."""
    install(monkeypatch)
    studies, create = [], optuna.create_study

    def second(**options):
        studies.append(create(**options))
        if len(studies) == 1:
            raise RuntimeError("table studies already exists")
        return studies[-1]

    monkeypatch.setattr(optuna, "create_study", second)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert not run(file, trials=2).warnings and len(studies[0].get_trials()) == 2


@pytest.mark.parametrize("url", ["nonsense", "sqlite:////proc/no/such/folder.db"])
def test_a_database_that_is_not_there(monkeypatch, url):
    install(monkeypatch)
    expected = (
        "tune: argument 'storage': expected the URL of a database .* got .*(URL|database file)"
    )
    with pytest.raises(ValueError, match=expected):
        run("", storage=url)
