"""Run the CUDA text of GPU-scheduled functions without a GPU.

The text that nvcc would get is compiled by g++ against `cuda/device.h`: each thread of a block is a
fiber, and barriers, shuffles, atomics, tensor cores and asynchronous copies do what CUDA says.
Loads and stores call hooks (those of -fsanitize=thread, without its library), which find

- accesses outside of every buffer and every shared array, and misaligned ones,
- races: two threads that touch an element, one of them writing, with no barrier between them and
  not both by atomics; blocks of a launch are never ordered; equal values are a race, too,
- barriers that not all threads of a block reach, and warp instructions whose mask names lanes that
  do not come.

What holds no value yet is NaN: shared memory, results of shuffles from lanes that have ended, and
copies that nobody waited for; locals hold huge numbers. A function runs once for each seed, which
decides the order of blocks, warps and lanes; what differs then is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from cuda_text import to_cpp
from gpu_host import HostFunction

SOURCES = Path(__file__).parent / "cuda"
FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "cuda"  # compiled texts, by hash
UNUSED = 14 * 24 * 3600  # seconds after which a library that no test asked for is removed
SEEDS = (0, 1)
SCOPES = (
    "global", "local", "warp", "shared", "shared.dyn",
    "wmma.matrix_a", "wmma.matrix_b", "wmma.accumulator",
)  # fmt: skip
FLAGS = (
    "-std=c++17", "-g1", "-w", "-fPIC", "-shared", "-nodefaultlibs", "-Wl,-rpath,$ORIGIN",
)  # fmt: skip
LIBRARIES = ("-lm", "-lc", "-lgcc_s", "-lgcc")
KERNEL_FLAGS = (
    "-Og", "-fsanitize=thread", "-fsanitize=bounds", "-fno-strict-aliasing",
    # An access of the text stays one access.
    "-fno-tree-sra", "-fno-store-merging",
)  # fmt: skip


class KernelError(AssertionError):
    """A kernel did what it must not: its name, what, and the line of its text."""


class Counts(ctypes.Structure):
    """Counts of launches, all but the first three only where requested.

    instructions : of warps, that touch memory; lanes : of all of them, 32 each at best
    sectors : of 32 bytes of global memory, per instruction of a warp
    conflicts : atomics of a warp's instruction on an address that another of its lanes changes
    longest_block, longest_warp : most instructions of a block, and of a warp
    """

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "shuffles", "atomics", "barriers", "switches", "blocks", "instructions", "lanes",
            "sectors", "conflicts", "longest_block", "longest_warp",
        )
    ]  # fmt: skip

    @classmethod
    def of(cls, launches: Sequence[Counts]) -> Counts:
        """Counts of all launches together."""
        out = cls()
        for name, _ in cls._fields_:
            total = max if name.startswith("longest") else sum
            setattr(out, name, total([getattr(x, name) for x in launches] or [0]))
        return out


@functools.cache
def _compiler() -> tuple[str, str]:
    """The path of g++ and its version; `RuntimeError` without."""
    path = shutil.which("g++")
    if path is None:
        raise RuntimeError("no g++")
    command = [path, "-dumpfullversion", "-dumpmachine"]
    return path, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unavailable_reason() -> str:
    """Why CUDA text cannot be run here; empty if it can."""
    try:
        _compiler()
    except RuntimeError as error:
        return str(error)
    return ""


requires_cuda_text = pytest.mark.skipif(
    bool(unavailable_reason()), reason=unavailable_reason() or "g++ is available"
)


def _build(text: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """A shared library of C++, compiled once for all processes.

    text : that decides what is made, or is made if there are no sources
    """
    compiler, version = _compiler()
    digest = hashlib.sha256("\n".join((version, *flags, text)).encode()).hexdigest()[:32]
    library = FOLDER / f"lib{digest}.so"
    if library.exists():
        os.utime(library)
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        files = [str(source) for source in sources]
        if not files:
            files = [f"{folder}/kernels.cpp"]
            Path(files[0]).write_text(text)
        command = [compiler, *FLAGS, *flags, "-o", f"{folder}/made.so", *files, *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ failed:\n{done.stderr[:4000]}")
        os.replace(f"{folder}/made.so", library)
    return library


@functools.cache
def _runtime_path() -> Path:
    forget_unused(FOLDER.glob("*.so"))
    sources = sorted(SOURCES.iterdir())
    text = "\n".join(source.read_text() for source in sources)
    return _build(text, [s for s in sources if s.suffix == ".cpp"], ["-O2", "-lstdc++"])


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_runtime_path()))
    library.cuda_message.restype = ctypes.c_char_p
    library.cuda_where.restype = ctypes.c_void_p
    library.cuda_counts.restype = ctypes.POINTER(Counts)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.cuda_add_buffer.argtypes = [ctypes.c_char_p, pointer, size, ctypes.c_uint, ctypes.c_int]
    library.cuda_launch.argtypes = [pointer] * 4 + [size, ctypes.c_uint]
    return library


def _counts() -> Counts:
    """Counts since the last reset."""
    return Counts.from_buffer_copy(_runtime().cuda_counts().contents)


def forget_unused(files: Iterable[Path]) -> None:
    """Remove those that no test has asked for in a while."""
    for file in files:
        if time.time() - file.stat().st_mtime > UNUSED:
            file.unlink(missing_ok=True)


class CudaText:
    """Kernels of CUDA text, compiled.

    Raises `RuntimeError` with what g++ says, and `ValueError` for PTX that is not known.
    """

    def __init__(self, source: str, arch: str = "sm_90") -> None:
        self._text, self.names = to_cpp(source, int("".join(filter(str.isdigit, arch))))
        runtime = _runtime_path()
        link = (f"-I{SOURCES}", f"-L{runtime.parent}", f"-l:{runtime.name}")
        self._path = _build(self._text, (), KERNEL_FLAGS + _poisoned_locals() + link)
        self._library = ctypes.CDLL(str(self._path))

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        values: Sequence[tuple[Any, Any]],
        dynamic: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel's blocks.

        values : type, None for a pointer, and value of each argument
        dynamic : bytes of dynamic shared memory

        Raises `KernelError`.
        """
        if 0 in grid or 0 in block:
            raise KernelError(f"{name}: launched with a grid {grid} of blocks {block}")
        boxes = [
            np.array([_address(v) if t is None else v], "uint64" if t is None else t)
            for t, v in values
        ]
        pointers = (ctypes.c_void_p * len(boxes))(*[box.ctypes.data for box in boxes])
        function = ctypes.cast(getattr(self._library, f"cuda_call_{name}"), ctypes.c_void_p)
        shape = ctypes.c_uint * 3
        ended = _runtime().cuda_launch(
            function, pointers, shape(*grid), shape(*block), dynamic, seed
        )
        if not ended:
            raise KernelError(f"{name}: {self._message()}")

    def _message(self) -> str:
        """The error of the last launch, and the line of the text that caused it."""
        runtime = _runtime()
        message, line = runtime.cuda_message().decode(), runtime.cuda_where_line()
        if runtime.cuda_where():
            line = _line_at(self._path, runtime.cuda_where())
        lines = self._text.split("\n")
        return f"{message}\n  {lines[line - 1].strip()}" if 0 < line <= len(lines) else message


