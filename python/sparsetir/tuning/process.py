"""The client of a process that answers requests; `serving` is the server."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Each measured library reads one of these when it is loaded.
THREADS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PRIORITY = -15
# Lower-case fragments of errors and last lines that mean a lack of memory.
OUT_OF_MEMORY = ("bad_alloc", "out of memory", "memoryerror", "out_of_memory", "cannot allocate")
LAST = 4096  # bytes at the end of a process's output to search for its last line
# The first statements: later output goes to stderr. Garbage collection during imports would take a
# fifth of the start; `serve` enables it again.
START = "import gc, os, sys; gc.disable(); answers = os.dup(1); os.dup2(2, 1); parent = {parent}; "


class Ended(Exception):
    """Raised for a process that does not answer.

    state : "hung", "crashed" or "out of memory"
    """

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class Process:
    """A process of this Python that exchanges requests and answers as lines of JSON.

    code : its code, with the variables `answers`, a file descriptor to write to, and `parent`, the
        pid of this process, for :func:`sparsetir.tuning.serving.serve`
    arguments : its `sys.argv[1:]`
    environment : all environment variables
    folder : its working directory; by default this process's
    printed : a file for its output, whose last line messages quote; by default output goes to
        stderr
    cores : the processors that it may run on; by default those of this process
    ahead : whether to raise its priority, if the user may (root)

    It has its own session: Ctrl-C in the terminal is for the parent. Raises RuntimeError on systems
    without such processes.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
        printed: Path | None = None,
        cores: Sequence[int] | None = None,
        ahead: bool = False,
    ) -> None:
        if os.name != "posix":
            raise RuntimeError(f"measuring: expected Linux or another POSIX system, got {os.name}")
        if cores is not None and not hasattr(os, "sched_setaffinity"):
            raise RuntimeError(
                "measuring: argument 'cores': expected None, this system binds no process to cores"
            )
        self._printed = printed
        self._oom_kills = _oom_kills()
        command = [sys.executable, "-c", START.format(parent=os.getpid()) + code, *arguments]
        errors = None
        if printed is not None:
            printed.write_bytes(b"")  # another process's output
            errors = printed.open("ab")  # append mode, as `ask` truncates the file
        try:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=folder,
                env=dict(environment), start_new_session=True, bufsize=0,
            )  # fmt: skip
        finally:
            if errors is not None:
                errors.close()
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._requests, self._answers = self._popen.stdin, self._popen.stdout
        # Before it has threads, which inherit these.
        with suppress(ProcessLookupError):
            if cores is not None:
                os.sched_setaffinity(self.pid, cores)
            if ahead:
                raise_priority(self.pid)

    @property
    def pid(self) -> int:
        """The process's pid."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._popen.poll() is None

    def ask(self, op: str, seconds: float | None = None, /, **request: object) -> dict[str, Any]:
        """Call the method `op` of its server; raises as :meth:`answer`."""
        if self._printed is not None:  # earlier output does not belong to this request
            os.truncate(self._printed, 0)
        with suppress(BrokenPipeError):  # the missing answer reports it
            self._requests.write(json.dumps({"op": op, **request}).encode() + b"\n")
        return self.answer(seconds)

    def answer(self, seconds: float | None = None) -> dict[str, object]:
        """Wait for the next answer, the first of which confirms the start; seconds : None for ever.

        Raises Ended if there is none in time; then the process is unusable.
        """
        end, line = None if seconds is None else time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._answers], [], [], left)[0]:
                raise Ended("hung", f"took longer than {seconds:g} s{self._last_words()}")
            some = self._answers.read(1 << 16)  # belongs to one answer, as requests wait for theirs
            if not some:
                raise self._ended()
            line += some
        return json.loads(line)

    def stop(self) -> None:
        """Suspend the process until `resume`; return when no thread of it runs any more."""
        self._popen.send_signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):
            # WNOWAIT leaves an exit status for `Popen.wait`.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Resume the process."""
        self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and its children, but keep its status."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and release its resources."""
        self.kill()
        self._popen.wait()
        for pipe in (self._requests, self._answers):
            with suppress(BrokenPipeError):
                pipe.close()

    def _ended(self) -> Ended:
        """The exception for a process that ended by itself."""
        status, words = self._popen.wait(), self._last_words()
        how = f"the process ended with status {status}"
        state = "crashed"
        if status < 0:
            how = f"the process was ended by {_signal_name(-status)}"
        if is_out_of_memory(words):
            state = "out of memory"
        elif status == -signal.SIGKILL and _oom_kills() != self._oom_kills:
            state, how = "out of memory", f"{how}, by the system for want of memory"
        return Ended(state, how + words)

    def _last_words(self) -> str:
        """The last line of its output, to append to a message."""
        if self._printed is None:
            return ""
        with self._printed.open("rb") as file:
            file.seek(max(0, self._printed.stat().st_size - LAST))
            lines = file.read().decode(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        return f"; its last line: {lines[-1]}" if lines else ""


def raise_priority(pid: int = 0) -> None:
    """Raise the priority of a process (0: this one), if the user may."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, PRIORITY)


def is_out_of_memory(words: str) -> bool:
    """Whether a text of an error or a process indicates a lack of memory."""
    return any(text in words.lower() for text in OUT_OF_MEMORY)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _oom_kills() -> int:
    """The number of processes killed by the OOM killer; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) for x in lines if x.startswith("oom_kill ")), 0)
