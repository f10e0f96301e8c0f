"""Searches of several processes that share their trials through a PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from sparsetir.extras import WITHOUT_TORCH

pytest.importorskip("psycopg")
import optuna

TRIALS = 16
OPTIONS = ["spmm", "--graph", "cora", "--threads", "1", "--no-report", "--records",
           "", "--sampler", "random", "--trials", str(TRIALS)]  # fmt: skip
PATIENCE = 20.0  # seconds that a claim of another machine lasts here
# `sparsetir tune` with a measurer that measures nothing. Arguments: seconds of a measurement, the
# name of the machine that it pretends to run on ("": this one), and those of the command. Says what
# it measures, and when that ends; nothing is measured again at the end.
SCRIPT = f"""
import sys, time; {WITHOUT_TORCH}
import pytest
from fake_measurer import install, seconds_of, text
from sparsetir.cli import main
from sparsetir.tuning import owner
from sparsetir.tuning.run import Run
from sparsetir.records.task import Outcome
def measure(config):
    print("begins", text(config), flush=True)
    time.sleep(float(sys.argv[1]))
    print("ends", text(config), flush=True)
    return Outcome("ok", seconds=seconds_of(config))
install(pytest.MonkeyPatch(), measure)
Run.finals = lambda self, measurer: []
if sys.argv[2]:
    begin = owner.Owner.__init__
    owner._machine = lambda: sys.argv[2]
    owner.Owner.__init__ = lambda self, patience: begin(self, {PATIENCE})
sys.exit(main(["tune", *sys.argv[3:]]))
"""


def programs():
    """The folder of the server's programs; None where it is not installed."""
    there = [Path(found).parent for found in [shutil.which("initdb")] if found]
    there += sorted(Path("/usr/lib/postgresql").glob("*/bin"))  # where Debian has them
    return next((folder for folder in reversed(there) if (folder / "initdb").exists()), None)


@pytest.fixture(scope="module")
def server():
    """The URL of a cluster of our own, which takes connections by a socket in its folder alone."""
    binaries = programs()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    user = {}
    if os.getuid() == 0:  # as whom the server refuses to run
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user 'postgres'")
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="sparsetir-pg-", dir="/tmp") as folder:
        if user:
            os.chown(folder, user["user"], user["group"])
        data = Path(folder, "data")
        command = [binaries / "initdb", "-D", data, "-U", "tuner", "-A", "trust", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, **user)
        # Searchers are killed, not the server: it need not wait for the disk.
        options = [f"-c{name}" for name in ("listen_addresses=", "fsync=off")]
        command = [binaries / "postgres", "-D", data, "-k", folder, *options]
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, **user)
        try:
            waited(lambda: Path(folder, ".s.PGSQL.5432").exists(), 60)
            yield f"postgresql+psycopg://tuner@/postgres?host={folder}"
        finally:
            process.send_signal(signal.SIGINT)  # without waiting for who is connected
            process.wait(60)


def waited(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Searcher:
    """A process that searches; what it says goes to a file."""

    def __init__(self, url, folder, name, feat, delay, machine=""):
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parent), *sys.path])
        self.said, self.errors = folder / f"{name}.txt", folder / f"{name}-errors.txt"
        arguments = [str(delay), machine, *OPTIONS, "--feat", str(feat), "--storage", url]
        with self.said.open("w") as said, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *arguments], stdout=said, stderr=errors,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip

    def lines(self, word):
        """The configs that it said to begin, or to end."""
        lines = self.said.read_text().split("\n")[:-1]
        return [line.removeprefix(word + " ") for line in lines if line.startswith(word)]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def finish(self):
        assert self.process.wait(300) == 0, self.errors.read_text()


class Stored(NamedTuple):
    """A trial as the database has it."""

    number: int
    state: str
    config: str
    pid: int
    ended: bool


def stored(url):
    """All trials of the one study."""
    from fake_measurer import text
    from sparsetir.schedules.search.configs import from_data

    (name,) = (study.study_name for study in optuna.get_all_study_summaries(url))
    found = []
    for trial in optuna.load_study(study_name=name, storage=url).get_trials():
        kept = trial.user_attrs
        config, pid = text(from_data(kept["config"])), kept["claim"]["pid"]
        found.append(Stored(trial.number, trial.state.name, config, pid, "outcome" in kept))
    optuna.delete_study(study_name=name, storage=url)
    return found


def check(url, searchers, killed):
    """Nothing is lost, nothing measured twice but what its process was killed at."""
    trials = stored(url)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    done = [trial for trial in trials if trial.state == "COMPLETE"]
    assert all(trial.ended for trial in done)
    assert len(done) == len({trial.config for trial in done}) == TRIALS
    assert not [trial for trial in trials if trial.state in ("RUNNING", "WAITING")]
    begun = Counter(config for searcher in searchers for config in searcher.lines("begins"))
    assert set(begun) == {trial.config for trial in done}
    again = set()
    for searcher in killed:
        *whole, last = [*searcher.lines("begins"), None]
        # All that it had begun before is there, from its own hand.
        assert {*whole[:-1]} <= {t.config for t in done if t.pid == searcher.process.pid}
        again.add(whole[-1] if whole else last)
    assert {config for config, count in begun.items() if count > 1} <= again
    assert all(count <= 1 + len(killed) for count in begun.values())


@pytest.mark.slow
def test_a_kill_loses_and_repeats_nothing(server, tmp_path):
    searchers = [Searcher(server, tmp_path, name, feat=32, delay=0.1) for name in "ab"]
    victim = searchers[0]
    waited(lambda: len(victim.lines("begins")) >= 4, 120)
    time.sleep(random.uniform(0, 0.1))
    victim.kill()
    for searcher in searchers[1:]:
        searcher.finish()
    assert len(searchers[1].lines("ends")) < TRIALS
    check(server, searchers, [victim])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_at_any_time(server, tmp_path, seed):
    """Three that search, of which one after the other is killed and another one begins."""
    rng = random.Random(seed)
    names = (f"searcher{number}" for number in range(100))
    begin = lambda: Searcher(server, tmp_path, next(names), 64, 0.15)  # noqa: E731
    alive = [begin() for _ in range(3)]
    searchers, killed = list(alive), []
    while len(killed) < 5:
        victim = alive.pop(rng.randrange(3))
        waited(lambda: victim.lines("begins") or victim.process.poll() is not None, 120)
        time.sleep(rng.uniform(0, 0.5))
        if victim.process.poll() is not None:
            break
        victim.kill()
        killed.append(victim)
        alive.append(begin())
        searchers.append(alive[-1])
    assert killed
    for searcher in alive:
        searcher.finish()
    check(server, searchers, killed)


@pytest.mark.slow
def test_a_machine_that_is_gone_loses_and_repeats_nothing(server, tmp_path):
    """Its claim lasts for a time, in which the others do without; then it is anyone's."""
    here, there = (
        Searcher(server, tmp_path, name, feat=16, delay=0.2, machine=name)
        for name in ("here", "there")
    )
    waited(lambda: len(there.lines("begins")) >= 3, 120)
    time.sleep(random.uniform(0, 0.2))
    there.kill()
    here.finish()
    last = there.lines("begins")[-1]
    done = {*here.lines("ends"), *there.lines("ends")}
    if last not in there.lines("ends"):
        assert last not in here.lines("begins") and len(done) == TRIALS - 1
    time.sleep(PATIENCE)
    late = Searcher(server, tmp_path, "late", feat=16, delay=0.0, machine="late")
    late.finish()
    check(server, [here, there, late], [there])
