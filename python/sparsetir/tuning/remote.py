"""Measurement on another machine, through TVM's RPC tracker.

The tracker runs anywhere, and a server on each machine with a device; both need
`pip install apache-tvm tornado cloudpickle psutil`:

    python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190
    TVM_NUM_THREADS=4 python -m tvm.exec.rpc_server --tracker TRACKER:9190 --key rpi5

This machine compiles for the task's target, such as
`{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}`. A candidate that crashes
on the device ends TVM's server there, which must then be restarted.
"""

from __future__ import annotations

import math
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm

from sparsetir.records.task import OK, PRUNED, Config, Outcome, Reference
from sparsetir.runtime.arrays import is_array, itemsize
from sparsetir.runtime.file_errors import first_line
from sparsetir.runtime.pipeline import compile_stages
from sparsetir.runtime.signature import Signature, signature_of
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.tuning.case import Array, OperatorCase, array, numbers
from sparsetir.tuning.measure import Device, DeviceError
from sparsetir.tuning.timing import GROUP, PROBES, SLOW, TURN, TURNS, Turn, summary, too_slow

KERNEL = "kernel"  # the name of the function in the library
REACH = 5.0  # seconds for the tracker to answer a connection
# Fragments of TVM's errors when the other side of a session is gone.
LOST = ("kshutdown", "connection reset", "broken pipe", "socket")

# (number, repeat) -> mean seconds of `number` calls, `repeat` times.
Timer = Callable[[int, int], list[float]]


@dataclass(frozen=True)
class Remote(Device):
    """A device of TVM's RPC tracker.

    host, port : address of the tracker
    key : name under which the tracker knows the device's server
    cc : a cross compiler such as "aarch64-linux-gnu-g++", to link for another kind of CPU
    """

    host: str
    port: int
    key: str
    cc: str | None = None

    def opened(self, case: OperatorCase) -> RemoteDevice:
        """The device for a worker, whose tracker has been asked for it."""
        return RemoteDevice(self, case)


class RemoteError(DeviceError):
    """Raised if the tracker cannot be reached, or lacks the device."""


class Library(NamedTuple):
    """A config compiled for a device that may be remote.

    arguments : the kernel's by name, NumPy arrays and numbers, except operands and result
    about : fields of its Outcome
    """

    executable: tvm.runtime.Executable
    signature: Signature
    arguments: dict[str, Any]
    about: dict[str, Any]


class RemoteDevice:
    """A remote device on which a worker measures candidates.

    Each candidate has its own session, which the server ends after the time limit. Times are those
    of TVM's time_evaluator on the device: of the kernel alone, without a Python call.
    """

    def __init__(self, remote: Remote, case: OperatorCase) -> None:
        self.remote, self.case = remote, case
        self._session: Any = None
        self._uploads = 0
        self._tracker()
        self._beside: tuple[Reference, Library] | None = None

    def begin(self, time_limit: float, reference: Reference | None = None) -> None:
        """Compile the reference and wait for the device.

        Raises RemoteError if it is missing.
        """
        kept, self._beside = self._beside, None
        if reference is not None:
            same = kept if kept is not None and kept[0].config == reference.config else None
            library = compiled(self.case, reference.config) if same is None else same[1]
            self._beside = reference, library
        tracker = self._tracker()
        try:
            self._session = tracker.request(
                self.remote.key, session_timeout=math.ceil(time_limit) + 1
            )
        except RuntimeError as error:
            raise RemoteError(f"{self._label()}: {first_line(error)}") from error
        finally:
            tracker.close()

    def measure(self, config: Config, best: float | None) -> Outcome:
        """Check and time a config, in turns with the reference if there is one."""
        case, library = self.case, compiled(self.case, config)
        about = library.about
        try:
            module = self._uploaded(library)
            arguments, out = self._arguments(library)
            module[KERNEL](*arguments)
            wrong = case.check.error(numbers(out).reshape(case.check.shape))
            if wrong:
                return Outcome("wrong", message=wrong, **about)
            timers, seconds = [self._timer(module, arguments)], None
            if self._beside is not None:
                reference, beside = self._beside
                seconds = reference.seconds
                timers.append(self._timer(self._uploaded(beside), self._arguments(beside)[0]))
            return replace(_timed(timers, best, seconds), **about)
        except Exception as error:
            if any(text in str(error).lower() for text in LOST):
                text = "the server of the device has ended the session: a crash there"
                return Outcome("crashed", message=text, **about)
            raise

    def release(self) -> None:
        """End the session, so that others can use the device."""
        if self._session is not None:
            with suppress(Exception):  # it may have ended already
                self._session.get_function("CloseRPCConnection")()
            self._session = None
        self.case.matrix.clear_cache()

    def _label(self) -> str:
        return f"Remote '{self.remote.key}' of the tracker {self.remote.host}:{self.remote.port}"

    def _tracker(self) -> tvm.rpc.TrackerSession:
        """Connect to the tracker, and check that it has the device."""
        from tvm import rpc

        where = self.remote.host, self.remote.port
        try:
            # TVM itself would retry for a minute.
            socket.create_connection(where, timeout=REACH).close()
            tracker = rpc.connect_tracker(*where)
        except (OSError, RuntimeError) as error:
            raise RemoteError(f"{self._label()}: the tracker cannot be reached: {error}") from error
        keys = [info["key"].removeprefix("server:") for info in tracker.summary()["server_info"]]
        if self.remote.key not in keys:
            tracker.close()
            names = ", ".join(sorted(set(keys))) or "none"
            raise RemoteError(
                f"{self._label()}: the tracker has no such device; those it has: {names} (a crash "
                "ends TVM's server of a device, which must then be restarted)"
            )
        return tracker

    def _device(self) -> tvm.runtime.Device:
        wanted = self.case.request
        return self._session.device(wanted.target.kind.name if wanted.gpu else "cpu", 0)

    def _uploaded(self, library: Library) -> tvm.runtime.Module:
        from tvm.support import cc

        self._uploads += 1
        name = f"kernel{self._uploads}.so"  # loaders identify libraries by name
        options = {} if self.remote.cc is None else {"fcompile": cc.cross_compiler(self.remote.cc)}
        with tempfile.TemporaryDirectory(prefix="sparsetir-") as folder:
            file = Path(folder) / name
            library.executable.export_library(str(file), **options)
            self._session.upload(str(file))
        return self._session.load_module(name)

    def _arguments(self, library: Library) -> tuple[list[object], Array]:
        """The kernel's arguments, with arrays on the device; and its output array."""
        signature, device = library.signature, self._device()
        names = self.case.request.operator.names
        operands = dict(zip(names, self.case.operands, strict=True))
        named = {**library.arguments, **operands, "out": np.full(self.case.check.shape, np.nan)}
        values = [named[name] for name in signature.passed]
        for i, (name, value) in enumerate(zip(signature.passed, values, strict=True)):
            if is_array(value):
                value = np.asarray(value)
                if i < len(signature.names):  # computed ones have the kernel's shape
                    value = value.reshape(signature.expected_shape(i, values))
                values[i] = array(value, signature.dtypes[signature.position[name]], device)
        return values, values[signature.names.index("out")]

    def _timer(self, module: tvm.runtime.Module, arguments: list[object]) -> Timer:
        device = self._device()

        def times(number: int, repeat: int) -> list[float]:
            evaluator = module.time_evaluator(KERNEL, device, number=number, repeat=repeat)
            return list(evaluator(*arguments).results)

        return times


