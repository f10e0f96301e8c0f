"""The tuner: which configs it tries, in which order, until when, and what it returns."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections import Counter

import numpy as np
import optuna
import pytest
import scipy.sparse as sp

import sparsetir
from fake_measurer import install, seconds_of, text
from refusals import refuse
from sparsetir.planning import request
from sparsetir.records.records import Records
from sparsetir.records.task import Outcome
from sparsetir.schedules.search.spaces import Branch, Space
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.tuning import search
from sparsetir.tuning.propose import Proposer
from sparsetir.tuning.report import ranked
from sparsetir.tuning.search import tune
from sparsetir.tuning.tuned import MARGIN

MATRIX = sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=0)


def run(**options):
    """SpMM with 32 features on one thread: 57 configs or so."""
    options = {"trials": 12, "threads": 1, "records": "", **options}
    return tune("spmm", MATRIX, 32, **options)


def order(tuned):
    return [text(trial.config) for trial in tuned.trials]


def small_space(values=4):
    """One branch of one parameter; point 0 is no config."""
    make = lambda tile: RowTile(tile=tile, lanes=1) if tile else None  # noqa: E731
    return Space((Branch("RowTile", {"tile": tuple(range(values))}, make),))


# What is tried.


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_seed_tries_the_same_in_the_same_order(monkeypatch, sampler):
    """The default and the candidates first."""
    install(monkeypatch)
    first, second = (run(sampler=sampler, seed=3, trials=25) for _ in range(2))
    assert order(first) == order(second) and len(set(order(first))) == 25
    defaults = sparsetir.plan_candidates("spmm", MATRIX, 32, threads=1)
    assert [trial.config for trial in first.trials[: len(defaults)]] == defaults
    assert first.default == defaults[0]


def test_exhaustive_measures_every_config_once(monkeypatch):
    """The sampler that auto chooses for few configs."""
    install(monkeypatch)
    tuned = run(sampler="exhaustive", trials=1)
    assert len(set(order(tuned))) == len(tuned.trials) > 40
    assert any(isinstance(trial.config, Decomposed) for trial in tuned.trials)
    assert tuned.best.outcome.seconds == min(seconds_of(trial.config) for trial in tuned.trials)
    assert order(run(sampler="auto", trials=len(tuned.trials))) == order(tuned)
    assert order(run(sampler="auto", trials=20)) == order(run(sampler="tpe", trials=20))


@pytest.mark.parametrize("sampler", ["tpe", "random", "exhaustive"])
def test_a_search_ends_with_the_space_and_measures_nothing_twice(monkeypatch, sampler):
    monkeypatch.setattr(request, "space", lambda *args: small_space(6))
    fake = install(monkeypatch)
    default = [text(c) for c in sparsetir.plan_candidates("spmm", MATRIX, 32, threads=1)]
    tuned = run(sampler=sampler, trials=100)
    assert set(order(tuned)) == {text(RowTile(tile=t, lanes=1)) for t in range(1, 6)} | {*default}
    measured = Counter(fake.log)
    assert sum(measured.values()) == len(tuned.trials) + 3 * (len(tuned.finals) - 1)


def test_failures_teach_the_sampler():
    """Proposals leave a template alone that always fails."""
    values = {"tile": tuple(range(1, 40))}
    make = {name: (lambda tile, k=k: RowTile(tile=tile, lanes=1, prefetch=k))
            for k, name in enumerate(("bad", "good"))}  # fmt: skip
    space = Space(tuple(Branch(name, values, make[name]) for name in make))
    proposer, tried = Proposer(space, "tpe", 0, []), []
    for _ in range(40):
        config = proposer.next(tried)
        good = config.prefetch == 1
        tried.append((config, Outcome("ok", seconds=config.tile) if good else Outcome("crashed")))
    late = Counter(config.prefetch for config, _ in tried[20:])
    assert late[1] > 2 * late[0]


def test_what_is_being_measured_is_not_proposed():
    proposer = Proposer(small_space(), "tpe", 0, [])
    config = RowTile(tile=2, lanes=1)
    assert proposer.next([(config, None)]) not in (None, config)


# When it ends.


def test_time_is_up(monkeypatch):
    install(monkeypatch, delay=0.02)
    tuned = run(sampler="exhaustive", seconds=0.3)
    assert 1 < len(tuned.trials) < 40 and not tuned.interrupted
    assert tuned.finals


def test_ctrl_c_keeps_what_was_found(monkeypatch, tmp_path):
    calls = []

    def measure(config):
        calls.append(config)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return Outcome("ok", seconds=seconds_of(config))

    install(monkeypatch, measure)
    file = tmp_path / "records.sqlite"
    tuned = run(records=file)
    assert tuned.interrupted and len(tuned.trials) == 5
    least = min(map(seconds_of, calls[:5]))  # or the default, where that is hardly slower
    assert least <= tuned.best.outcome.seconds <= (1 + MARGIN) * least
    assert "interrupted" in repr(tuned)
    (record,) = Records(file).all()
    assert record.seconds == tuned.best.outcome.seconds
    install(monkeypatch)
    again = run(records=file)
    assert len(again.trials) == 12 and not again.interrupted
    assert again.trials[5].config == calls[5]  # what was not measured to the end comes next


def test_ctrl_c_with_several_workers(monkeypatch):
    """The interrupt reaches only the main thread, which ends the other measurements."""
    reached, ended = threading.Event(), threading.Event()

    def measure(config):
        if len(fake.log) >= 6:
            reached.set()
            assert ended.wait(10)
            return Outcome("crashed", message="interrupted")
        return Outcome("ok", seconds=seconds_of(config))

    def join(thread, timeout=None):
        if threading.current_thread() is threading.main_thread() and not ended.is_set():
            assert reached.wait(10)
            raise KeyboardInterrupt
        return original(thread, timeout)

    fake = install(monkeypatch, measure)
    fake.interrupt = lambda self: ended.set()
    original = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(search, "cores_for", lambda workers, threads: [(0,)] * workers)
    tuned = run(workers=2)
    assert tuned.interrupted and tuned.counts == {"ok": len(tuned.trials)}
    assert 4 <= len(tuned.trials) <= 5


def test_what_is_wrong_with_us_is_raised(monkeypatch):
    def measure(config):
        raise RuntimeError("no worker")

    install(monkeypatch, measure)
    monkeypatch.setattr(search, "cores_for", lambda workers, threads: [(0,)] * workers)
    for workers in (1, 2):
        with pytest.raises(RuntimeError, match="no worker"):
            run(workers=workers)


# What comes out.


def test_failures_are_trials_and_the_run_goes_on(monkeypatch):
    states = ["ok", "crashed", "hung", "wrong", "out of memory", "failed", "pruned"]

    def measure(config):
        measured = sorted(set(fake.log), key=fake.log.index)
        state = states[measured.index(text(config)) % 7]
        seconds = seconds_of(config) if state == "ok" else 1.0 if state == "pruned" else None
        return Outcome(state, seconds=seconds, message="" if seconds else f"it {state}")

    fake = install(monkeypatch, measure)
    tuned = run(trials=14)
    assert tuned.counts == dict.fromkeys(states, 2)
    assert len(tuned.failures) == 10 and tuned.best.outcome.state == "ok"
    assert "2 crashed" in repr(tuned)


def test_where_nothing_runs(monkeypatch, tmp_path):
    install(monkeypatch, lambda config: Outcome("crashed", message="SIGSEGV"))
    file = tmp_path / "records.sqlite"
    tuned = run(trials=2, records=file)
    with pytest.raises(RuntimeError, match="no config ran .2 crashed.; the first failure: SIGSEGV"):
        _ = tuned.best
    assert tuned.speedup is None and "2 crashed" in repr(tuned)
    assert Records(file).all() == []


def test_the_winner_is_not_the_luckiest(monkeypatch):
    """The first measurement of one config was half of what it is."""
    lucky = sparsetir.plan_candidates("spmm", MATRIX, 32, threads=1)[2]

    def measure(config):
        luck = config == lucky and fake.log.count(text(config)) == 1
        return Outcome("ok", seconds=(0.5 if luck else 1.0) * (2e-3 if config == lucky else
                                                               seconds_of(config)))  # fmt: skip

    fake = install(monkeypatch, measure)
    tuned = run()
    assert min(tuned.trials, key=lambda trial: trial.outcome.seconds).config == lucky
    assert tuned.config != lucky
    assert tuned.config in [trial.config for trial in tuned.finals]
    assert fake.log[-9:-6] == fake.log[-6:-3] == fake.log[-3:]  # in turns
    default = seconds_of(tuned.default)
    assert tuned.speedup == pytest.approx(default / tuned.best.outcome.seconds)


@pytest.mark.parametrize("workers", [1, 2])
def test_where_the_default_does_not_run_there_is_nothing_to_measure_beside(monkeypatch, workers):
    default = sparsetir.plan_candidates("spmm", MATRIX, 32, threads=1)[0]

    def measure(config):
        return Outcome("crashed") if config == default else Outcome("ok", seconds=1.0)

    fake = install(monkeypatch, measure)
    monkeypatch.setattr(search, "_places", lambda count, *rest: [{}] * count)
    assert run(workers=workers).speedup is None
    assert set(fake.references) == {None}


@pytest.mark.parametrize(("gain", "stays"), [(1.01, True), (1.05, False)])
def test_the_default_stays_where_little_is_gained(monkeypatch, gain, stays):
    default = sparsetir.plan_candidates("spmm", MATRIX, 32, threads=1)[0]

    def measure(config):
        return Outcome("ok", seconds=gain if config == default else 1.0)

    install(monkeypatch, measure)
    tuned = run()
    assert (tuned.config == default) == stays
    assert ranked(tuned)[0] == tuned.best
    assert tuned.speedup == pytest.approx(1.0 if stays else gain)


def test_progress(monkeypatch):
    install(monkeypatch)
    events = []

    class Progress:
        def begin(self, total, done=0):
            events.append(("begin", total, done))

        def step(self, trial, best, failures, default):
            assert best.outcome.seconds <= min(trial.outcome.seconds, default)
            events.append((trial.number, failures))

        def end(self):
            events.append("end")

    run(progress=Progress(), trials=9)
    assert events == [("begin", 9, 0), *((i, 0) for i in range(9)), "end"]


def test_workers_share_the_trials(monkeypatch):
    fake = install(monkeypatch, delay=0.01)
    monkeypatch.setattr(search, "cores_for", lambda workers, threads: [(0,), (1,), (2,)])
    tuned = run(workers=3, trials=20, time_limit=7.0, memory_limit=2**30)
    assert [trial.number for trial in tuned.trials] == list(range(20))
    assert len(set(order(tuned))) == 20
    limits = {"time_limit": 7.0, "memory_limit": 2**30, "remote": None}
    limited = [{k: v for k, v in options.items() if k != "modules"} for options in fake.options]
    assert limited == [{**limits, "cores": (n,)} for n in range(3)]


@pytest.mark.slow  # docs/tutorial.md and docs/new_operator.md search, too
def test_with_a_worker():
    tuned = run(trials=2)
    assert tuned.counts.get("ok") and not tuned.failures and not tuned.warnings
    b = np.ones((200, 32), "float32")
    assert np.allclose(tuned.plan()(b), MATRIX @ b, atol=1e-4)


# Refusals, and what must not show.


def test_refusals(monkeypatch):
    install(monkeypatch)
    refuse(
        """
        run(trials=0)  # ValueError: tune: argument 'trials': expected 1 or more, got 0
        run(trials=2.5)  # ValueError: tune: argument 'trials': expected 1 or more, got 2.5
        run(seconds=0)  # ValueError: tune: argument 'seconds': expected more than 0, got 0
        run(seconds="9")  # ValueError: tune: argument 'seconds': expected more than 0, got '9'
        run(time_limit=None)  # ValueError: argument 'time_limit': expected more than 0, got None
        run(memory_limit="4G")  # ValueError: argument 'memory_limit': expected 1 or more, got '4G'
        run(records=3)  # TypeError: tune: argument 'records': expected a path, got int
        run(modules="mine")  # TypeError: argument 'modules': expected a list of names, got 'mine'
        run(remote="a:1:b")  # TypeError: argument 'remote': expected a Remote, got 'a:1:b'
        run(graph=3)  # TypeError: argument 'graph': expected a text, got 3
        run(workers=0)  # ValueError: tune: argument 'workers': expected 1 or more, got 0
        run(workers=4096)  # ValueError: cores_for: argument 'workers'
        run(seed=-1)  # ValueError: tune: argument 'seed': expected 0 or more, got -1
        run(sampler="best")  # ValueError: expected one of auto, tpe, random, exhaustive, got 'best'
        run(reduce="median")  # ValueError: argument 'reduce'
        run(records=".")  # ValueError: argument 'records': expected a file, got the folder
        """,
        globals(),
    )


@pytest.mark.parametrize(("package", "title"), [("optuna", "Optuna"), ("psutil", "psutil")])
def test_without_a_package(monkeypatch, package, title):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"tune: needs {title}, .* run `pip install 'optuna"):
        run()


def test_optuna_is_quiet_and_as_it_was(monkeypatch, tmp_path, capfd):
    install(monkeypatch)
    root, handler, records = logging.getLogger(), logging.Handler(), []
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(root, "handlers", [handler])
    optuna.logging.enable_propagation()
    before = optuna.logging.get_verbosity()
    logging.getLogger("optuna").warning("heard")
    assert [r.getMessage() for r in records] == ["heard"]
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(records=tmp_path / "records.sqlite", sampler="tpe", trials=14)
    optuna.logging.disable_propagation()
    assert optuna.logging.get_verbosity() == before
    assert len(records) == 1
    assert capfd.readouterr() == ("", "")
