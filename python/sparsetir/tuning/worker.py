"""The process that runs candidates; :class:`sparsetir.tuning.measure.Measurer` is its client.

Each candidate takes a request to begin, which prepares the reference, and one to measure, to which
the time limit applies. Output goes to a file of the parent's.
"""

from __future__ import annotations

import gc
import pickle
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import tvm

from sparsetir.extras import allow_torch
from sparsetir.planning.request import Request
from sparsetir.records.task import Config, Outcome, Reference
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.search import configs
from sparsetir.schedules.targets import is_gpu, resolve_target
from sparsetir.tuning.case import Case, OperatorCase, SparseCase
from sparsetir.tuning.measure import DeviceError
from sparsetir.tuning.process import is_out_of_memory
from sparsetir.tuning.schedule_ref import load_module
from sparsetir.tuning.serving import one_line, serve
from sparsetir.tuning.timing import timed


class Local:
    """This machine's CPU or GPU as the device for measurements.

    case : prepares the calls
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        target = resolve_target(case.target)
        kind = target.kind.name
        self.device = tvm.runtime.device(kind, 0) if is_gpu(target) else None
        if self.device is not None and not self.device.exist:
            raise wrong("tune", "target", "a device to measure on", f"no {kind} device")
        self._compile_seconds: dict[int, float] = {}
        # The reference, and its calls.
        self._beside: tuple[Reference, Callable[[], None]] | None = None

    def begin(self, time_limit: float, reference: Reference | None = None) -> None:
        """Prepare the reference."""
        kept, self._beside = self._beside, None
        if reference is not None and kept is not None and kept[0].config == reference.config:
            self._beside = reference, kept[1]
        elif reference is not None:
            prepared = self.case.prepared(reference.config, self.device)
            self._beside = reference, prepared.call
            self.release()

    def measure(self, config: Config, best: float | None) -> Outcome:
        """Check and time a config, in turns with the reference if there is one."""
        prepared = self.case.prepared(config, self.device)
        about = prepared.about
        # For a kernel shared with an earlier config, report the original compile time.
        kernel, seconds = id(prepared.kernel), about["compile_seconds"]
        about["compile_seconds"] = self._compile_seconds.setdefault(kernel, seconds)
        finish = None if self.device is None else self.device.sync
        prepared.call()
        if finish is not None:
            finish()
        limit_memory(None)  # the comparison's memory does not count as the candidate's
        wrong = prepared.wrong()
        if wrong:
            return Outcome("wrong", message=wrong, **about)
        beside = self._beside and (self._beside[1], self._beside[0].seconds)
        return replace(timed(prepared.call, finish, best, beside), **about)

    def release(self) -> None:
        """Free the data of a candidate."""
        self.case.release()
        gc.collect()


class Tuner:
    """The server of the process's requests, with the device and the exact result.

    task : a file in a private folder of the parent's
    """

    def __init__(self, task: str, modules: Sequence[str]) -> None:
        allow_torch()
        for module in modules:
            load_module(module)
        try:
            case, remote = pickle.loads(Path(task).read_bytes())
        except ValueError as error:
            expected = f"modules that register what is tuned when they are imported ({error})"
            raise wrong("tune", "modules", expected, ", ".join(modules) or "none") from error
        if isinstance(case, Request):
            make: Any = SparseCase if case.operator.on == "matrices" else OperatorCase
            case = make(case)
        else:
            _ = case.results  # computed before the time limit of a candidate begins
        self._device = Local(case) if remote is None else remote.opened(case)

    def begin(self, time_limit: float, reference: dict[str, Any] | None) -> dict[str, object]:
        """Prepare the reference and the device for a candidate."""
        beside = None
        if reference is not None:
            beside = Reference(configs.from_data(reference["config"]), reference["seconds"])
        try:
            self._device.begin(time_limit, beside)
        except DeviceError as error:
            return {"failed": str(error)}
        except Exception as error:  # though the reference worked before
            return {"failed": f"the reference cannot be measured: {one_line(error)}"}
        return {}

    def measure(
        self, config: dict[str, object], best: float | None, memory_limit: int | None
    ) -> dict[str, object]:
        """Measure a config and return the fields of its Outcome."""
        try:
            limit_memory(memory_limit)
            outcome = self._device.measure(configs.from_data(config), best)
            return asdict(outcome)
        except Exception as error:  # any error of a candidate is its outcome
            state = "out of memory" if is_out_of_memory(repr(error)) else "failed"
            return {"state": state, "message": one_line(error)}
        finally:
            self._device.release()
            limit_memory(None)


def limit_memory(more: int | None) -> None:
    """Limit this process to `more` bytes beyond its present ones; None for no limit.

    Private writable memory counts (RLIMIT_DATA), not reserved addresses, of which CUDA reserves
    more than there is memory.
    """
    most = resource.RLIM_INFINITY
    if more is not None:
        most = psutil.Process().memory_info().data + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def serve_tuner(answers: int, parent: int, task: str, *modules: str) -> None:
    """Answer until stdin ends; see :func:`sparsetir.tuning.serving.serve` and :class:`Tuner`."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # TVM's handler prints addresses, at length
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(answers, parent, lambda: Tuner(task, modules))