def _timed(timers: list[Timer], best: float | None, seconds: float | None) -> Outcome:
    """The state and seconds of the first timer's calls.

    timers : the candidate's, and the reference's, if there is one
    seconds : the nominal seconds of the reference's calls
    """

    def turn(number: int, repeat: int) -> Turn:
        times = [timer(number, repeat) for timer in timers]
        return times[0], times[1] if len(times) > 1 else []

    first = turn(1, PROBES)
    if too_slow(first, best, seconds):
        return summary(PRUNED, [first], seconds)
    each = min(first[0])
    if each > SLOW:
        return summary(OK, [first, *(turn(1, 1) for _ in range(PROBES - 1))], seconds)
    number, repeat = max(1, round(GROUP / each)), round(TURN / GROUP)
    return summary(OK, [turn(number, repeat) for _ in range(TURNS)], seconds)


def compiled(case: OperatorCase, config: Config) -> Library:
    """Compile a config, and arrange the pattern for it, like :class:`sparsetir.Plan`.

    A plan also loads the kernel, which works only on the target machine.
    """
    wanted = case.request
    template, shapes = wanted.template(config), wanted.shapes
    sizes = {**wanted.sizes, "tiles": config.tiles(wanted.feat)}
    start = time.perf_counter()
    stages = wanted.stages(config)
    executable = compile_stages({KERNEL: stages}, wanted.target)
    compile_seconds = time.perf_counter() - start
    start = time.perf_counter()
    arranged = template.arrange(wanted.pattern, wanted.problem, config)
    signature = signature_of(stages)
    arguments: dict[str, Any] = {**sizes, **arranged.arguments}
    if wanted.operator.reads_values:
        values = np.broadcast_to(case.matrix.values, shapes["a"])
        arguments |= arranged.stored.values(A=values)
    arguments |= arranged.computed(signature.func, arguments)
    convert_seconds = time.perf_counter() - start
    places = {n: signature.position[n] for n in signature.passed if is_array(arguments.get(n))}
    size = sum(arguments[n].size * itemsize(signature.dtypes[i]) for n, i in places.items())
    about = {
        "compile_seconds": compile_seconds, "convert_seconds": convert_seconds, "bytes": size,
        "padding": arranged.stored.padding,
        "launches": count_launches(stages["II scheduled"]) if wanted.gpu else 1,
    }  # fmt: skip
    return Library(executable, signature, arguments, about)
