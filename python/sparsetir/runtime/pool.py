"""The threads that kernels run their parallel loops on: those that torch has, where torch is there.

TVM has a pool of its own, and so has OpenMP, which torch runs on. Two pools in a process are in
each other's way: a thread that waits for work spins on the core that the other pool's needs. Here
the parallel loops of kernels go to the pool that the process has already.

Code that TVM generates starts a parallel loop by a pointer in its module. When a module is loaded,
tvm_ffi sets that pointer to what was registered last under the name; :func:`serving` registers the
launcher of `pool.ll`, and after it TVM's again, so that nobody else's modules are concerned. The
launcher takes the addresses it needs from a struct that Python may replace at any time: torch may
be imported later than TVM (which imports it where it can), a process may fork.

On TVM's pool, too, the launcher runs the loop's tasks: TVM 0.27 loses most errors of its workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tvm
import tvm_ffi

from sparsetir.extras import WITHOUT_TORCH
from sparsetir.runtime.file_errors import first_line

CHOICE = "SPARSETIR_POOL"
CHOICES = ("openmp", "tvm", "serial")
TVM, SERIAL, OPENMP = 0, 1, 2
KINDS = ("tvm", "serial", "openmp")
SYMBOL = b"__TVMBackendParallelLaunch"
# Nanoseconds by which a thread of OpenMP's may start late. A core that is free starts it within
# 0.1 ms.
LATE = 1_000_000
# After that loops run on one thread until they took so many times as long as was lost, or so many
# times passed: late starts take an eighth of loops' time at most, and less where all are late.
REST, WAIT = 8, 256
# Nanoseconds after a loop from which on a late start does not count unless the next is late, too.
PAUSE = 5_000_000
NEVER = 1 << 62
MANY, MOST_DIGITS = 1 << 30, 7
OPENMP_FUNCTIONS = (
    "GOMP_parallel",
    "omp_get_thread_num",
    "omp_get_num_threads",
    "omp_get_max_threads",
)
# Multiplications from which on more threads than one are faster: TVM's sleep between loops.
WORK_OF_THREADS = {"tvm": 1 << 20, "openmp": 1 << 17, "serial": NEVER}
# Of others than torch, which the process may have loaded.
LIBRARIES = ("libiomp5.so", "libomp.so", "libgomp.so.1")


class Threads(NamedTuple):
    """The threads that run parallel loops of kernels.

    pool : "openmp", "tvm" or "serial"
    count : threads, the calling one among them
    library : file of OpenMP's functions, "" on another pool
    why : this pool
    """

    pool: str
    count: int
    library: str
    why: str


class _Pool(ctypes.Structure):
    """Of `pool.ll`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "kind", "parallel", "thread_num", "num_threads", "max_threads", "tvm_launch",
            "take_error", "raise_error", "drop_error", "clock", "threads", "limit", "rest", "pause",
            "wait",
        )
    ]  # fmt: skip


