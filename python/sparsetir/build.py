"""From a function of any stage to a kernel."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.arrays import itemsize
from sparsetir.kernel import Kernel
from sparsetir.schedules.default import binds_threads, default_schedule, is_gpu
from sparsetir.schedules.passes.cpu_locals import locals_on_stack
from sparsetir.schedules.passes.exact_constants import exact_constants
from sparsetir.signature import natural_shapes, signature_of
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.lower_sparse_buffer import lower_sparse_buffer
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc, buffer_var, substitute
from sparsetir.sparse_ir.position_space import SIGNATURE

__all__ = ["build", "host_target", "resolve_target"]

DEFAULT_CUDA_ARCH = "sm_80"


def build(obj: Any, target: Any = "llvm", *, check: bool = True) -> Any:
    """Compile to a kernel.

    obj : a stage-I function, which gets the default schedule for the target; a stage-II function
        or a `tvm.s_tir.Schedule` of one, built as it is; or an IRModule of any of these
    target : "llvm" (this machine's CPU with its vector width), "cuda" (this machine's GPU, or
        sm_80 where there is none), or anything `tvm.target.Target` takes, such as
        `{"kind": "cuda", "arch": "sm_90"}`
    check : whether the kernel checks index arrays that it has not seen (see :class:`Kernel`)

    Returns a :class:`Kernel`; for a module of several functions a dict of kernels by name.
    Raises LoweringError or ScheduleError, TypeError for another kind of object, ValueError for a
    target that there is not and a module without functions.
    """
    target = resolve_target(target)
    if isinstance(obj, s_tir.Schedule):
        obj = obj.mod
    if isinstance(obj, tvm.IRModule):
        functions = {gv.name_hint: f for gv, f in obj.functions.items()}
        if not functions:
            raise ValueError("build: argument 'obj': the module has no functions")
    elif isinstance(obj, SparseFunc | tirx.PrimFunc):
        functions = {_name(obj): obj}
    else:
        raise TypeError(
            "build: argument 'obj': expected a stage-I function, a PrimFunc, an s_tir.Schedule or "
            f"an IRModule, got {type(obj).__name__}"
        )
    stages = {name: _stages(name, f, target) for name, f in functions.items()}
    module = tvm.IRModule(
        {name: _callable_with_natural_shapes(name, s) for name, s in stages.items()}
    )
    executable = tvm.compile(module, target=target)
    kernels = {
        name: Kernel(executable, name, signature_of(s), s, target, check=check)
        for name, s in stages.items()
    }
    return next(iter(kernels.values())) if len(kernels) == 1 else kernels


def host_target() -> Any:
    """This machine's CPU, by the name that LLVM gives it."""
    cpu = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")()
    return tvm.target.Target({"kind": "llvm", "mcpu": str(cpu)})


def resolve_target(target: Any) -> Any:
    """A `tvm.target.Target`; "llvm" and "cuda" mean what this machine has."""
    if isinstance(target, tvm.target.Target):
        return target
    if target == "llvm":
        return host_target()
    if target == "cuda":
        device = tvm.runtime.device("cuda", 0)
        arch = f"sm_{device.compute_version.replace('.', '')}" if device.exist else None
        return tvm.target.Target({"kind": "cuda", "arch": arch or DEFAULT_CUDA_ARCH})
    if not isinstance(target, str | dict):
        raise TypeError(
            "build: argument 'target': expected 'llvm', 'cuda', a target dict or a Target, "
            f"got {target!r}"
        )
    try:
        return tvm.target.Target(target)
    except (ValueError, TypeError) as error:
        raise ValueError(f"build: argument 'target': {error}") from error


def _name(func: Any) -> str:
    return str(func.attrs["global_symbol"]) if "global_symbol" in func.attrs else "main"


def _stages(name: str, func: Any, target: Any) -> dict[str, Any]:
    """The function at each stage: "I", "II" (as lowered), "II scheduled" and "III"."""
    stages: dict[str, Any] = {}
    if isinstance(func, SparseFunc):
        stages["I"] = func
        stages["II"] = lower_sparse_iter(func)
        stages["II scheduled"] = default_schedule(stages["II"], target)
    elif not isinstance(func, tirx.PrimFunc):
        raise TypeError(f"build: '{name}': cannot build a {type(func).__name__}")
    elif SIGNATURE in func.attrs:
        stages["II scheduled"] = func
    scheduled = stages.get("II scheduled", func)
    if is_gpu(target) and not binds_threads(scheduled.body):
        raise ScheduleError(
            f"build: '{name}' is scheduled for no threads, as target {target.kind.name} needs; "
            "bind its loops, or give the stage-I function for the default schedule"
        )
    stages["III"] = lower_sparse_buffer(scheduled)
    finish = exact_constants if is_gpu(target) else locals_on_stack
    stages["III"] = finish(stages["III"])
    return stages


def _callable_with_natural_shapes(name: str, stages: dict[str, Any]) -> tirx.PrimFunc:
    """Stage III behind parameters that are named, ordered and shaped as the author's are."""
    func = stages["III"].with_attr("global_symbol", name)
    if "II scheduled" not in stages:
        return _of_any_alignment(func)
    shapes = natural_shapes(stages["II scheduled"])
    params: list[Any] = []
    views: list[tirx.Stmt] = []
    for flat in func.params:
        if not tirx.is_buffer_var(flat):
            params.append(flat)
            continue
        argument, shape = shapes[flat.name]
        ty = flat.ty
        param = buffer_var(shape, ty.dtype, argument, ty.storage_scope, ty.data_alignment)
        views.append(tirx.DeclBuffer(flat, data=buffer_data(param)))
        params.append(param)
    root = func.body.block
    body = tirx.SeqStmt([*views, root.body])
    block = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return tirx.PrimFunc(params, s_tir.SBlockRealize([], True, block), attrs=func.attrs)


def _of_any_alignment(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A plain PrimFunc whose arrays need no more alignment than their elements."""
    relaxed = {
        v: buffer_var(
            v.ty.shape,
            v.ty.dtype,
            v.name,
            v.ty.storage_scope,
            itemsize(str(v.ty.dtype)),
        )
        for v in func.params
        if tirx.is_buffer_var(v)
    }
    params = [relaxed.get(p, p) for p in func.params]
    return tirx.PrimFunc(
        params, substitute(func.body, relaxed), ret_type=func.ret_type, attrs=func.attrs
    )
