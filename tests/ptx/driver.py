"""CUDA's driver and runtime, with the interpreter for a GPU: TVM's own CUDA runtime runs on it.

`install` makes libraries of the names that TVM's runtime asks for, each function of which calls a
method of `Driver`, and NVRTC TVM's compiler; it cannot be undone, so use a process of its own. Work
of all streams is done at once. Memory of the device lies at addresses where a host's access faults.
"""

from __future__ import annotations

import atexit
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

import nvrtc
from ptx.arithmetic import KINDS
from ptx.machine import Kernel, Module
from ptx.memory import WIDEST, Buffer, Global, PtxError
from ptx.peaks import Gpu

DRIVER = (
    "cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString",
    "cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload",
    "cuTensorMapEncodeTiled",
)  # fmt: skip
RUNTIME = (
    "cudaDeviceGetAttribute", "cudaEventCreate", "cudaEventDestroy", "cudaEventElapsedTime",
    "cudaEventRecord", "cudaEventSynchronize", "cudaFree", "cudaFreeHost", "cudaGetDevice",
    "cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaGetErrorName", "cudaGetErrorString",
    "cudaGetLastError", "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaGraphInstantiate",
    "cudaGraphLaunch", "cudaMalloc", "cudaMallocHost", "cudaMemGetInfo", "cudaMemcpyAsync",
    "cudaMemcpyPeerAsync", "cudaPeekAtLastError", "cudaSetDevice", "cudaStreamBeginCapture",
    "cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamDestroy", "cudaStreamEndCapture",
    "cudaStreamSynchronize", "cudaStreamWaitEvent",
)  # fmt: skip
FUNCTION = """
long {0}(long a, long b, long c, long d, long e, long f) {{
  return call ? call({1}, a, b, c, d, e, f) : 0;
}}"""
CALL = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, *[ctypes.c_long] * 6)
# Attributes of the device, by CUDA's numbers: threads of a block, bytes of shared memory, lanes of
# a warp, multiprocessors, the architecture, more bytes of shared memory, and registers.
ATTRIBUTES = {1: 1024, 8: 48 << 10, 10: 32, 16: 108, 75: 8, 76: 0, 97: 163 << 10, 12: 65536}
DEVICE = 1 << 52  # added to addresses of the device's memory
FAILED, UNSUPPORTED = 700, 801


