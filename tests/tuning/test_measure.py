"""Measurements in a separate process."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import scipy.sparse as sp
import tvm

import sparsetir
from refusals import refuse
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.machine import assume, real_machine
from sparsetir.planning.plan import requested
from sparsetir.planning.request import Request
from sparsetir.records.task import Outcome, Reference
from sparsetir.tuning import process as processes
from sparsetir.tuning import serving
from sparsetir.tuning.case import OperatorCase
from sparsetir.tuning.measure import Measurer, cores_for
from sparsetir.tuning.timing import timed
from sparsetir.tuning.worker import Local
from tuning import faulty_templates as faulty

MODULES = ("tuning.faulty_templates",)


@pytest.fixture(autouse=True, scope="module")
def what_other_tests_left_is_no_garbage() -> None:
    """A measurement begins with a collection of all garbage that a process holds."""
    gc.collect()
    gc.freeze()


MEGABYTE = 2**20
FEAT = 32


def task(op: str = "spmm", feat: int = FEAT, dtype: str = "float32", **options) -> Request:
    a = sp.random_array((300, 200), density=0.05, format="csr", dtype="float32", rng=0)
    return requested(op, SparseMatrix(a), feat, dtype=dtype, threads=1, **options)


@pytest.fixture(scope="module")
def measurer():
    """One worker for configs that do not end it; starting one takes longer than a test."""
    of_task = task()
    with Measurer(of_task, time_limit=60, memory_limit=1000 * MEGABYTE, modules=MODULES) as worker:
        worker.measure(faulty.RIGHT)  # so that the clock of no test includes the start
        yield worker


def pid(measurer: Measurer) -> int:
    return measurer._process.pid


def right(outcome: Outcome) -> None:
    assert outcome.state == "ok", outcome
    assert 0 < outcome.seconds <= outcome.median


def test_wrong_results_are_recorded_and_not_timed(measurer: Measurer) -> None:
    for config in (faulty.Wrong(), faulty.Unwritten()):
        worker = pid(measurer)
        outcome = measurer.measure(config)
        assert outcome.state == "wrong" and outcome.seconds is None
        assert "the first at [" in outcome.message and "\n" not in outcome.message
        right(measurer.measure(faulty.RIGHT))
        assert pid(measurer) == worker


def test_memory_is_limited_anew_for_each_config(measurer: Measurer) -> None:
    limit = measurer.memory_limit
    outcome = measurer.measure(faulty.Hungry(2 * limit))
    assert outcome.state == "out of memory" and outcome.seconds is None
    assert "emory" in outcome.message
    for _ in range(3):
        right(measurer.measure(faulty.Hungry(limit // 2)))


def test_nothing_is_printed_to_the_terminal(measurer: Measurer, capfd) -> None:
    right(measurer.measure(faulty.Loud()))
    assert capfd.readouterr() == ("", "")


def interrupted(*arguments) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_crash_and_a_hang_are_recorded_and_it_goes_on(capfd, monkeypatch) -> None:
    core = sorted(os.sched_getaffinity(0))[-1]
    options = {"cores": (core,), "environment": {"OF_MY_OWN": "7"}, "modules": MODULES}
    with Measurer(task(threads=2), **options) as measurer:
        right(measurer.measure(faulty.RIGHT))
        folder = Path(measurer._folder.name)
        # A worker that ended beforehand is no fault of the candidate's.
        measurer._process._popen.kill()
        measurer._process._popen.wait()
        outcome = measurer.measure(faulty.Crashing("about to read nothing"))
        assert outcome.state == "crashed" and outcome.seconds is None
        assert "SIGSEGV" in outcome.message and "about to read nothing" in outcome.message
        right(measurer.measure(faulty.RIGHT))

        measurer.time_limit, start = 1.5, time.monotonic()
        outcome = measurer.measure(faulty.Hanging())
        assert outcome.state == "hung" and "took longer than 1.5 s" in outcome.message
        assert time.monotonic() - start >= 1.5
        measurer.time_limit = 60

        # Ctrl-C here: what the worker would still answer must not be taken for a later answer.
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(processes.select, "select", interrupted)
            measurer.measure(faulty.RIGHT)
        assert measurer._process is None
        right(measurer.measure(faulty.RIGHT))

        process = Path(f"/proc/{pid(measurer)}")
        for thread in (process / "task").iterdir():
            assert f"Cpus_allowed_list:\t{core}\n" in (thread / "status").read_text()
        environment = (process / "environ").read_bytes().split(b"\0")
        assert b"OF_MY_OWN=7" in environment and b"TVM_NUM_THREADS=2" in environment

        # Ctrl-C at the terminal is for the parent.
        assert os.getpgid(pid(measurer)) != os.getpgid(0)
        os.kill(pid(measurer), signal.SIGINT)
        right(measurer.measure(faulty.RIGHT))

        timer = threading.Timer(1.0, measurer.interrupt)
        timer.start()
        outcome = measurer.measure(faulty.Hanging())
        assert (outcome.state, outcome.message) == ("crashed", "interrupted")
        timer.join()
        assert folder.exists()
    assert not folder.exists()
    assert capfd.readouterr() == ("", "")


def ended(folder: Path, code: str, before: bool = False) -> tuple[str, str]:
    """State and message for a process that runs `code`, and may have ended beforehand."""
    process = processes.Process(
        code, environment=dict(os.environ), folder=folder, printed=folder / "printed.txt"
    )
    try:
        if before:
            process._popen.wait()
        with pytest.raises(processes.Ended) as error:
            process.answer(20)
    finally:
        process.end()
    return error.value.state, str(error.value)


NEW = "import ctypes; new = ctypes.CDLL('libstdc++.so.6')._Znwm; "
ENDS = {
    "import sys; sys.exit(5)": ("crashed", "the process ended with status 5"),
    "import os; os.kill(os.getpid(), 9)": ("crashed", "the process was ended by SIGKILL"),
    NEW + "new.argtypes = [ctypes.c_size_t]; new(2**60)": ("out of memory", "bad_alloc"),
    "raise MemoryError": ("out of memory", "its last line: MemoryError"),
    "print('first'); print('last'); import os; os.abort()": ("crashed", "ended by SIGABRT"),
}


@pytest.mark.parametrize("code", ENDS)
def test_how_a_process_ended(tmp_path: Path, code: str) -> None:
    for before in (True, False):
        state, message = ended(tmp_path, code, before)
        assert state == ENDS[code][0] and ENDS[code][1] in message and "\n" not in message


def test_an_end_by_the_system_is_for_want_of_memory(tmp_path: Path, monkeypatch) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(processes, "_oom_kills", lambda: next(counts))
    state, message = ended(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert state == "out of memory" and "SIGKILL, by the system for want of memory" in message


@pytest.mark.slow
def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A process is ended also where it hangs, and gets no message."""
    program = f"""
import sys; {WITHOUT_TORCH}
import numpy as np, scipy.sparse as sp
from sparsetir.tuning.measure import Measurer
from sparsetir.planning.plan import requested
from tuning import faulty_templates as faulty
matrix = sparsetir.SparseMatrix(sp.eye_array(20, format="csr", dtype="float32"))
measurer = Measurer(requested("spmm", matrix, {FEAT}), modules={MODULES})
assert measurer.measure(faulty.RIGHT).state == "ok"
print(measurer._process.pid, measurer._folder.name, flush=True)
measurer.measure(faulty.Hanging())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
    worker, folder = parent.stdout.readline().split()
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10
    while Path(f"/proc/{int(worker)}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    shutil.rmtree(folder.decode())


def test_a_worker_that_cannot_start_is_told_once() -> None:
    with Measurer(task(), modules=("there_is_no_such_module",)) as measurer:
        with pytest.raises(RuntimeError, match="cannot start: ModuleNotFoundError: No module"):
            measurer.measure(faulty.RIGHT)


@pytest.mark.parametrize(("options", "raised"), [({}, False), ({"ahead": True}, True)])
def test_a_process_goes_before_others_only_when_asked(monkeypatch, options, raised) -> None:
    priorities: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "setpriority", lambda *how: priorities.append(how))
    process = processes.Process("", environment=dict(os.environ), **options)
    process.end()
    assert [pid for _, pid, _ in priorities] == [process.pid] * raised


def test_what_only_linux_has_is_refused_elsewhere(monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ValueError, match="'workers': expected 1 on a system that binds no process"):
        cores_for(2, 1)
    with pytest.raises(RuntimeError, match="argument 'cores': expected None, this system binds no"):
        processes.Process("", environment={}, cores=[0])
    machine = real_machine()._replace(system="darwin")
    limited = pytest.raises(ValueError, match="argument 'memory_limit': expected None, as only")
    with assume(machine), limited:
        Measurer(task(), memory_limit=MEGABYTE)
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(RuntimeError, match="expected Linux or another POSIX system, got nt"):
        processes.Process("", environment={})


def test_orphans_end_where_the_system_does_not_end_them(monkeypatch) -> None:
    parents, ended = iter([7, 7, 1]), []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    serving._watch(7)
    assert ended == [1] and not list(parents)


def test_cores_for() -> None:
    with assume(real_machine()._replace(cpus=(2, 3, 5, 7, 9))):
        assert cores_for(2, 2) == [(2, 3), (5, 7)]
        assert cores_for(5, 1) == [(2,), (3,), (5,), (7,), (9,)]
    refuse(
        """
        cores_for(3, 2)  # ValueError: argument 'workers': 3 workers of 2 threads need 6
        cores_for(1, 0)  # ValueError: argument 'threads': expected 1 or more, got 0
        Measurer(task(), time_limit=0)  # ValueError: 'time_limit': expected seconds above 0, got 0
        """,
        globals(),
    )


class Clocked:
    """Calls of a preset length, by a pretended clock."""

    def __init__(self, monkeypatch, seconds: float, launch: float | None = None) -> None:
        self.now = self.busy_until = 0.0
        self.calls = self.waits = 0
        self.seconds, self.launch = seconds, launch
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", lambda s: None)

    def call(self) -> None:
        self.calls += 1
        if self.launch is None:
            self.now += self.seconds
        else:  # on a device, while this goes on
            self.now += self.launch
            self.busy_until = max(self.now, self.busy_until) + self.seconds

    def finish(self) -> None:
        self.waits += 1
        self.now = max(self.now, self.busy_until)


@pytest.mark.parametrize("seconds", [5.0, 0.1, 0.03, 1e-3, 1e-5])
def test_how_many_calls_are_timed(monkeypatch, seconds: float) -> None:
    clock = Clocked(monkeypatch, seconds)
    outcome = timed(clock.call, None, None)
    assert outcome.state == "ok"
    assert outcome.seconds == pytest.approx(seconds) == outcome.median
    assert 3 <= clock.calls <= 5 if seconds > 0.02 else 0.1 <= clock.now < 0.15
    clock = Clocked(monkeypatch, seconds)
    assert timed(clock.call, None, seconds / 3.1).state == "pruned"
    # Twice three calls, or as many as take some milliseconds; one where that is long.
    assert clock.calls == 1 if seconds == 5.0 else 3 <= clock.calls <= 6 + 0.011 / seconds
    assert timed(clock.call, None, seconds / 2.9).state == "ok"


@pytest.mark.parametrize("seconds", [0.1, 1e-3, 1e-5])
def test_a_machine_that_is_slower_for_a_while_does_not_count(monkeypatch, seconds: float) -> None:
    """Calls beside those of a yardstick that takes twice as long, on a machine of two speeds."""
    clock = Clocked(monkeypatch, seconds)

    def slower(pause: float) -> None:  # by turns, and at the end by more than ever
        slow = 1.65 if int(clock.now / 0.05) % 3 else 1.0
        clock.seconds = slow * seconds

    monkeypatch.setattr(time, "sleep", slower)
    clock.seconds = 1.65 * seconds
    yardstick = (lambda: (clock.call(), clock.call()) and None), 3e-3
    outcome = timed(clock.call, None, None, yardstick)
    assert outcome.seconds == pytest.approx(1.5e-3) == outcome.median
    assert outcome.extra["measured"] >= 0.99 * seconds
    assert outcome.extra["yardstick"] >= 1.98 * seconds
    # What is hopeless is so by the same measure.
    assert timed(clock.call, None, 1.5e-3 / 3.3, yardstick).state == "pruned"
    assert timed(clock.call, None, 1.5e-3 / 2.8, yardstick).state == "ok"


def test_configs_are_timed_beside_a_reference(measurer: Measurer) -> None:
    alone = measurer.measure(faulty.RIGHT)
    right(alone)
    beside = measurer.measure(faulty.RIGHT, None, Reference(faulty.RIGHT, seconds=100.0))
    assert beside.state == "ok"
    assert beside.seconds == pytest.approx(100.0, rel=0.5)  # both are the same
    assert beside.seconds <= beside.median
    assert beside.extra["measured"] < 1.0
    refused = sparsetir.schedules.templates.row_tile.RowTile(tile=64, lanes=16)
    with pytest.raises(RuntimeError, match="the reference cannot be measured: ScheduleError: "):
        measurer.measure(faulty.RIGHT, None, Reference(refused, seconds=1.0))
    right(measurer.measure(faulty.RIGHT))


def test_short_calls_on_a_gpu_are_waited_for_together(monkeypatch) -> None:
    clock = Clocked(monkeypatch, seconds=2e-5, launch=5e-6)
    outcome = timed(clock.call, clock.finish, None)
    assert outcome.seconds == pytest.approx(2e-5, rel=0.02)
    assert clock.calls > 10 * clock.waits
    assert 0.1 <= clock.now < 0.15


@pytest.mark.parametrize(
    ("op", "dtype", "options"),
    [
        ("sddmm", "float16", {"heads": 2}),
        ("spmm", "bfloat16", {"reduce": "mean"}),
        ("spmm", "float64", {"reduce": "max", "heads": 2}),
        ("spmv", "float32", {}),
    ],
)
@pytest.mark.default(2)
def test_every_operator_is_checked(op: str, dtype: str, options) -> None:
    """The classes of a worker, in this process."""
    of_task = task(op, 1 if op == "spmv" else FEAT, dtype, **options)
    device = Local(OperatorCase(of_task))
    outcome = device.measure(of_task.chosen(), None)
    assert outcome.state == "ok" and outcome.bytes > 0
    device.case.check.exact[-1] += 1
    assert device.measure(of_task.chosen(), None).state == "wrong"


@pytest.mark.skipif(tvm.runtime.device("cuda", 0).exist, reason="there is a GPU")
def test_no_trial_without_a_device() -> None:
    with pytest.raises(ValueError, match="'target': expected a device .*, got no cuda device"):
        Local(OperatorCase(task(target="cuda")))
