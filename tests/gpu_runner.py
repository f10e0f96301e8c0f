"""Run GPU-scheduled TIR functions without a GPU.

``run_opencl`` executes the *device* kernels of a function as OpenCL on the CPU, and
its *host* part (launch grids, intermediate buffers, checks of the arguments) as the
code TVM itself generates with LLVM.  TVM's host code finds a kernel by its name in
TVM's table of global functions, so a Python function under that name is all the
"driver" it takes.  Workspace comes from host memory, because the host part is lowered
for the CPU; the OpenCL runtime must share that memory (fine-grain system SVM), which
Intel's CPU runtime and PoCL both do.

``cuda_source`` gives the CUDA text of a function, and ``nvcc_compile`` compiles it;
neither needs a GPU.
"""

# TVM's classes declare their fields at run time, where pyright does not see them.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

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
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import codegen_build, split_host_device_mods

from compile_cache import quickly

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

_GUARD_BYTES = 4096  # before and after each array; a multiple of the alignment
_GUARD_VALUE = 0xA5
_ALIGNMENT = 64

# Passes that must wait until the host part has been given a CPU target.
_DEFERRED_PASSES = ("MakePackedAPI", "FP8StorageLegalize", "BF16StorageLegalize")


@tvm.ir.instrument.pass_instrument
class _SkipDeferredPasses:
    """Leaves `_DEFERRED_PASSES` out of a pipeline."""

    def should_run(self, mod: tvm.IRModule, info: Any) -> bool:
        return info.name.rsplit(".", 1)[-1] not in _DEFERRED_PASSES


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


class OpenCLFunction:
    """A GPU-scheduled function, compiled to run on the CPU; see `run_opencl`.

    `source` is the OpenCL text and `kernel_names` the kernels in it.  `launches` lists
    the last call's launches, each as (kernel name, grid, block).
    """

    def __init__(self, func: tirx.PrimFunc, prelude: str = "") -> None:
        self._cl, self._context, self._queue = _opencl()
        self._params = list(func.params)
        name = str(func.attrs.get("global_symbol") or "main")
        host, device = _lower(func.with_attr("global_symbol", name))
        self.source = ""
        self._kernels: dict[str, Callable[..., None]] = {}
        self.kernel_names: list[str] = []
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        if device is not None:
            self.source = prelude + codegen_build(*device).inspect_source()
            with warnings.catch_warnings():  # of the compiler's "kernel was vectorized"
                warnings.simplefilter("ignore", self._cl.CompilerWarning)
                program = self._cl.Program(self._context, self.source).build()
            for var, kernel in device[0].functions.items():
                self.kernel_names.append(var.name_hint)
                self._kernels[var.name_hint] = self._launcher(program, var.name_hint, kernel)
        self._module = quickly(host)
        # TVM looks each kernel up when it is first called, in a table shared by the
        # process, where another function's kernels may have the same names.
        self._host = self._module[name]

    def _launcher(self, program: Any, name: str, kernel: tirx.PrimFunc) -> Callable[..., None]:
        """What TVM's host code calls: (arguments of the kernel, its launch extents)."""
        cl_kernel = self._cl.Kernel(program, name)
        launch_params = [str(tag) for tag in kernel.attrs["tirx.kernel_launch_params"]]
        scalar_types = [
            np.dtype(str(p.ty.dtype)) if isinstance(p.ty, tvm.ir.PrimType) else None
            for p in kernel.params
        ]

        def launch(*args: Any) -> None:
            extents = dict(zip(launch_params, args[len(scalar_types) :], strict=True))
            grid = tuple(int(extents.pop(f"blockIdx.{d}", 1)) for d in "xyz")
            block = tuple(int(extents.pop(f"threadIdx.{d}", 1)) for d in "xyz")
            if extents:
                raise ValueError(f"{name}: launch parameters {list(extents)}")
            self.launches.append((name, grid, block))
            if 0 in grid or 0 in block:
                return
            for i, (value, dtype) in enumerate(zip(args, scalar_types)):
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

    def __call__(self, args: Mapping[str, np.ndarray | int | float]) -> dict[str, np.ndarray]:
        """Run on copies of the arrays of `args`, and return the copies."""
        names = [p.name for p in self._params]
        if set(names) != set(args) or len(names) != len(args):
            raise TypeError(f"parameters are {names}, arguments are {list(args)}")
        values: list[Any] = []
        arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for param in self._params:
            value = args[param.name]
            if isinstance(value, np.ndarray):
                memory, copy = _guarded_copy(value)
                arrays[param.name] = (memory, copy)
                flat = copy.reshape(-1) if len(getattr(param, "shape", ())) == 1 else copy
                values.append(tvm_ffi.from_dlpack(flat))
            else:
                values.append(value.item() if isinstance(value, np.generic) else value)
        self.launches.clear()
        for kernel, launch in self._kernels.items():
            tvm_ffi.register_global_func(kernel, launch, override=True)
        try:
            self._host(*values)
        finally:
            for kernel in self._kernels:
                tvm_ffi.registry.remove_global_func(kernel)
        for name, (memory, copy) in arrays.items():
            guards = memory[:_GUARD_BYTES], memory[_GUARD_BYTES + copy.nbytes :]
            if any((guard != _GUARD_VALUE).any() for guard in guards):
                raise AssertionError(f"the function wrote outside of {name}")
        return {name: copy for name, (_, copy) in arrays.items()}


