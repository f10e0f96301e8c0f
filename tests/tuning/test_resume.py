"""Searches that go on: after a kill, beside other processes, and where the database fails."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import scipy.sparse as sp
from optuna.storages import RDBStorage

from fake_measurer import install, seconds_of, text
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.records.records import RecordError, Records
from sparsetir.records.task import Outcome
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.search.spaces import Branch, Space
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.tuning import owner, propose
from sparsetir.tuning.owner import Owner
from sparsetir.tuning.run import Run
from sparsetir.tuning.search import tune
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
run(sys.argv[1], trials=int(sys.argv[3]), sampler=sys.argv[4])
"""


def run(file, **options):
    options = {"trials": TRIALS, "threads": 1, "records": file, "sampler": "tpe", **options}
    return tune("spmm", MATRIX, 32, **options)


@contextmanager
def another(file, hang=0, trials=TRIALS, sampler="tpe"):
    """A process that has loaded everything and waits for a line to begin."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    arguments = [str(file), str(hang), str(trials), sampler]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], text=True, stdin=subprocess.PIPE,
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


def test_kill_9_loses_and_repeats_nothing(monkeypatch, tmp_path):
    install(monkeypatch)
    whole = order(run(""))  # what is tried without an interruption
    file = tmp_path / "records.sqlite"
    with another(file, hang=5) as process:
        begin(process)
        theirs = [process.stdout.readline().strip() for _ in range(5)]
        assert theirs == whole[:5]
        # While it lives, its claim counts: neither measured nor in the way.
        fake = install(monkeypatch)
        beside = run(file, trials=7)
        assert len(beside.trials) == 6 and theirs[4] not in order(beside)
        assert not {*theirs} & {*fake.log[:2]}  # then come those that are measured in turns
        process.send_signal(signal.SIGKILL)
        process.wait()
    fake = install(monkeypatch)
    tuned = run(file)
    assert fake.log[0] == theirs[4]  # tried again, before all others
    assert not {*order(beside)} & {*fake.log[: TRIALS - 6]}
    assert len(set(order(tuned))) == len(tuned.trials) == TRIALS
    assert {*order(beside)} < {*order(tuned)}
    # A third run has nothing left to try.
    fake = install(monkeypatch)
    assert order(run(file)) == order(tuned)
    assert len(fake.log) == 3 * 3


def test_what_goes_on_goes_on_as_if_it_had_not_stopped(monkeypatch, tmp_path):
    """Proposals depend on the seed and on what was tried alone."""
    install(monkeypatch)
    whole = order(run("", trials=16))
    file = tmp_path / "records.sqlite"
    run(file, trials=12)
    assert order(run(file, trials=16)) == whole


def test_a_config_is_proposed_at_the_point_that_later_runs_know():
    several = space(1, 2, 3)
    make = lambda tile, unused: several.branches[0].make(tile)  # noqa: E731
    doubled = Space((Branch("RowBlocks", {"tile": (1, 2, 3), "unused": (1, 2, 3)}, make),))
    for seed in range(20):
        found = propose.Proposer(doubled, "tpe", seed, []).next([])
        assert found is not None and found.point == doubled.point(found.config)


@pytest.mark.slow  # another process beside is in the test of kill -9, too
def test_two_at_once_share_the_work(monkeypatch, tmp_path):
    """Both begin with no file: one makes the tables."""
    file = tmp_path / "records.sqlite"
    mine = []

    def measure(config):
        mine.append(text(config))
        time.sleep(0.02)
        return Outcome("ok", seconds=seconds_of(config))

    install(monkeypatch, measure)
    with another(file, trials=16, sampler="random") as process:
        begin(process)
        tuned = run(file, trials=16, sampler="random")
        printed, _ = process.communicate()
        theirs = printed.split("\n")[:-1]
    assert process.returncode == 0 and not tuned.warnings
    # The last measurements of each are in turns, three times for three configs or fewer.
    searched = Counter(dict.fromkeys(mine, 1)) + Counter(dict.fromkeys(theirs, 1))
    final = run(file, trials=16)
    assert len(set(order(final))) == len(final.trials) == 16
    assert set(searched) == {*order(final)}
    assert len(Records(file).all()) == 3


def space(*tiles):
    make = lambda tile: RowBlocks(tile=tile, lanes=1)  # noqa: E731
    return Space((Branch("RowBlocks", {"tile": tiles}, make),))


def store(file, owner, tiles=(1, 2, 3)):
    return TrialStore("name", f"sqlite:///{file}", space(*tiles), owner)


def tile(number):
    config = RowBlocks(tile=number, lanes=1)
    return propose.candidate(config, {"template": "RowBlocks", "RowBlocks.tile": number})


def test_what_kills_its_run_twice_is_recorded_as_crashed(tmp_path):
    for attempt in range(2):
        dying = Owner(60)
        entry = store(tmp_path / "db", dying).claim(tile(1))
        assert entry is not None
        dying.close()  # without `TrialStore.close`, as a kill
        last = store(tmp_path / "db", Owner(60))
        if attempt == 0:
            assert [e.config for e in last.killed()] == [entry.config] and not last.taken()
    (crashed,) = last.done()
    assert crashed.config == entry.config and crashed.outcome.state == "crashed"
    assert "2 times" in crashed.outcome.message


def test_claims_at_the_same_time_do_not_exceed_the_trials(tmp_path):
    """Both see one trial less than are wanted, and take another config each."""
    runs = [
        Run(
            "name",
            f"sqlite:///{tmp_path / 'db'}",
            space(1, 2, 3),
            sampler="exhaustive",
            seed=0,
            first=[tile(1).config],
            trials=2,
            seconds=None,
            patience=60,
        )  # fmt: skip
        for _ in range(2)
    ]
    with runs[0], runs[1]:
        first = runs[0]._next()
        assert first is not None
        runs[0]._finish(first, Outcome("ok", seconds=1.0))
        refresh, taken = runs[1]._store.refresh, []

        def other_is_quicker():
            refresh()
            if not taken:
                taken.append(runs[0]._store.claim(tile(3)))

        runs[1]._store.refresh = other_is_quicker
        assert runs[1]._next() is None
        assert taken[0] is not None
        runs[1]._store.refresh = refresh
        refresh()
        assert [e.config for e in runs[1]._store.taken()] == [tile(1).config, tile(3).config]


def test_a_kill_between_outcome_and_state(tmp_path, monkeypatch):
    dying = Owner(60)
    first = store(tmp_path / "db", dying)
    entry = first.claim(tile(2))
    with monkeypatch.context() as patch:
        patch.setattr(RDBStorage, "set_trial_state_values", lambda *given: None)
        first.finish(entry, Outcome("ok", seconds=0.5), 7.0)
    dying.close()
    (found,) = store(tmp_path / "db", Owner(60)).done()
    assert (found.outcome, found.when) == (Outcome("ok", seconds=0.5), 7.0)
    (again,) = store(tmp_path / "db", Owner(60)).done()
    assert again == found


def test_a_process_that_ends_while_another_looks(tmp_path):
    """It has finished its trial since the other one has read."""
    ending = Owner(60)
    first, second = store(tmp_path / "db", ending), store(tmp_path / "db", Owner(60))
    entry = first.claim(tile(1))
    second.refresh()
    first.finish(entry, Outcome("ok", seconds=0.5), 1.0)
    ending.close()
    second._clear(second.entries[0])
    assert not second.killed()
    second.refresh()
    assert [e.outcome.seconds for e in second.done()] == [0.5]


def test_of_two_claims_the_first_counts(tmp_path):
    one, two = (store(tmp_path / "db", Owner(60)) for _ in range(2))
    assert one.claim(tile(1)) is not None
    assert two.claim(tile(1)) is None  # it has not looked since
    assert two.claim(tile(2)) is not None
    one.refresh()
    assert [e.config.tile for e in one.taken()] == [1, 2]


def test_claims_of_other_machines_last_for_a_time(monkeypatch):
    claim = Owner(60).claim()
    assert Owner.lives(claim)
    assert Owner.lives({**claim, "machine": "elsewhere"})
    assert not Owner.lives({**claim, "machine": "elsewhere", "until": time.time() - 1})


def test_a_process_of_the_same_number_is_another(monkeypatch):
    started = owner._started(os.getppid())
    parent = {**Owner(60).claim(), "pid": os.getppid(), "started": started}
    assert Owner.lives(parent)
    assert not Owner.lives({**parent, "started": started + 1})
    assert socket.gethostname() in parent["machine"]


def test_a_space_with_other_choices_goes_on(tmp_path):
    """Optuna refuses parameters whose choices change."""
    run_owner = Owner(60)
    first = store(tmp_path / "db", run_owner)
    first.finish(first.claim(tile(1)), Outcome("ok", seconds=1.0), 1.0)
    later = store(tmp_path / "db", run_owner, tiles=(1, 2, 3, 4))
    later.finish(later.claim(tile(4)), Outcome("ok", seconds=2.0), 2.0)
    assert not later.warnings
    found = store(tmp_path / "db", run_owner).done()
    assert [e.config.tile for e in found] == [1, 4]


def test_configs_of_another_version_are_left_out(tmp_path):
    mine = store(tmp_path / "db", Owner(60))
    gone = replace(tile(1), data={**to_data(tile(1).config), "template": "Gone"})
    mine.finish(mine.claim(gone), Outcome("ok", seconds=1.0), 1.0)
    assert store(tmp_path / "db", Owner(60)).done() == []


def test_a_database_in_place_of_the_file(monkeypatch, tmp_path):
    fake = install(monkeypatch)
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    first = run("", storage=url, trials=5)
    second = run(tmp_path / "records.sqlite", storage=url, trials=8)
    assert order(second)[:5] == order(first) and len(second.trials) == 8
    assert len(fake.log) == 8 + 2 * 9
    assert len(Records(tmp_path / "records.sqlite").all()) == 1


def test_a_full_disk(monkeypatch, tmp_path):
    """Files cannot grow from the sixth measurement on: all results come back, with a warning."""
    file = tmp_path / "records.sqlite"
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
    assert "kept in memory only" in in_memory and "disk" in in_memory
    assert "the result is not recorded" in not_recorded and "full" in not_recorded
    # What was written before is there.
    fake = install(monkeypatch)
    again = run(file)
    assert order(again)[:5] == order(tuned)[:5] and len(again.trials) == TRIALS
    assert {*fake.log[: TRIALS - 5]}.isdisjoint(order(tuned)[:5])


def test_a_file_that_holds_something_else(monkeypatch, tmp_path):
    install(monkeypatch)
    file = tmp_path / "records.sqlite"
    file.write_text("my notes\n" * 100)
    with pytest.raises(RecordError, match="damaged, or no file of records"):
        run(file)
    assert file.read_text() == "my notes\n" * 100


def test_a_database_that_is_not_there(monkeypatch):
    install(monkeypatch)
    with pytest.raises(RuntimeError, match="argument 'storage': cannot open 'sqlite:////proc/"):
        run("", storage="sqlite:////proc/no/such/folder.db")


def test_a_driver_that_is_not_installed(monkeypatch):
    install(monkeypatch)
    advice = (
        r"needs a package: .*sparsetir\[postgresql\]'` and begin it with postgresql\+psycopg://"
    )
    with pytest.raises(ValueError, match=advice):
        run("", storage="postgresql+pg8000://here/trials")
