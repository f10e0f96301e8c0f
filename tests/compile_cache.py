"""Compiles each distinct kernel once for all test processes, until the kernel changes.

`tvm.compile` for a CPU takes a tenth of a second to a second, and writes nothing that depends on
anything but its argument, the target and TVM. What it made is kept as a shared library under
`.pytest_cache/kernels`, in a folder of the machine's architecture, by a hash of these; `make clean`
removes them. Text for GPUs is not kept.

LLVM's optimisations take two thirds of that time, and those of TVM a third of the rest:
`Cache.quick` leaves them out of the library; what is asked of a kernel's text is compiled with all
of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.tirx.build import codegen_build

from sparsetir.schedules.passes import consecutive_parts, locals_on_stack, row_offsets, short_tails
from sparsetir.schedules.passes.whole_workspaces import without_passes

# Whether tests compile all kernels as users do: with LLVM's optimisations, and all versions.
AS_USERS = bool(os.environ.get("TESTS_AS_USERS"))
FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "kernels" / os.uname().machine
UNUSED = 14 * 24 * 3600  # seconds after which a file that no test asked for is removed
OPTIMISATIONS = ("HoistIfThenElse", "InsertHoistIfThenElse", "CommonSubexprElim")  # of TVM
# Our passes after TVM's own.
OUR_PASSES = (consecutive_parts, locals_on_stack, row_offsets, short_tails)
ON_STACK = {"tir_pipeline": locals_on_stack.PIPELINE}  # the option of kernels for CPUs
# The socket of `cross_compiler.py`, for tests in an emulated process.
CROSS_COMPILER = os.environ.get("TESTS_CROSS_COMPILER", "")
# A compiler driver takes four times as long to call it.
LINKER = (os.environ.get("TESTS_LINKER", "ld"), "-shared")


class Kept:
    """A stand-in for the executable: runs the library, and compiles when its text is requested."""

    def __init__(self, library: Path, again: Callable[[], Any]) -> None:
        self._library = tvm.runtime.load_module(str(library))
        self._again = functools.cache(again)

    def __getitem__(self, name: str) -> Any:
        return self._library.get_function(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._again(), name)


class Cache:
    """`compile` is `tvm.compile` with a memory in a folder.

    folder : made when the first library is written
    real : what compiles, `tvm.compile` or the like
    quick : whether libraries are made without these optimisations
    """

    def __init__(self, folder: Path, real: Callable[..., Any]) -> None:
        self.folder = folder
        self._real = real
        self.quick = False

    @classmethod
    def shared(cls) -> Cache:
        """The environment of all tests, for another process of a test, with quick libraries."""
        cache = cls(FOLDER, tvm.compile)
        cache.quick = not AS_USERS
        return cache

    def compile(self, mod: Any, target: Any = None, **options: Any) -> Any:
        """Like `tvm.compile`; for a CPU from the folder, or into it."""
        passes = tvm.transform.PassContext.current()
        if options not in ({}, ON_STACK) or not _kept(mod, target, passes):
            return self._real(mod, target=target, **options)

        def again() -> Any:
            with passes:
                return self._real(mod, target=target, **options)

        used = _without_optimisations(target) if self.quick else target
        library = self.folder / f"{key(mod, used, bool(options))}.so"
        with self._alone(library):
            if library.exists():
                os.utime(library)
                return Kept(library, again)
            if CROSS_COMPILER and self.folder == FOLDER:
                written = cross_compiled(mod, used, options, self.quick, library)
                return Kept(library, again) if written else again()
            compiled, written = self.write(mod, used, options, library)
            if not written:
                return again() if self.quick else compiled
            return Kept(library, again if self.quick else lambda: compiled)

    @contextlib.contextmanager
    def _alone(self, library: Path) -> Iterator[None]:
        """Processes that want one kernel at a time, as ranks do, wait for the first's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{library.name[:2]}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, mod: Any, target: Any, options: Any, library: Path) -> tuple[Any, bool]:
        """What `tvm.compile` returns, and whether it was linked to a shared library.

        Other processes see all of the library or nothing.
        """
        with without_passes(OPTIMISATIONS if self.quick else ()):
            compiled = self._real(mod, target=target, **options)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            linked = _linked(compiled.mod, scratch)
            if linked is not None:
                os.replace(linked, library)
        return compiled, linked is not None


def cross_compiled(mod: Any, target: Any, options: Any, quick: bool, library: Path) -> bool:
    """Whether the process at CROSS_COMPILER wrote a module's shared library."""
    with Client(CROSS_COMPILER) as connection:
        connection.send((tvm.ir.save_json(mod), target.export(), options, quick, library))
        try:
            return bool(connection.recv())
        except EOFError:
            return False


def forget_unused(files: Iterable[Path]) -> None:
    """Remove what no test has asked for in a while."""
    for file in files:
        if time.time() - file.stat().st_mtime > UNUSED:
            file.unlink(missing_ok=True)


def quickly(mod: Any) -> Any:
    """A runnable module of functions that TVM has lowered for a CPU, compiled as fast as possible.

    TVM's own way, in memory, takes three times as long.
    """
    module = codegen_build(mod, _without_optimisations(tvm.target.Target("llvm")))
    with tempfile.TemporaryDirectory() as scratch:
        linked = _linked(module, scratch)
        return module if linked is None else tvm.runtime.load_module(linked)


def _linked(module: Any, folder: str) -> str | None:
    """A shared library in a folder; None where there is no linker."""
    module.write_to_file(f"{folder}/kernel.o", "o")
    command = [*LINKER, "-o", f"{folder}/kernel.so", f"{folder}/kernel.o"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{folder}/kernel.so"


def key(mod: Any, target: Any, on_stack: bool = False) -> str:
    """A digest of everything that determines what `tvm.compile` writes.

    on_stack : whether our passes for CPUs follow TVM's

    TVM's hash of the functions leaves out names alone, of which messages have those of parameters.
    """
    names = sorted(
        [str(gv.name_hint), *(str(p.name) for p in func.params)]
        for gv, func in mod.functions.items()
    )
    number = tvm_ffi.structural_hash(mod)
    ours = "".join(inspect.getsource(p) for p in OUR_PASSES if on_stack)
    parts = (tvm.__version__, tvm_ffi.__version__, str(target), str(names), str(number), ours)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _without_optimisations(target: Any) -> Any:
    return tvm.target.Target({**target.export(), "opt-level": 0})


def _kept(mod: Any, target: Any, options: Any) -> bool:
    """Whether it is a module of TensorIR for a CPU, whose passes have no options but its own.

    Workspaces of open sizes have such an option, which an attribute of the function asks for.
    """
    return (
        isinstance(mod, tvm.IRModule)
        and isinstance(target, tvm.target.Target)
        and target.kind.name == "llvm"
        and not options.config
        and {str(each.name) for each in options.instruments} <= {"Without"}
        and options.opt_level == 2
    )
