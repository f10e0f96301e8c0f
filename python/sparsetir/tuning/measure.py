"""Measurement of candidates in a separate process, which may crash or hang."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsetir.extras import WITHOUT_TORCH
from sparsetir.machine import this_machine
from sparsetir.planning.request import Request
from sparsetir.records.task import Config, Outcome, Reference
from sparsetir.runtime import pool
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.search import configs
from sparsetir.schedules.targets import is_gpu, resolve_target
from sparsetir.tuning.process import THREADS, Ended, Process
from sparsetir.tuning.program import ProgramTask

START_LIMIT = 600.0  # seconds for a worker to load everything and compute the exact result
TASK = "task.pickle"
LAUNCH = "from sparsetir.tuning.worker import serve_tuner as s; s(answers, parent, *sys.argv[1:])"


class Device:
    """A device that a worker measures on in place of this machine's, given as `remote`.

    key : the name by which its records are kept
    """

    key: str

    def opened(self, case: Any) -> Any:
        """Connect to it in a worker, to measure candidates of a case; see :class:`Local`."""
        raise NotImplementedError


class DeviceError(RuntimeError):
    """Raised if a device cannot be reached."""


class Measurer:
    """A worker process in which configs of a task are compiled, checked and timed.

    It is started on first use, and again after a crash or a hang; it ends with the thread that
    started it. This is a context manager, for use by one thread at a time. Several measurers are
    independent of each other.

    time_limit : seconds for a candidate: compiling, converting, checking and timing it
    memory_limit : bytes that a candidate may allocate beyond the worker's own
        (RLIMIT_DATA of the process: not a GPU's memory, nor mapped files)
    cores : the processors that the worker may run on (see :func:`cores_for`); by default those of
        this process
    environment : variables of the worker beyond this process's, such as CUDA_VISIBLE_DEVICES
    remote : a remote device, for which this machine compiles
    modules : plug-ins that the worker imports when it starts, by name or as paths of files

    The worker's output goes to a file, whose last line messages quote. Its arrays and other files
    are in a temporary folder that `close` removes.
    """

    def __init__(
        self,
        task: Request | ProgramTask,
        *,
        time_limit: float = 60.0,
        memory_limit: int | None = None,
        cores: Sequence[int] | None = None,
        environment: Mapping[str, str] = {},
        remote: Device | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        if not time_limit > 0:
            raise wrong("Measurer", "time_limit", "seconds above 0", f"{time_limit!r}")
        if memory_limit is not None and this_machine().system != "linux":
            expected = "None, as only Linux counts what it limits"
            raise wrong("Measurer", "memory_limit", expected, f"{memory_limit!r}")
        self.task, self.time_limit, self.memory_limit = task, time_limit, memory_limit
        self.cores = None if cores is None else tuple(cores)
        self.environment = dict(environment)
        self.remote, self.modules = remote, tuple(modules)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: Process | None = None
        self._interrupted = False

    def measure(
        self, config: Config, best: float | None = None, reference: Reference | None = None
    ) -> Outcome:
        """Compile, check and time a config; see :class:`Outcome`.

        best : seconds of the best config so far; a config whose first calls take more than three
            times as long is "pruned"
        reference : a working config, whose calls take turns with this one's, so that disturbances
            of the machine affect both

        A result is compared with one in float64 (`sparsetir.schedules.operators.operands`) before
        it is timed. "out of memory" is a MemoryError, an error or an exit of the process whose last
        line is about memory, and a kill by the system's OOM killer; an unchecked null pointer is
        "crashed".

        Raises RuntimeError if the worker cannot start or the remote device is missing, ValueError
        for an invalid config.
        """
        beside, data = None, configs.to_data(config)
        if reference is not None:
            beside = {"config": configs.to_data(reference.config), "seconds": reference.seconds}
        self._interrupted = False
        try:
            worker = self._ready()
            begin = {"time_limit": self.time_limit, "reference": beside}
            failed = worker.ask("begin", START_LIMIT, **begin).get("failed")
            if failed is None:
                measure = {"config": data, "best": best, "memory_limit": self.memory_limit}
                return Outcome(**worker.ask("measure", self.time_limit, **measure))
        except Ended as error:
            self._end()
            if self._interrupted:
                return Outcome("crashed", message="interrupted")
            return Outcome(error.state, message=str(error))
        except BaseException:  # such as Ctrl-C: the next request would receive this one's answer
            self._end()
            raise
        raise RuntimeError(f"Measurer: {failed}")

    def interrupt(self) -> None:
        """Make a `measure` in another thread return "crashed" at once."""
        self._interrupted = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the worker and remove its folder; a later `measure` starts anew."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ready(self) -> Process:
        if self._process is not None and self._process.alive:
            return self._process
        self._end()
        folder, gpu = self._saved(), is_gpu(resolve_target(self.task.target))
        self._process = Process(
            f"{WITHOUT_TORCH if gpu else pool.setup_code()}; {LAUNCH}",
            [str(folder / TASK), *self.modules],
            environment=self._environment(folder),
            folder=folder,
            printed=folder / "printed.txt",
            cores=self.cores,
        )
        try:
            answer = self._process.answer(START_LIMIT)
            failed = answer.get("failed", answer.get("missing"))
        except Ended as error:
            if self._interrupted:
                raise
            failed = str(error)
        if failed:
            raise RuntimeError(f"Measurer: the worker cannot start: {failed}")
        return self._process

    def _saved(self) -> Path:
        """The folder, with the saved task."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="sparsetir-tuning-")
            task = pickle.dumps((self.task, self.remote))
            Path(self._folder.name, TASK).write_bytes(task)
        return Path(self._folder.name)

    def _environment(self, folder: Path) -> dict[str, str]:
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        threads = {name: str(self.task.threads) for name in THREADS}
        folders = {"PYTHONPATH": path, "TMPDIR": str(folder)}
        return {**os.environ, **threads, **folders, **self.environment}

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def cores_for(workers: int, threads: int) -> list[tuple[int, ...]]:
    """Disjoint sets of processors for several workers.

    threads : threads of each worker

    Raises ValueError if this process may not run on so many, or the system cannot bind processes.
    """
    for name, value in (("workers", workers), ("threads", threads)):
        if value < 1:
            raise ValueError(f"cores_for: argument '{name}': expected 1 or more, got {value!r}")
    cpus = this_machine().cpus
    if workers > 1 and not hasattr(os, "sched_setaffinity"):
        raise wrong("cores_for", "workers", "1 on a system that binds no process to cores", workers)
    if workers * threads > len(cpus):
        raise ValueError(
            f"cores_for: argument 'workers': {workers} workers of {threads} threads need "
            f"{workers * threads} processors, there are {len(cpus)}"
        )
    return [tuple(cpus[i * threads : (i + 1) * threads]) for i in range(workers)]
