"""Measuring candidates in a process of its own, which may crash or hang."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsetir.bench.names import THREADS
from sparsetir.bench.rounds import PRIORITY
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.search import configs
from sparsetir.targets import resolve_target
from sparsetir.tuning.remote import Remote
from sparsetir.tuning.task import Outcome, Reference, Tunable

__all__ = ["Measurer", "cores_for"]

START_LIMIT = 600.0  # seconds until a worker has loaded everything and knows the exact result
# What errors and last words say, in small letters, where there was no memory.
OUT_OF_MEMORY = ("bad_alloc", "out of memory", "memoryerror", "out_of_memory", "cannot allocate")
LAUNCH = "from sparsetir.tuning.worker import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
LAST = 4096  # bytes at the end of what a worker printed that its last lines are looked for in


class _Ended(Exception):
    """A worker that gives no answer; `state` of an Outcome."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class Measurer:
    """A worker process in which configs of a task are compiled, checked and timed.

    It is started when it is first needed, and again after a crash or a hang; it ends with the
    thread that started it. This is a context manager, to be used from one thread at a time. Several
    of them are independent of each other.

    time_limit : seconds for a candidate: compiling, converting, checking and timing it
    memory_limit : bytes that a candidate may take beside what the worker holds when it begins
        (RLIMIT_DATA of the process: not a GPU's memory, nor files that are mapped)
    cores : the processors that the worker may run on (see :func:`cores_for`); by default those of
        this process
    environment : of the worker, beside this process's, such as CUDA_VISIBLE_DEVICES
    remote : a device elsewhere, for which this machine compiles
    modules : names of plug-in modules with further templates, which the worker imports when it
        starts; they put them into `sparsetir.schedules.templates.registry.TEMPLATES`

    What the worker prints goes to a file, of which messages quote the last line. Its arrays and
    other files are in a temporary folder that `close` removes.
    """

    def __init__(
        self,
        task: Tunable,
        *,
        time_limit: float = 60.0,
        memory_limit: int | None = None,
        cores: Sequence[int] | None = None,
        environment: Mapping[str, str] = {},
        remote: Remote | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        if not time_limit > 0:
            raise ValueError(
                f"Measurer: argument 'time_limit': expected seconds above 0, got {time_limit!r}"
            )
        self.task, self.time_limit, self.memory_limit = task, time_limit, memory_limit
        self.cores = None if cores is None else tuple(cores)
        self.environment = dict(environment)
        self.remote, self.modules = remote, tuple(modules)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._saved_task: dict[str, Any] = {}
        self._process: _Process | None = None
        self._interrupted = False

    def measure(
        self, config: Any, best: float | None = None, reference: Reference | None = None
    ) -> Outcome:
        """What becomes of a config; see :class:`Outcome`.

        best : seconds of the best config so far; "pruned" is one whose first calls take more than
            three times as long
        reference : a config that works, whose calls take turns with this one's: what happens to
            the machine meanwhile then happens to both

        A result is compared with one in float64 (`sparsetir.schedules.operators.operands`) before
        it is timed. "out of memory" is a MemoryError, an error or an end of the process whose last
        words are of memory, and an end by the system for want of memory; a null pointer that was
        not looked at is "crashed".

        Raises RuntimeError where the worker cannot start or the remote device is not there,
        ValueError for what is no config.
        """
        request = {
            "config": configs.to_data(config), "best": best, "time_limit": self.time_limit,
            "memory_limit": self.memory_limit, "reference": None,
        }  # fmt: skip
        if reference is not None:
            beside = {"config": configs.to_data(reference.config), "seconds": reference.seconds}
            request["reference"] = beside
        self._interrupted = False
        try:
            worker = self._ready()
            failed = worker.ask(request, START_LIMIT).get("failed")
            if failed is None:
                return Outcome(**worker.answer(self.time_limit))
        except _Ended as error:
            self._end()
            if self._interrupted:
                return Outcome("crashed", message="interrupted")
            return Outcome(error.state, message=str(error))
        except BaseException:  # such as Ctrl-C: its answer would be taken for that of the next
            self._end()
            raise
        raise RuntimeError(f"Measurer: {failed}")

    def interrupt(self) -> None:
        """Let a `measure` in another thread return a "crashed" at once."""
        self._interrupted = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the worker and remove its folder; `measure` begins anew."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ready(self) -> _Process:
        if self._process is not None and self._process.alive:
            return self._process
        self._end()
        folder = self._saved()
        task = self.task
        program = ["import sys", *([] if is_gpu(resolve_target(task.target)) else [WITHOUT_TORCH])]
        code = "; ".join([*program, LAUNCH])
        self._process = _Process(code, folder, self._environment(folder), self.cores)
        remote = None if self.remote is None else dataclasses.asdict(self.remote)
        first = {
            "task": self._saved_task, "folder": str(folder), "modules": self.modules,
            "remote": remote,
        }  # fmt: skip
        try:
            failed = self._process.ask(first, START_LIMIT).get("failed")
        except _Ended as error:
            if self._interrupted:
                raise
            failed = str(error)
        if failed:
            raise RuntimeError(f"Measurer: the worker cannot start: {failed}")
        return self._process

    def _saved(self) -> Path:
        """The folder, with the files of the task in it."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="sparsetir-tuning-")
            self._saved_task = self.task.saved(Path(self._folder.name))
        return Path(self._folder.name)

    def _environment(self, folder: Path) -> dict[str, str]:
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        threads = {name: str(self.task.threads) for name in THREADS}
        own = {"PYTHONPATH": path, "TMPDIR": str(folder)}
        return {**os.environ, **threads, **own, **self.environment}

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """A worker: lines of JSON go in, and come out of a pipe of their own."""

    def __init__(
        self,
        code: str,
        folder: Path,
        environment: Mapping[str, str],
        cores: tuple[int, ...] | None,
    ) -> None:
        self._printed = folder / "printed.txt"
        self._printed.write_bytes(b"")  # of another process in the same folder
        self._asked = False
        self._answers, write = os.pipe()
        self._oom_kills = _oom_kills()
        command = [sys.executable, "-c", code, str(os.getpid()), str(write)]
        try:
            with self._printed.open("ab") as printed:
                # A session of its own: Ctrl-C in the terminal is for the parent.
                self._popen = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=printed, stderr=printed, cwd=folder,
                    env=environment, pass_fds=[write], start_new_session=True,
                )  # fmt: skip
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(write)
        # Before it has threads, which inherit these.
        with suppress(ProcessLookupError):
            if cores is not None:
                os.sched_setaffinity(self._popen.pid, cores)
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, self._popen.pid, PRIORITY)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._popen.poll() is None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The first answer to a request; raises as `answer`."""
        if self._asked:  # what it printed before the first is of its start, which may have failed
            os.truncate(self._printed, 0)
        self._asked = True
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # told by the missing answer
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer; raises _Ended where there is none in time.

        The process is of no use then.
        """
        end, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise _Ended("hung", f"took longer than {seconds:g} s{self._last_words()}")
            byte = os.read(self._answers, 1)  # no more: the next answer may be there already
            if not byte:
                raise self._ended()
            line += byte
        return json.loads(line)

    def _ended(self) -> _Ended:
        """How the process ended by itself."""
        status, words = self._popen.wait(), self._last_words()
        how = f"the process ended with status {status}"
        state = "crashed"
        if status < 0:
            how = f"the process was ended by {_signal_name(-status)}"
        if is_of_memory(words):
            state = "out of memory"
        elif status == -signal.SIGKILL and _oom_kills() != self._oom_kills:
            state, how = "out of memory", f"{how}, by the system for want of memory"
        return _Ended(state, how + words)

    def _last_words(self) -> str:
        """The last line that it printed, to follow a message."""
        with self._printed.open("rb") as file:
            file.seek(max(0, self._printed.stat().st_size - LAST))
            lines = file.read().decode(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        return f"; its last line: {lines[-1]}" if lines else ""

    def kill(self) -> None:
        """End it and what it has started, and keep what is known of it."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """End it and forget it."""
        self.kill()
        self._popen.wait()
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        os.close(self._answers)


def is_of_memory(words: str) -> bool:
    """Whether the words of an error or a process are of memory that there was not."""
    return any(text in words.lower() for text in OUT_OF_MEMORY)


def cores_for(workers: int, threads: int) -> list[tuple[int, ...]]:
    """Processors for each of several workers, none of them for two.

    threads : of each worker

    Raises ValueError where this process may not run on so many.
    """
    for name, value in (("workers", workers), ("threads", threads)):
        if value < 1:
            raise ValueError(f"cores_for: argument '{name}': expected 1 or more, got {value!r}")
    there = sorted(os.sched_getaffinity(0))
    if workers * threads > len(there):
        raise ValueError(
            f"cores_for: argument 'workers': {workers} workers of {threads} threads need "
            f"{workers * threads} processors, there are {len(there)}"
        )
    return [tuple(there[i * threads : (i + 1) * threads]) for i in range(workers)]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"


def _oom_kills() -> int:
    """Processes that the system has ended for want of memory; 0 where that is not told."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) for x in lines if x.startswith("oom_kill ")), 0)