def _lower(func: tirx.PrimFunc) -> tuple[tvm.IRModule, tuple[tvm.IRModule, Any] | None]:
    """TVM's own pipeline for OpenCL, but with a host part for the CPU's memory."""
    target = tvm.target.Target(OPENCL_TARGET).with_host("llvm")
    cpu = tvm.target.Target("llvm")
    pipeline, finish_host, finish_device = tirx.get_default_tir_pipeline(target)
    mod = tirx.transform.BindTarget(target)(tvm.IRModule.from_expr(func))
    with tvm.transform.PassContext(instruments=[_SkipDeferredPasses()]):
        mod = pipeline(mod)
    for var, part in mod.functions.items():
        if part.attrs["target"].host is None:
            _check_kernel(var.name_hint, part)
        else:
            _check_host(part)
            mod[var] = part.with_attr("target", cpu.with_host(cpu))
    for name in _DEFERRED_PASSES:
        mod = getattr(tirx.transform, name)()(mod)
    host, devices = split_host_device_mods(mod)
    device = next(((finish_device()(m), t) for t, m in devices.items()), None)
    return finish_host()(host), device


def _check_kernel(name: str, kernel: tirx.PrimFunc) -> None:
    """Refuse memory that OpenCL lacks, or that TVM would make global without a word."""
    for param in kernel.params:
        scope = getattr(param.ty, "storage_scope", "global")
        if scope not in ("", "global"):
            raise ValueError(f"{name}: {param.name} ({scope}) is allocated outside of the kernel")

    def check(node: tirx.AllocBuffer) -> None:
        scope = node.buffer.scope()
        if scope not in ("global", "shared", "local"):
            raise ValueError(f"{name}: {node.buffer.name} is of scope {scope}")

    tvm_ffi.structural_walk(kernel.body, (tirx.AllocBuffer, check))


def _check_host(host: tirx.PrimFunc) -> None:
    """Refuse accesses to device memory by the host, which TVM lets pass."""

    def refuse(buffer: Any) -> None:
        raise ValueError(f"{buffer.name} is accessed outside of any thread binding")

    callbacks = [
        (tirx.BufferStore, lambda node: refuse(node.buffer)),
        (tvm.ir.TensorLoad, lambda node: refuse(node.source)),
    ]
    tvm_ffi.structural_walk(host.body, callbacks)


def _guarded_copy(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An aligned copy of `array`, and the bytes it lies in with a guard on both sides."""
    raw = np.full(array.nbytes + 2 * _GUARD_BYTES + _ALIGNMENT, _GUARD_VALUE, dtype="uint8")
    memory = raw[-raw.ctypes.data % _ALIGNMENT :][: array.nbytes + 2 * _GUARD_BYTES]
    copy = np.ndarray(array.shape, array.dtype, memory, offset=_GUARD_BYTES)
    copy[...] = array
    return memory, copy


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