class Driver:
    """The device: what its functions are called with is as in CUDA's manuals, addresses as numbers.

    arch : what kernels are compiled for
    gpu : whose bound by the counts of each launch is added to `seconds`; None: nothing is counted
    launches : (name, grid, block) of each
    """

    def __init__(self, arch: str = "sm_80", gpu: Gpu | None = None) -> None:
        self.arch, self.memory, self.error = arch, Global(), b"no error"
        self.gpu, self.seconds = gpu, 0.0
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._arrays: dict[int, Any] = {}  # of memory that is allocated
        self._modules: dict[int, Module] = {}
        self._kernels: list[Kernel] = []
        self._events: dict[int, float] = {}
        self._libraries: list[Any] = []

    def install(self) -> None:
        """Let TVM's runtime find this device."""
        names = [*DRIVER, *RUNTIME]

        def call(number: int, *args: int) -> int:
            try:
                return getattr(self, names[number], self._nothing)(*args) or 0
            except (PtxError, NotImplementedError) as error:
                self.error = str(error).encode()
                return UNSUPPORTED if isinstance(error, NotImplementedError) else FAILED

        self._call = CALL(call)
        self._library("libcudart.so.13", RUNTIME, len(DRIVER))
        self._library("libcuda.so.1", DRIVER, 0)
        place = Path(str(tvm.__file__)).parent / "lib" / "libtvm_runtime_cuda.so"
        self._libraries.append(ctypes.CDLL(str(place), ctypes.RTLD_GLOBAL))

        def compiled(code: str, *_: object) -> bytes:
            return nvrtc.ptx_of(code, self.arch).encode()

        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiled, override=True)

    def _library(self, name: str, functions: Iterable[str], first: int) -> None:
        """A library whose functions are calls by number, from `first` on."""
        lines = [FUNCTION.format(f, first + n) for n, f in enumerate(functions)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "a.c").write_text("long (*call)(int, ...);" + "".join(lines))
            (path / "version").write_text(f"{name} {{ *; }};")
            options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--version-script=version"]
            command = ["cc", *options, "-Wl,-Bsymbolic", "a.c", "-o", name]
            subprocess.run(command, cwd=folder, check=True)
            library = ctypes.CDLL(str(path / name), ctypes.RTLD_GLOBAL)
        pointer = ctypes.c_void_p.in_dll(library, "call")
        pointer.value = ctypes.cast(self._call, ctypes.c_void_p).value
        atexit.register(setattr, pointer, "value", None)  # TVM frees memory later still
        self._libraries.append(library)

    def _nothing(self, *_: int) -> None:
        """Do nothing, for functions of streams and graphs, and for those that free small things."""

    # -- devices and errors -------------------------------------------------------------------

    def cudaGetDeviceCount(self, count: int, *_: int) -> None:
        _put(count, ctypes.c_int, 1)

    def cudaGetDevice(self, device: int, *_: int) -> None:
        _put(device, ctypes.c_int, 0)

    def cudaDeviceGetAttribute(self, value: int, attribute: int, *_: int) -> None:
        _put(value, ctypes.c_int, ATTRIBUTES.get(attribute & 0xFFFFFFFF, 1))

    def cuDeviceGetName(self, name: int, *_: int) -> None:
        ctypes.memmove(name, b"interpreter\0", 12)

    def cudaGetDeviceProperties(self, *_: int) -> None:
        raise NotImplementedError("cudaGetDeviceProperties")

    def cudaGetErrorString(self, *_: int) -> int:
        return ctypes.cast(ctypes.c_char_p(self.error), ctypes.c_void_p).value or 0

    cudaGetErrorName = cudaGetErrorString

    def cuGetErrorString(self, _: int, text: int, *__: int) -> None:
        _put(text, ctypes.c_void_p, self.cudaGetErrorString())

    cuGetErrorName = cuGetErrorString

    # -- memory -------------------------------------------------------------------------------

    def cudaMalloc(self, pointer: int, size: int, *_: int) -> None:
        array = np.full(size + 512, 0xFF, np.uint8)
        start = -(-array.ctypes.data // 256) * 256
        buffer = Buffer(f"memory {len(self._arrays)}", start + DEVICE, size, 1, False)
        whole = -(-max(size, 1) // WIDEST) * WIDEST
        buffer.bytes = array[start - array.ctypes.data :][:whole]
        self._arrays[start + DEVICE] = array
        self.memory.buffers.append(buffer)
        _put(pointer, ctypes.c_void_p, start + DEVICE)

    def cudaFree(self, pointer: int, *_: int) -> None:
        if pointer:
            del self._arrays[pointer]
            self.memory.buffers = [b for b in self.memory.buffers if b.start != pointer]

    def cudaMallocHost(self, pointer: int, size: int, *_: int) -> None:
        array = np.zeros(size + 1, np.uint8)
        self._arrays[array.ctypes.data] = array
        _put(pointer, ctypes.c_void_p, array.ctypes.data)

    def cudaFreeHost(self, pointer: int, *_: int) -> None:
        del self._arrays[pointer]

    def cudaMemGetInfo(self, free: int, total: int, *_: int) -> None:
        for place in (free, total):
            _put(place, ctypes.c_size_t, 80 << 30)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, *_: int) -> None:
        ctypes.memmove(self._on_host(to, size), self._on_host(source, size), size)

    def _on_host(self, address: int, size: int) -> int:
        """The address of bytes of the device's memory, or of the host's."""
        if address < DEVICE:
            return address
        if not any(b.start <= address and address + size <= b.stop for b in self.memory.buffers):
            raise PtxError(f"{size} bytes are copied {self.memory.nearest(address)}")
        return address - DEVICE

    # -- kernels and events -------------------------------------------------------------------

    def cuModuleLoadData(self, module: int, image: int, *_: int) -> None:
        text = ctypes.cast(image, ctypes.c_char_p).value or b""
        self._modules[len(self._modules) + 1] = Module(text.decode())
        _put(module, ctypes.c_void_p, len(self._modules))

    def cuModuleGetFunction(self, function: int, module: int, name: int, *_: int) -> None:
        text = ctypes.cast(name, ctypes.c_char_p).value or b""
        self._kernels.append(self._modules[module][text.decode()])
        _put(function, ctypes.c_void_p, len(self._kernels))

    def cuLaunchKernelEx(self, config: int, function: int, params: int, *_: int) -> None:
        extents = tuple((ctypes.c_uint * 7).from_address(config))
        grid, block, dynamic = extents[:3], extents[3:6], extents[6]
        kernel = self._kernels[function - 1]
        places = (ctypes.c_void_p * len(kernel.text.params)).from_address(params)
        values = []
        for place, (_name, kind) in zip(places, kernel.text.params, strict=True):
            dtype = np.dtype(KINDS[kind].number)
            values.append(np.frombuffer(ctypes.string_at(place, dtype.itemsize), dtype)[0])
        self.launches.append((kernel.name, grid, block))
        counted = self.gpu is not None
        counts = kernel.launch(grid, block, values, self.memory, dynamic, cost=counted)
        if self.gpu is not None:
            self.seconds += max(self.gpu.bounds(counts).values())

    def cudaEventRecord(self, event: int, *_: int) -> None:
        self._events[event] = time.perf_counter()

    def cudaEventElapsedTime(self, place: int, first: int, last: int, *_: int) -> None:
        _put(place, ctypes.c_float, 1e3 * (self._events[last] - self._events[first]))

    def cudaEventCreate(self, event: int, *_: int) -> None:
        self._events[len(self._events) + 1] = 0.0
        _put(event, ctypes.c_void_p, len(self._events))

    cudaStreamCreate = cudaStreamCreateWithFlags = cudaEventCreate


def _put(address: int, kind: Any, value: float) -> None:
    """Write a number to the host's memory."""
    kind.from_address(address).value = value
