"""Run GPU-scheduled TIR functions without a GPU.

``run_opencl`` executes the *device* kernels of a function as OpenCL on the CPU, and
its *host* part as `gpu_host` says.  The OpenCL runtime must share the host's memory
(fine-grain system SVM), which Intel's CPU runtime and PoCL both do.  `cuda_runner` does
the same with CUDA text, warps included.

``cuda_source`` gives the CUDA text of a function, and ``nvcc_compile`` compiles it;
neither needs a GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

from gpu_host import HostFunction

# The limits of a CUDA device, so that a schedule which is legal there is legal here.
# A warp of one thread makes TVM reduce across threads through shared memory.
OPENCL_TARGET = {
    "kind": "opencl",
    "max_num_threads": 1024,
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 1,
}

# `atomicAdd` of CUDA for OpenCL, in global and in shared memory.
ATOMIC_ADD_PRELUDE = "\n".join(
    ["#pragma OPENCL EXTENSION cl_khr_int64_base_atomics : enable"]
    + [
        f"""
__attribute__((overloadable)) {value} atomicAdd(volatile {space} {value}* p, {value} x) {{
  union {{ {value} v; {bits} b; }} seen, want;
  {bits} expected;
  seen.v = *p;
  do {{
    expected = seen.b;
    want.v = seen.v + x;
    seen.b = {cas}((volatile {space} {bits}*)p, expected, want.b);
  }} while (seen.b != expected);
  return seen.v;
}}"""
        for space in ("__global", "__local")
        for value, bits, cas in (
            ("int", "int", "atomic_cmpxchg"),
            ("float", "int", "atomic_cmpxchg"),
            ("long", "long", "atom_cmpxchg"),
            ("double", "long", "atom_cmpxchg"),
        )
    ]
) + "\n"  # fmt: skip


@functools.cache
def _opencl() -> tuple[Any, Any, Any]:
    """The module pyopencl, a context and a queue on a CPU; `RuntimeError` without."""
    lib = Path(sys.prefix) / "lib"
    if "OCL_ICD_VENDORS" not in os.environ and (lib / "libintelocl.so").exists():
        # The wheels register nothing with the loader; name the runtime to it here.
        for name in ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so"):
            if (lib / name).exists():
                ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
        vendors = Path(tempfile.mkdtemp(prefix="opencl-vendors-"))
        atexit.register(shutil.rmtree, vendors, ignore_errors=True)
        (vendors / "intel.icd").write_text(f"{lib / 'libintelocl.so'}\n")
        os.environ["OCL_ICD_VENDORS"] = str(vendors)
    try:
        import pyopencl as cl
    except ImportError as error:
        raise RuntimeError(f"no pyopencl: {error}") from error
    try:
        devices = [d for p in cl.get_platforms() for d in p.get_devices()]
    except cl.Error as error:
        raise RuntimeError(f"no OpenCL: {error}") from error
    for device in devices:
        shares_memory = device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM
        if device.type & cl.device_type.CPU and shares_memory:
            context = cl.Context([device])
            return cl, context, cl.CommandQueue(context)
    raise RuntimeError(f"no OpenCL CPU device that shares host memory among {devices}")


def opencl_unavailable_reason() -> str:
    """Why `run_opencl` cannot work here; empty if it can."""
    try:
        _opencl()
    except RuntimeError as error:
        return str(error)
    return ""


def opencl_available() -> bool:
    """Whether `run_opencl` can work here."""
    return not opencl_unavailable_reason()


class OpenCLFunction(HostFunction):
    """A GPU-scheduled function, compiled to run on the CPU; see `run_opencl`."""

    def __init__(self, func: tirx.PrimFunc, prelude: str = "") -> None:
        self._cl, self._context, self._queue = _opencl()
        self._prelude = prelude
        super().__init__(func, OPENCL_TARGET, ("global", "shared", "local"))

    def __call__(self, args: Mapping[str, np.ndarray | int | float]) -> dict[str, np.ndarray]:
        """Run on copies of the arrays of `args`, and return the copies."""
        return self._run(args)

    def _compile(self, kernels: dict[str, tirx.PrimFunc]) -> dict[str, Callable[..., None]]:
        self.source = self._prelude + self.source
        with warnings.catch_warnings():  # of the compiler's "kernel was vectorized"
            warnings.simplefilter("ignore", self._cl.CompilerWarning)
            program = self._cl.Program(self._context, self.source).build()
        return {n: self._launcher(program, n, kernel) for n, kernel in kernels.items()}

    def _launcher(self, program: Any, name: str, kernel: tirx.PrimFunc) -> Callable[..., None]:
        """A stand-in that TVM's host code calls: (arguments of the kernel, launch extents)."""
        cl_kernel = self._cl.Kernel(program, name)

        def launch(*args: Any) -> None:
            grid, block, _, values = self._launch(name, kernel, args)
            for i, (dtype, value) in enumerate(values):
                cl_kernel.set_arg(i, self._pointer(value) if dtype is None else dtype.type(value))
            global_size = tuple(g * b for g, b in zip(grid, block))
            self._cl.enqueue_nd_range_kernel(self._queue, cl_kernel, global_size, block)
            self._queue.finish()

        return launch

    def _pointer(self, value: Any) -> Any:
        """A host address as a kernel's argument."""
        address = value.value if isinstance(value, ctypes.c_void_p) else value
        if not address:
            return None
        return self._cl.SVM((ctypes.c_char * 1).from_address(address))


def run_opencl(
    func: tirx.PrimFunc, args: Mapping[str, np.ndarray | int | float], prelude: str = ""
) -> dict[str, np.ndarray]:
    """Run a function with thread bindings (one kernel or several) on the CPU.

    `args` maps the names of all parameters to arrays (of any shape where the buffer has
    one dimension) and numbers.  The arrays stay as they are; the result holds them as
    the function left them, by the same names.  `prelude` is put before the OpenCL text.
    A write near an array but outside of it raises `AssertionError`.
    """
    return OpenCLFunction(func, prelude)(args)


def cuda_source(func: tirx.PrimFunc, arch: str = "sm_90") -> str:
    """The CUDA text of a function, as TVM generates it for `arch`."""
    module = tvm.compile(func, target={"kind": "cuda", "arch": arch}).mod
    return "\n".join(m.inspect_source() for m in module.imports if m.kind == "cuda")


def _nvcc() -> str | None:
    """The path of nvcc, if there is one."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def nvcc_available() -> bool:
    """Whether `nvcc_compile` can work here."""
    return _nvcc() is not None


def nvcc_compile(source: str, arch: str = "sm_90") -> bytes:
    """Compile CUDA text to a cubin; raises `RuntimeError` with the compiler's messages."""
    nvcc = _nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc on PATH or under CUDA_HOME")
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        text.write_text(source)
        command = [nvcc, f"-arch={arch}", "-cubin", "-o", str(cubin), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes()


requires_opencl = pytest.mark.skipif(
    not opencl_available(), reason=opencl_unavailable_reason() or "OpenCL is available"
)
requires_nvcc = pytest.mark.skipif(not nvcc_available(), reason="no nvcc")