class _Launcher:
    """`pool.ll`, compiled; raises what TVM raises where it is not as it was."""

    def __init__(self) -> None:
        ffi = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())  # which is loaded already
        self._register = ffi.TVMFFIEnvModRegisterContextSymbol
        self._register.argtypes, self._register.restype = [ctypes.c_char_p, ctypes.c_void_p], int
        functions = {
            "take_error": ffi.TVMFFIErrorMoveFromRaised,
            "raise_error": ffi.TVMFFIErrorSetRaised,
            "drop_error": ffi.TVMFFIObjectDecRef,
        }
        if sys.platform == "linux":
            functions["clock"] = ctypes.CDLL(None).clock_gettime
        self._module, probe = _compiled(), _compiled()
        self._own, self._tvm = int(self._module["launcher"]()), int(self._module["given"]())
        if not self._tvm:
            raise RuntimeError("TVM gives modules no launcher of parallel loops")
        self._addresses = {name: _address(f) for name, f in functions.items()}
        self._addresses["tvm_launch"] = self._tvm
        self._slot = ctypes.c_uint64.from_address(int(self._module["pool"]()))
        self._resume = ctypes.c_int64.from_address(int(self._module["resume"]()))
        self._kept: list[object] = []  # what a loop may still read
        self._lock = threading.RLock()
        self.use(TVM)
        with self.serving():
            if int(probe["given"]()) != self._own:
                raise RuntimeError("TVM gives modules another launcher than the last registered")

    def use(self, kind: int, library: object = None, most: int = MANY, late: int = LATE) -> None:
        """Run all loops from now on there."""
        fields = {"kind": kind, "threads": most, **self._addresses}
        fields |= {"limit": late, "rest": REST, "pause": PAUSE, "wait": WAIT}
        if library is not None:
            names = ("parallel", "thread_num", "num_threads", "max_threads")
            found = [_address(getattr(library, name)) for name in OPENMP_FUNCTIONS]
            fields |= dict(zip(names, found, strict=True))
        pool = _Pool(**fields)
        self._kept += [pool, library]
        self._slot.value = ctypes.addressof(pool)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with self._lock:
            self._register(SYMBOL, self._own)
            try:
                yield
            finally:
                self._register(SYMBOL, self._tvm)

    def be_alone(self) -> None:
        """Run all loops on one thread, after a fork, whoever has held the lock."""
        self._lock = threading.RLock()
        self.use(SERIAL)

    def rests(self) -> int:
        """Until when loops run on one thread at most, in ns of the monotonic clock; 0 for never."""
        return self._resume.value


def _compiled() -> Any:
    """A module of `pool.ll`, for this machine."""
    make = tvm_ffi.get_global_func("codegen.LLVMModuleCreate")
    head = make('{"kind": "llvm"}', "sparsetir_pool").inspect_source("ll")
    load = tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")
    with tempfile.TemporaryDirectory(prefix="sparsetir-") as folder:
        path = Path(folder) / "pool.ll"
        path.write_text(head + Path(__file__).with_name("pool.ll").read_text())
        return load(str(path), "ll")


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _State:
    """The pool of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kind = TVM
        self.library: Any = None
        self.path = ""
        self.why = "no kernel has been loaded"
        self.settled = False
        self.forked = False


_state = _State()


@cache
def _launcher() -> tuple[_Launcher | None, str]:
    """The launcher, or why there is none, and TVM's pool runs kernels as it runs others."""
    try:
        return _Launcher(), ""
    except Exception as error:  # each step is one that another TVM may not have
        return None, f"{type(error).__name__}: {first_line(error)}"


def serving() -> contextlib.AbstractContextManager[None]:
    """Modules that are loaded inside run their parallel loops on the pool of the process."""
    _settle()
    launcher, _ = _launcher()
    return contextlib.nullcontext() if launcher is None else launcher.serving()


def _settle() -> None:
    """Choose the pool, anew where torch has been imported since."""
    with _state.lock:
        if _state.settled or _state.forked:
            return
        launcher, why = _launcher()
        wanted = _wanted()
        if launcher is None:
            _note(TVM, None, f"{wanted or 'openmp'} is not to be had: {why}")
            return
        if wanted == "serial" or wanted == "tvm":
            _note(TVM if wanted == "tvm" else SERIAL, None, f"{CHOICE} says so")
        else:
            library = _openmp(others=wanted == "openmp")
            if library is None:
                _note(TVM, None, _why_none(wanted), settled=_has_torch())
            else:
                _note(OPENMP, library, "it is torch's" if _has_torch() else f"{CHOICE} says so")
        launcher.use(_state.kind, _state.library, _said())


def meet_torch() -> None:
    """An array of torch has come: kernels that are there run on its threads from now on."""
    if _launcher.cache_info().currsize:
        _settle()


def _note(kind: int, library: ctypes.CDLL | None, why: str, settled: bool = True) -> None:
    _state.kind, _state.library, _state.why = kind, library, why
    _state.path = "" if library is None else _file_of(library.GOMP_parallel)
    _state.settled = settled


def _has_torch() -> bool:
    return sys.modules.get("torch") is not None  # it is None in a process that is to have none


def _wanted() -> str:
    """The user's choice; "" for none."""
    said = os.environ.get(CHOICE, "")
    if said and said not in CHOICES:
        raise ValueError(f"{CHOICE}: expected {', '.join(CHOICES)}, got {said!r}")
    return said


