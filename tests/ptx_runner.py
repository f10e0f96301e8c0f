"""Run the CUDA text of kernels as the PTX that nvcc makes of it, in the interpreter `ptx`.

`cuda_runner` compiles that text for the CPU, with its own words for what CUDA calls; here what
runs is nvcc's, and instructions are those of the PTX manual. `pytest --ptx` runs the tests marked
`ptx` so, and `through_ptx` a part of a test.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cuda_runner
import gpu_runner
from ptx import Global, Module, PtxError

FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "ptx"  # texts of PTX, by hash of their CUDA


@functools.cache
def _nvcc() -> tuple[str, str]:
    """The path of nvcc, and its version."""
    path = gpu_runner._nvcc()
    if path is None:
        raise RuntimeError("no nvcc")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, done.stdout


def ptx_of(source: str, arch: str) -> str:
    """The PTX of CUDA text, made once for all processes; `RuntimeError` with what nvcc says."""
    nvcc, version = _nvcc()
    digest = hashlib.sha256("\n".join((version, arch, source)).encode()).hexdigest()[:32]
    kept = FOLDER / f"{digest}.ptx"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            text, ptx = Path(folder) / "kernels.cu", Path(folder) / "kernels.ptx"
            text.write_text(source)
            command = [nvcc, "-w", f"-arch={arch}", "-ptx", "-o", str(ptx), str(text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"nvcc failed:\n{done.stderr[:4000]}")
            os.replace(ptx, kept)
    os.utime(kept)
    return kept.read_text()


class PtxMachine(cuda_runner.Machine):
    """Runs kernels of CUDA text as PTX.

    launches : how many there were
    """

    def __init__(self) -> None:
        self.launches = 0
        self._memory, self._races, self._equal = Global(), True, False
        self._counts = cuda_runner.Counts()
        cuda_runner.forget_unused(FOLDER.glob("*.ptx"))

    def compile(self, source: str, arch: str) -> PtxKernels:
        return PtxKernels(self, ptx_of(source, arch))

    @contextlib.contextmanager
    def watched(self, races: bool, equal: bool, count: bool) -> Iterator[None]:
        """The fields of counts that only `count` fills stay zero: PTX has other instructions."""
        self._memory, self._races, self._equal = Global(), races, equal
        yield

    def add_buffer(
        self, name: str, address: int, size: int, element: int, read_only: bool = False
    ) -> None:
        self._memory.add_at(name, address, size, element, read_only)

    def reset_counts(self, count: bool) -> None:
        self._counts = cuda_runner.Counts()

    def counts(self) -> cuda_runner.Counts:
        return self._counts


class PtxKernels:
    """The kernels of a text of PTX, launched as those of `cuda_runner.CudaText` are."""

    def __init__(self, machine: PtxMachine, text: str) -> None:
        self._machine, self._module = machine, Module(text)

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int],
        values: Sequence[tuple[Any, Any]], dynamic: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        """Run a kernel's blocks; raises `KernelError`."""
        machine = self._machine
        machine.launches += 1
        numbers = [cuda_runner._address(v) if t is None else t.type(v) for t, v in values]
        try:
            counted = self._module[name].launch(
                grid, block, numbers, machine._memory, dynamic, races=machine._races,
                equal=machine._equal, seed=seed,
            )  # fmt: skip
        except PtxError as error:
            raise cuda_runner.KernelError(f"{name}: {error}") from error
        for field in ("shuffles", "atomics", "barriers"):
            setattr(machine._counts, field, counted[field])


@contextlib.contextmanager
def through_ptx() -> Iterator[PtxMachine]:
    """Functions that are made within run as PTX."""
    before, cuda_runner.machine = cuda_runner.machine, PtxMachine()
    try:
        yield cuda_runner.machine
    finally:
        cuda_runner.machine = before
