"""Kernels of regions, compiled by other processes before the calls that need them.

TVM compiles one kernel at a time in a process, and a model's first step needs some twenty. They are
known once its graph has been divided into regions. From then on processes compile them to files
while torch continues tracing, and the step compiles those that no process has begun.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, LifoQueue

from sparsetir.extras import WITHOUT_TORCH
from sparsetir.machine import this_machine
from sparsetir.runtime.kernel_cache import is_kept, keeps
from sparsetir.runtime.pool import work_of_threads
from sparsetir.schedules.targets import pool
from sparsetir.tuning.process import Ended, Process

# Least kernels for which processes are started; starting takes as long as compiling five.
LEAST = 6
MOST = 4  # processes
LIMIT = 120.0  # seconds that a process may take to start, or for a kernel
IDLE = 10.0  # seconds without work after which a process ends
CODE = "from sparsetir.tuning.compile_server import main; main(answers, parent, {}, {})"


class _Job:
    """A program to compile.

    begun : whether a process, or this one, compiles it
    done : set when a process has compiled it, or failed to
    """

    def __init__(self, key: str, text: str) -> None:
        self.key, self.text = key, text
        self.begun, self.done = False, threading.Event()


_jobs: dict[str, _Job] = {}  # unclaimed jobs by key
# Processes begin with the kernels that the step needs last, so that it rarely waits for one.
_queue: LifoQueue[_Job] = LifoQueue()
_lock = threading.Lock()
_workers: list[threading.Thread] = []


def begin(programs: Iterable[tuple[str, str]]) -> None:
    """Compile those of the programs, pairs of a kernel's key and a text, that no file holds."""
    most = min(this_machine().cores - 1, MOST) if os.name == "posix" and keeps() else 0
    new = dict(programs) if most > 0 else {}
    new = {key: text for key, text in new.items() if key not in _jobs and not is_kept(key)}
    if len(new) < LEAST:
        return
    with _lock:
        for key, text in new.items():
            _jobs[key] = _Job(key, text)
            _queue.put(_jobs[key])
        _workers[:] = [worker for worker in _workers if worker.is_alive()]
        for _ in range(most - len(_workers)):
            _workers.append(threading.Thread(target=_work, daemon=True))
            _workers[-1].start()


def claim(key: str) -> None:
    """Wait until no process compiles a kernel, and let none begin to."""
    with _lock:
        job = _jobs.pop(key, None)
        if job is None:
            return
        begun, job.begun = job.begun, True
    if begun:
        job.done.wait(LIMIT)


def _work() -> None:
    """Start a process, and have it compile jobs until there are none."""
    code = f"{WITHOUT_TORCH}; {CODE.format(pool(), work_of_threads())}"
    with suppress(Ended, OSError):
        process = Process(code, environment=os.environ)
        try:
            process.answer(LIMIT)
            _serve(lambda job: process.ask("compile", LIMIT, key=job.key, text=job.text))
        finally:
            process.end()


def _serve(compile: Callable[[_Job], object]) -> None:
    """Compile the jobs that nobody has begun, until none comes for a while."""
    while True:
        try:
            job = _queue.get(timeout=IDLE)
        except Empty:
            return
        with _lock:
            begun, job.begun = job.begun, True
        if begun:
            continue
        try:
            compile(job)
        finally:
            job.done.set()