def _why_none(wanted: str) -> str:
    if sys.platform != "linux":
        return "torch's is looked for on Linux alone"
    if _has_torch():
        return "torch has no OpenMP here"
    return "the process has no OpenMP" if wanted else "torch is not loaded"


def _openmp(others: bool) -> ctypes.CDLL | None:
    """The library that torch's calls of OpenMP go to; None where there is none.

    others : whether another one that is loaded would do; none is ever loaded here
    """
    if sys.platform != "linux":
        return None
    mode = os.RTLD_NOLOAD | os.RTLD_LAZY
    places: list[tuple[str | None, int]] = []
    if _has_torch():
        folder = Path(str(sys.modules["torch"].__file__)).parent / "lib"
        # As the linker finds it for torch: what is preloaded comes first.
        places += [(None, os.RTLD_LAZY), (str(folder / "libtorch_cpu.so"), mode)]
    if others:
        places += [(None, os.RTLD_LAZY), *((name, mode) for name in LIBRARIES)]
    for name, how in places:
        try:
            library = ctypes.CDLL(name, mode=how)
            if all(getattr(library, function) for function in OPENMP_FUNCTIONS):
                return library
        except (OSError, AttributeError):
            continue
    return None


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _file_of(function: object) -> str:
    found = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(_address(function)), ctypes.byref(found))
    return (found.file or b"").decode()


def _said() -> int:
    """The most threads that TVM_NUM_THREADS allows; no machine has as many as some numbers say."""
    said = os.environ.get("TVM_NUM_THREADS", "")
    number = int(said) if said.isdecimal() and len(said) < MOST_DIGITS else 0
    return number or MANY


def count() -> int:
    """Threads that a parallel loop would run on, the calling one among them."""
    _settle()
    if _state.kind == OPENMP:
        return max(1, min(_state.library.omp_get_max_threads(), _said()))
    if _state.kind == SERIAL:
        return 1
    return _said() if _said() < MANY else int(tvm.get_global_func("runtime.NumThreads")())


def threads() -> Threads:
    """The pool of threads that kernels run their parallel loops on.

    Returns
    -------
    Threads
        `pool` is "openmp", the pool that torch runs on; "tvm", TVM's own; or "serial", no other
        threads. `count` is of the calling Python thread.

    Notes
    -----
    Chosen when a kernel is first loaded, and anew where torch has been imported since: when a
    kernel or a plan is made, a tensor of torch first comes, or this is asked. The environment
    variable `SPARSETIR_POOL` names another one. On OpenMP's pool `torch.set_num_threads` and
    `OMP_NUM_THREADS` say how many threads there are, and `TVM_NUM_THREADS` how many at most; a
    forked process has one.
    """
    number = count()
    return Threads(KINDS[_state.kind], number, _state.path, _state.why)


def work_of_threads() -> int:
    """Multiplications from which on a parallel loop is faster on all threads of the pool."""
    _settle()
    return WORK_OF_THREADS[KINDS[_state.kind]]


def pays(threads: int, work: int) -> bool:
    """Whether a loop with so many multiplications is to be parallel."""
    return threads > 1 and work >= work_of_threads()


def alike() -> str:
    """Begins the code of a process without torch, whose kernels run on a pool like this one's."""
    _settle()
    if _state.kind != OPENMP:
        return WITHOUT_TORCH
    own = f"ctypes.CDLL({_state.path!r}, ctypes.RTLD_GLOBAL)"
    return f"{WITHOUT_TORCH}; import ctypes, os; {own}; os.environ['{CHOICE}'] = 'openmp'"


def _run_alone() -> None:
    """After a fork: no pool has its workers, and would wait for them."""
    tvm.get_global_func("runtime.config_threadpool")(-2, 1)
    _state.lock, _state.forked = threading.RLock(), True
    _note(SERIAL, None, "the process was forked")
    launcher = _launcher()[0] if _launcher.cache_info().currsize else None
    if launcher is not None:
        launcher.be_alone()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_alone)
