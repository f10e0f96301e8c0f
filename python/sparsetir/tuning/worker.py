"""The process that runs candidates; :class:`sparsetir.tuning.measure.Measurer` starts it.

Requests are lines of JSON on stdin, the first of them the task; answers are lines of JSON too: an
empty one when the task is understood, then for each candidate an empty one when its clock begins to
run, and its outcome. What is printed here goes to a file of the parent's.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm

from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.search import configs
from sparsetir.sparse_tensor import SparseMatrix
from sparsetir.targets import resolve_target
from sparsetir.tuning.case import Case
from sparsetir.tuning.measure import is_of_memory
from sparsetir.tuning.program import ProgramTask
from sparsetir.tuning.program_case import ProgramCase
from sparsetir.tuning.remote import Remote, RemoteDevice, RemoteError
from sparsetir.tuning.task import Reference, Task
from sparsetir.tuning.timing import Yardstick, timed

KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Local:
    """This machine's CPU or GPU as the device that candidates are measured on.

    case : a :class:`Case` or :class:`ProgramCase`, which prepares what is to be called
    """

    def __init__(self, case: Case | ProgramCase) -> None:
        self.case = case
        target = resolve_target(case.task.target)
        self.device = tvm.runtime.device(target.kind.name, 0) if is_gpu(target) else None
        self._compile_seconds: dict[int, float] = {}
        # The reference that was measured with last, and its calls.
        self._beside: tuple[Any, Callable[[], None]] | None = None

    def begin(self, time_limit: float, reference: Reference | None = None) -> None:
        """Have the reference ready."""
        if reference is not None and (self._beside is None or self._beside[0] != reference.config):
            self._beside = None
            made = self.case.prepared(reference.config, self.device)
            self._beside = reference.config, made.call
            self.release()

    def measure(
        self, config: Any, best: float | None, reference: Reference | None = None
    ) -> dict[str, Any]:
        """The fields of an Outcome.

        reference : as `begin` was given
        """
        made = self.case.prepared(config, self.device)
        about = made.about
        # A kernel that an earlier config had compiled took then what it would take alone.
        kernel, seconds = id(made.kernel), about["compile_seconds"]
        about["compile_seconds"] = self._compile_seconds.setdefault(kernel, seconds)
        finish = None if self.device is None else self.device.sync
        made.call()
        if finish is not None:
            finish()
        limit_memory(None)  # what the comparison takes is not the candidate's
        wrong = made.wrong()
        if wrong:
            return {"state": "wrong", "message": wrong, **about}
        yardstick = None
        if reference is not None and self._beside is not None:
            yardstick = Yardstick(self._beside[1], reference.seconds)
        return {**timed(made.call, finish, best, yardstick), **about}

    def release(self) -> None:
        """Forget what a candidate alone needs."""
        self.case.release()
        gc.collect()


def answer(
    device: Any, config: dict[str, Any], best: float | None, reference: Reference | None
) -> dict[str, Any]:
    """The fields of the Outcome of a config."""
    try:
        return device.measure(configs.from_data(config), best, reference)
    except Exception as error:  # whatever a candidate does is its outcome
        state = "out of memory" if is_of_memory(repr(error)) else "failed"
        return {"state": state, "message": one_line(error)}
    finally:
        device.release()


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def limit_memory(more: int | None) -> None:
    """Let this process have so many bytes more than it has now; None for no limit.

    It is private memory that can be written to which counts (RLIMIT_DATA), not what is reserved:
    CUDA reserves more addresses than there is memory.
    """
    most = resource.RLIM_INFINITY
    if more is not None:
        status = Path("/proc/self/status").read_text()
        kilobytes = next(x.split()[1] for x in status.splitlines() if x.startswith("VmData:"))
        most = int(kilobytes) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def prepared(
    task: dict[str, Any], folder: str, modules: Iterable[str], remote: dict[str, Any] | None
) -> Any:
    """The device that candidates are measured on, from the first request."""
    for name in modules:
        importlib.import_module(name)
    place = Path(folder)
    if task.pop("kind") == "program":
        return Local(ProgramCase(ProgramTask.loaded(task, place), place))
    indptr, indices = (np.load(place / f"{n}.npy") for n in ("indptr", "indices"))
    ones, shape = np.ones(len(indices), "float32"), tuple(task.pop("shape"))
    matrix = SparseMatrix(sp.csr_array((ones, indices, indptr), shape=shape))
    case = Case(Task(matrix=matrix, **task), place)
    return Local(case) if remote is None else RemoteDevice(Remote(**remote), case)


def serve(parent: int, answers: int) -> None:
    """Answer until stdin ends.

    parent : number of the process that asks, with which this one dies
    answers : file descriptor
    """
    ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it ended before it would have taken this process along
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # TVM's handler prints addresses, at length
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(answers, False)
    out = os.fdopen(answers, "w", buffering=1)
    try:
        device = prepared(**json.loads(sys.stdin.readline()))
    except Exception as error:  # told by the parent
        print(json.dumps({"failed": one_line(error)}), file=out)
        return
    print(json.dumps({}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        beside, reference = request["reference"], None
        if beside is not None:
            reference = Reference(configs.from_data(beside["config"]), beside["seconds"])
        try:
            device.begin(request["time_limit"], reference)
        except RemoteError as error:
            print(json.dumps({"failed": str(error)}), file=out)
            continue
        except Exception as error:  # it worked before
            failed = f"the reference cannot be measured: {one_line(error)}"
            print(json.dumps({"failed": failed}), file=out)
            continue
        print(json.dumps({}), file=out)
        limit_memory(request["memory_limit"])
        found = answer(device, request["config"], request["best"], reference)
        limit_memory(None)
        print(json.dumps(found), file=out)