@contextlib.contextmanager
def watched(races: bool = True, equal: bool = False, count: bool = False) -> Iterator[None]:
    """Kernels may touch the buffers that `add_buffer` adds within; see `CudaFunction`."""
    runtime = _runtime()
    runtime.cuda_watch_races(int(races), int(equal))
    runtime.cuda_reset_counts(int(count))
    try:
        yield
    finally:
        runtime.cuda_remove_buffers()


def add_buffer(name: str, address: int, size: int, element: int, read_only: bool = False) -> None:
    """Let kernels touch `size` bytes at an address, in elements of some bytes."""
    _runtime().cuda_add_buffer(name.encode(), address, size, element, int(read_only))


class Machine:
    """A compiler and runner of CUDA text: here the emulator; `ptx_runner` has another one."""

    def compile(self, source: str, arch: str) -> Any:
        """Something whose `launch` is as that of :class:`CudaText`."""
        return CudaText(source, arch)

    def watched(
        self, races: bool, equal: bool, count: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Like :func:`watched`."""
        return watched(races, equal, count)

    def add_buffer(
        self, name: str, address: int, size: int, element: int, read_only: bool = False
    ) -> None:
        """Like :func:`add_buffer`."""
        add_buffer(name, address, size, element, read_only)

    def reset_counts(self, count: bool) -> None:
        """Begin to count, all fields where asked to."""
        _runtime().cuda_reset_counts(int(count))

    def counts(self) -> Counts:
        """Counts since the last reset."""
        return _counts()


machine = Machine()  # of each function that is made


class CudaFunction(HostFunction):
    """A GPU-scheduled function as CUDA text that runs on the CPU; see `run_cuda`.

    arch : what the text is made for
    edit : of the text before it is compiled
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        arch: str = "sm_90",
        edit: Callable[[str], str] = lambda source: source,
    ) -> None:
        self._arch, self._edit, self._seed, self._count = arch, edit, 0, False
        self._error: KernelError | None = None
        self._machine = machine
        self.counts = Counts()
        self.launch_counts: list[Counts] = []
        super().__init__(func, {"kind": "cuda", "arch": arch}, SCOPES)

    def __call__(
        self,
        args: Mapping[str, np.ndarray | int | float],
        seeds: Sequence[int] = SEEDS,
        races: bool = True,
        equal: bool = False,
        count: bool = False,
    ) -> dict[str, np.ndarray]:
        """Run once for each seed on copies of the arrays of `args`, and return the last copies.

        races : whether races are looked for
        equal : whether two threads may write the same value, as where tiles overlap
        count : whether the fields of `counts`, which tells of the last run, are all filled; so are
            those of `launch_counts`, which tell of each of its launches

        Arrays that cannot be written to are used where they are, and may only be read.
        Raises `KernelError`, also if results depend on the seed by more than the order of atomics
        explains.
        """
        results, self._count = [], count
        for self._seed in seeds:
            self._error, self.launch_counts = None, []
            with self._machine.watched(races, equal, count):
                try:
                    results.append(self._run(args))
                except Exception:
                    if self._error is not None:
                        raise self._error from None
                    raise
                self.counts = Counts.of(self.launch_counts)
            _compare(results[0], results[-1], bool(self.counts.atomics))
        return results[-1]

    def _compile(self, kernels: dict[str, tirx.PrimFunc]) -> dict[str, Callable[..., None]]:
        self.source = self._edit(self.source)
        self._text = self._machine.compile(self.source, self._arch)
        return {name: self._launcher(name, kernel) for name, kernel in kernels.items()}

    def _launcher(self, name: str, kernel: tirx.PrimFunc) -> Callable[..., None]:
        """A stand-in that TVM's host code calls: (arguments of the kernel, launch extents)."""

        def launch(*args: Any) -> None:
            grid, block, dynamic, values = self._launch(name, kernel, args)
            self._machine.reset_counts(self._count)
            try:
                self._text.launch(name, grid, block, values, dynamic, self._seed)
            except KernelError as error:
                self._error = error
                raise
            self.launch_counts.append(self._machine.counts())

        return launch

    def _copy(self, name: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if array.flags.writeable:
            memory, copy = super()._copy(name, array)
        else:
            raw = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
            memory, copy = np.empty(0), np.ndarray(array.shape, array.dtype, raw)
        begin = copy.ctypes.data
        self._machine.add_buffer(name, begin, copy.nbytes, copy.itemsize, not array.flags.writeable)
        return memory, copy

    def _workspace(self, pointer: Any, size: int, element: int, name: str) -> None:
        address = _address(pointer)
        ctypes.memset(address, 0xFF, size)
        self._machine.add_buffer(name, address, size, element)


def _address(pointer: Any) -> int:
    """The address in what TVM gives for a pointer."""
    return (pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer) or 0


@functools.cache
def _poisoned_locals() -> tuple[str, ...]:
    """Fill locals with a pattern: NaN in float16, huge in other types. Since version 12."""
    major = int(_compiler()[1].split(".")[0])
    return ("-ftrivial-auto-var-init=pattern",) if major >= 12 else ()


def _line_at(path: Path, address: int) -> int:
    """The line of the C++ text before an address of a library; 0 if there is no way to tell."""
    tool, base = shutil.which("addr2line"), _base_of(path)
    if tool is None or base is None:
        return 0
    command = [tool, "-e", str(path), hex(address - 1 - base)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    line = re.search(r"kernels\.cpp:(\d+)", printed)
    return int(line[1]) if line else 0


def _base_of(path: Path) -> int | None:
    """The address where a library was loaded."""
    for mapping in Path("/proc/self/maps").read_text().split("\n"):
        if mapping.endswith(path.name):
            return int(mapping.split("-")[0], 16)
    return None


def _compare(first: dict[str, np.ndarray], other: dict[str, np.ndarray], atomics: bool) -> None:
    """Results of two seeds: the same, or near where atomics add in any order."""
    for name, a in first.items():
        b = other[name]
        if a.ctypes.data == b.ctypes.data or a.tobytes() == b.tobytes():
            continue
        x, y = a.astype("float64"), b.astype("float64")
        small = {2: 2e-2, 4: 1e-4, 8: 1e-10}.get(a.itemsize, 0.0)
        exact = a.dtype.kind in "iub"
        if not atomics or exact or not np.allclose(x, y, small, small, equal_nan=True):
            raise KernelError(f"{name} depends on the order in which warps run")


def run_cuda(
    func: tirx.PrimFunc,
    args: Mapping[str, np.ndarray | int | float],
    prelude: str = "",
    **options: Any,
) -> dict[str, np.ndarray]:
    """Run a function with thread bindings (one kernel or several) on the CPU.

    `args` maps the names of all parameters to arrays (of any shape where the buffer has
    one dimension) and numbers.  The arrays stay as they are; the result holds them as
    the function left them, by the same names.  `prelude` is put before the text, as in
    `gpu_runner.run_opencl`; `options` are those of a :class:`CudaFunction`'s call.
    """
    return CudaFunction(func, edit=lambda source: prelude + source)(args, **options)
