"""The host part of GPU-scheduled functions, for runners that have no GPU.

TVM's own pipeline makes the host part (launch grids, intermediate buffers, checks of the
arguments), and LLVM compiles it.  It finds a kernel by its name in TVM's table of global
functions, so a Python function under that name is all the "driver" it takes.  Workspace comes
from host memory, because the host part is lowered for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import codegen_build, split_host_device_mods

from compile_cache import quickly
from sparsetir.runtime.launch_limits import DYNAMIC_SHARED, launched_within_limits, limits_of

_GUARD_BYTES = 4096  # before and after each array; a multiple of the alignment
_GUARD_VALUE = 0xA5
_ALIGNMENT = 64

# Passes that must wait until the host part has been given a CPU target.
_DEFERRED_PASSES = ("MakePackedAPI", "FP8StorageLegalize", "BF16StorageLegalize")

# What the host part calls with each intermediate buffer, its bytes, those of an element, its name.
WORKSPACE = "sparsetir.test.workspace"


@tvm.ir.instrument.pass_instrument
class _SkipDeferredPasses:
    """Leaves `_DEFERRED_PASSES` out of a pipeline."""

    def should_run(self, mod: tvm.IRModule, info: Any) -> bool:
        return info.name.rsplit(".", 1)[-1] not in _DEFERRED_PASSES


class HostFunction:
    """A GPU-scheduled function, whose kernels a subclass compiles and launches.

    `source` is the text for the device and `kernel_names` the kernels in it.  `launches` lists
    the last call's launches, each as (kernel name, grid, block).
    """

    def __init__(self, func: tirx.PrimFunc, target: Any, scopes: Collection[str]) -> None:
        """Lower for `target`, whose kernels may allocate memory of `scopes`."""
        self._params = list(func.params)
        name = str(func.attrs.get("global_symbol") or "main")
        host, device = lower(func.with_attr("global_symbol", name), target, scopes)
        self.source = ""
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._kernels: dict[str, Callable[..., None]] = {}
        if device is not None:
            self.source = codegen_build(*device).inspect_source()
            kernels = {var.name_hint: kernel for var, kernel in device[0].functions.items()}
            self._kernels = self._compile(kernels)
        self.kernel_names = list(self._kernels)
        self._module = quickly(host)
        # TVM looks each kernel up when it is first called, in a table shared by the
        # process, where another function's kernels may have the same names.
        self._host = self._module[name]

    def _compile(self, kernels: dict[str, tirx.PrimFunc]) -> dict[str, Callable[..., None]]:
        """Stand-ins that the host calls per kernel of `source`: (arguments, launch extents)."""
        raise NotImplementedError

    def _workspace(self, pointer: Any, size: int, element: int, name: str) -> None:
        """Told of an intermediate buffer of `size` bytes, before it is used."""

    def _launch(
        self, name: str, kernel: tirx.PrimFunc, args: tuple[Any, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int, list[tuple[np.dtype | None, Any]]]:
        """Grid, block, bytes of dynamic shared memory; type and value of each argument.

        The type of a pointer is None.
        """
        types = [
            np.dtype(str(p.ty.dtype)) if isinstance(p.ty, tvm.ir.PrimType) else None
            for p in kernel.params
        ]
        params = [str(tag) for tag in kernel.attrs["tirx.kernel_launch_params"]]
        extents = dict(zip(params, args[len(types) :], strict=True))
        grid = tuple(int(extents.pop(f"blockIdx.{d}", 1)) for d in "xyz")
        block = tuple(int(extents.pop(f"threadIdx.{d}", 1)) for d in "xyz")
        dynamic = int(extents.pop("tirx.use_dyn_shared_memory", 0))
        if extents:
            raise ValueError(f"{name}: launch parameters {list(extents)}")
        self._check_launch(name, kernel, grid, block, dynamic)
        self.launches.append((name, grid, block))
        return grid, block, dynamic, list(zip(types, args))

    def _check_launch(
        self, name: str, kernel: tirx.PrimFunc, grid: tuple[int, ...], block: tuple[int, ...],
        dynamic: int,
    ) -> None:  # fmt: skip
        """Refuse what a GPU's driver refuses, in place of the host part, which should have."""
        most = limits_of(kernel.attrs["target"])
        for kind, numbers in (("blockIdx", grid), ("threadIdx", block)):
            for d, number in zip("xyz", numbers, strict=True):
                limit = most.get(f"{kind}.{d}", number)
                if not 1 <= number <= limit:
                    raise ValueError(
                        f"{name}: launched with {number} of {kind}.{d}, not 1 to {limit}"
                    )
        if dynamic > most.get(DYNAMIC_SHARED, dynamic):
            raise ValueError(f"{name}: launched with {dynamic} bytes of dynamic shared memory")

    def _run(self, args: Mapping[str, np.ndarray | int | float]) -> dict[str, np.ndarray]:
        """Run on copies of the arrays of `args`, and return the copies."""
        names = [p.name for p in self._params]
        if set(names) != set(args) or len(names) != len(args):
            raise TypeError(f"parameters are {names}, arguments are {list(args)}")
        values: list[Any] = []
        arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for param in self._params:
            value = args[param.name]
            if isinstance(value, np.ndarray):
                memory, copy = self._copy(param.name, value)
                arrays[param.name] = (memory, copy)
                flat = copy.reshape(-1) if len(getattr(param, "shape", ())) == 1 else copy
                values.append(tvm_ffi.from_dlpack(flat))
            else:
                values.append(value.item() if isinstance(value, np.generic) else value)
        self.launches.clear()
        called = {**self._kernels, WORKSPACE: self._workspace}
        for kernel, launch in called.items():
            tvm_ffi.register_global_func(kernel, launch, override=True)
        try:
            self._host(*values)
        finally:
            for kernel in called:
                tvm_ffi.registry.remove_global_func(kernel)
        for name, (memory, copy) in arrays.items():
            guards = memory[:_GUARD_BYTES], memory[_GUARD_BYTES + copy.nbytes :]
            if memory.size and any((guard != _GUARD_VALUE).any() for guard in guards):
                raise AssertionError(f"the function wrote outside of {name}")
        return {name: copy for name, (_, copy) in arrays.items()}

    def _copy(self, name: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes a copy of `array` lies in, with a guard on both sides, and the copy."""
        return _guarded_copy(array)


def lower(
    func: tirx.PrimFunc, target: Any, scopes: Collection[str]
) -> tuple[tvm.IRModule, tuple[tvm.IRModule, Any] | None]:
    """TVM's own pipeline for `target`, but with a host part for the CPU's memory."""
    target = tvm.target.Target(target).with_host("llvm")
    cpu = tvm.target.Target("llvm")
    pipeline, finish_host, finish_device = tirx.get_default_tir_pipeline(target)
    mod = tirx.transform.BindTarget(target)(tvm.IRModule.from_expr(func))
    options = tvm.transform.PassContext.current().config
    with tvm.transform.PassContext(config=options, instruments=[_SkipDeferredPasses()]):
        mod = pipeline(mod)
    for var, part in mod.functions.items():
        if part.attrs["target"].host is None:
            _check_kernel(var.name_hint, part, scopes)
        else:
            _check_host(part)
            mod[var] = _tell_workspaces(part).with_attr("target", cpu.with_host(cpu))
    for name in _DEFERRED_PASSES:
        mod = getattr(tirx.transform, name)()(mod)
    mod = launched_within_limits(mod)
    host, devices = split_host_device_mods(mod)
    device = next(((finish_device()(m), t) for t, m in devices.items()), None)
    return finish_host()(host), device


def _check_kernel(name: str, kernel: tirx.PrimFunc, scopes: Collection[str]) -> None:
    """Refuse memory that the device lacks, or that TVM would make global without a word."""
    for param in kernel.params:
        scope = getattr(param.ty, "storage_scope", "global")
        if scope not in ("", "global"):
            raise ValueError(f"{name}: {param.name} ({scope}) is allocated outside of the kernel")

    def check(node: tirx.AllocBuffer) -> None:
        scope = node.buffer.scope()
        if scope not in scopes:
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


def _tell_workspaces(host: tirx.PrimFunc) -> tirx.PrimFunc:
    """`T.alloc_buffer((m,))` is followed by a call of `WORKSPACE` with its bytes."""

    def tell(seq: tirx.SeqStmt) -> tirx.Stmt:
        steps: list[tirx.Stmt] = []
        for step in seq.seq:
            steps.append(step)
            if isinstance(step, tirx.AllocBuffer):
                buffer = step.buffer
                element = (tvm.DataType(buffer.dtype).bits + 7) // 8
                size: Any = tirx.const(element, "int64")
                for extent in buffer.shape:
                    size = size * tirx.Cast("int64", extent)
                report = tirx.call_packed(WORKSPACE, buffer.data, size, element, buffer.name)
                steps.append(tirx.Evaluate(report))
        return tirx.SeqStmt(steps)

    return host.with_body(tvm_ffi.structural_map(host.body, (tirx.SeqStmt, tell)))


def _guarded_copy(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An aligned copy of `array`, and the bytes it lies in with a guard on both sides."""
    raw = np.full(array.nbytes + 2 * _GUARD_BYTES + _ALIGNMENT, _GUARD_VALUE, dtype="uint8")
    memory = raw[-raw.ctypes.data % _ALIGNMENT :][: array.nbytes + 2 * _GUARD_BYTES]
    copy = np.ndarray(array.shape, array.dtype, memory, offset=_GUARD_BYTES)
    copy[...] = array
    return memory, copy
