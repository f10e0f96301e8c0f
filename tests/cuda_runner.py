"""Run the CUDA text of GPU-scheduled functions without a GPU.

NVRTC makes PTX of the text, as it would for a GPU, and `ptx` interprets that: its docstring says
what is found. A function runs once for each seed, which decides the order of blocks and of atomics;
what differs then is an error.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tvm import tirx

import nvrtc
from gpu_host import HostFunction
from ptx import Global, Kernel, Module, PtxError

SEEDS = (0, 1)
SCOPES = (
    "global", "local", "warp", "shared", "shared.dyn",
    "wmma.matrix_a", "wmma.matrix_b", "wmma.accumulator",
)  # fmt: skip
# Arrays of a thread become registers, so an index beyond one's end would show nowhere. The checks
# cost nothing: indices are constants where NVRTC has unrolled the loops.
CHECKED = """
template <class T, int N> struct Checked {
  T all[N];
  template <class I> __device__ T& operator[](I i) {
    if (i < 0 || i >= N) __trap();
    return all[i];
  }
  __device__ operator T*() { return all; }
};
"""
LOCAL = re.compile(r"^( +alignas\(\d+\) )(\w[\w ]*) (\w+)\[(\d+)\];", re.M)
requires_cuda_text = pytest.mark.skipif(
    bool(nvrtc.unavailable_reason()), reason=nvrtc.unavailable_reason() or "NVRTC is available"
)


class KernelError(AssertionError):
    """A kernel did what it must not: its name, what, and the instruction."""


class CudaFunction(HostFunction):
    """A GPU-scheduled function as CUDA text that runs on the CPU; see `run_cuda`.

    arch : what the text is made for
    edit : of the text before it is compiled
    counts : of the last run: "atomics", "shuffles" of lanes, "barriers" of blocks
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        arch: str = "sm_90",
        edit: Callable[[str], str] = lambda source: source,
    ) -> None:
        self._arch, self._edit, self._memory = arch, edit, Global()
        self._error: KernelError | None = None
        self._options: dict[str, Any] = {}
        self.counts = Counter[str]()
        super().__init__(func, {"kind": "cuda", "arch": arch}, SCOPES)

    def __call__(
        self,
        args: Mapping[str, np.ndarray | int | float],
        seeds: Sequence[int] = SEEDS,
        races: bool = True,
        equal: bool = False,
    ) -> dict[str, np.ndarray]:
        """Run once for each seed on copies of the arrays of `args`, and return the last copies.

        races : whether races are looked for; without any, seeds decide the order of atomics alone,
            and a function that has none runs once
        equal : whether two threads may write the same value, as where tiles overlap

        Arrays that cannot be written to are used where they are, and may only be read.
        Raises `KernelError`, also if results depend on the seed by more than the order of atomics
        explains.
        """
        results = []
        for seed in seeds:
            self._error, self._memory, self.counts = None, Global(), Counter()
            self._options = {"seed": seed, "races": races, "equal": equal}
            try:
                results.append(self._run(args))
            except Exception:
                if self._error is not None:
                    raise self._error from None
                raise
            _compare(results[0], results[-1], bool(self.counts["atomics"]))
            if races and not self.counts["atomics"]:
                break
        return results[-1]

    def _compile(self, kernels: dict[str, tirx.PrimFunc]) -> dict[str, Callable[..., None]]:
        self.source = self._edit(self.source)
        head, kernel, rest = self.source.partition('extern "C" __global__')
        text = head + CHECKED + kernel + LOCAL.sub(r"\1Checked<\2, \4> \3;", rest)
        module = Module(nvrtc.ptx_of(text, self._arch))
        return {n: self._launcher(n, kernel, module[n]) for n, kernel in kernels.items()}

    def _launcher(self, name: str, kernel: tirx.PrimFunc, ptx: Kernel) -> Callable[..., None]:
        """A stand-in that TVM's host code calls: (arguments of the kernel, launch extents)."""

        def launch(*args: Any) -> None:
            grid, block, dynamic, values = self._launch(name, kernel, args)
            numbers = [_address(v) if t is None else t.type(v) for t, v in values]
            try:
                self.counts += ptx.launch(
                    grid, block, numbers, self._memory, dynamic, **self._options
                )
            except PtxError as error:
                self._error = KernelError(f"{name}: {error}")
                raise self._error from error

        return launch

    def _copy(self, name: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if array.flags.writeable:
            memory, copy = super()._copy(name, array)
        else:
            raw = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
            memory, copy = np.empty(0), np.ndarray(array.shape, array.dtype, raw)
        self._memory.add(name, copy, not array.flags.writeable)
        return memory, copy

    def _workspace(self, pointer: Any, size: int, element: int, name: str) -> None:
        address = _address(pointer)
        ctypes.memset(address, 0xFF, size)
        self._memory.add_at(name, address, size, element)


def _address(pointer: Any) -> int:
    """The address in what TVM gives for a pointer."""
    return (pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer) or 0


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
