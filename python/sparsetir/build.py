"""From a function of any stage to a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.arrays import itemsize
from sparsetir.kernel import Kernel
from sparsetir.lower import Stages, lower, name_of
from sparsetir.signature import natural_shapes, signature_of
from sparsetir.sparse_ir.nodes import SparseFunc, buffer_var, substitute
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.targets import resolve_target

__all__ = ["build", "compile_stages", "kernel_of"]


def build(
    obj: Any,
    target: Any = "llvm",
    *,
    schedule: Callable[..., Any] | None = None,
    config: Any = None,
    check: bool = True,
) -> Any:
    """Compile to a kernel.

    obj : a stage-I function, or a :class:`Schedule` of one, which gets the default schedule for the
        target; a stage-II function or a `tvm.s_tir.Schedule` of one, built as it is; or an IRModule
        of functions
    target : "llvm" (this machine's CPU with its vector width), "cuda" (this machine's GPU, or
        sm_80 where there is none), or anything `tvm.target.Target` takes, such as
        `{"kind": "cuda", "arch": "sm_90"}`
    schedule, config : as for :func:`sparsetir.lower`; beside a single function
    check : whether the kernel checks index arrays that it has not seen (see :class:`Kernel`)

    Returns a :class:`Kernel`; for a module of several functions a dict of kernels by name.
    Raises what :func:`sparsetir.lower` raises, TypeError for another kind of object, ValueError for
    a target that there is not and a module without functions.
    """
    target = resolve_target(target)
    if isinstance(obj, s_tir.Schedule):
        obj = obj.mod
    if isinstance(obj, tvm.IRModule):
        functions = {gv.name_hint: f for gv, f in obj.functions.items()}
        if not functions:
            raise ValueError("build: argument 'obj': the module has no functions")
        if schedule is not None and len(functions) > 1:
            raise ValueError(
                "build: argument 'schedule': expected None beside a module of several functions "
                f"({', '.join(functions)})"
            )
    elif isinstance(obj, SparseFunc | Schedule | tirx.PrimFunc):
        functions = {name_of(obj.func if isinstance(obj, Schedule) else obj): obj}
    else:
        raise TypeError(
            "build: argument 'obj': expected a stage-I function, a PrimFunc, a Schedule, an "
            f"s_tir.Schedule or an IRModule, got {type(obj).__name__}"
        )
    stages = {name: lower(f, schedule, config, target) for name, f in functions.items()}
    executable = compile_stages(stages, target)
    kernels = {
        name: Kernel(executable, name, signature_of(s), s, target, check=check)
        for name, s in stages.items()
    }
    return next(iter(kernels.values())) if len(kernels) == 1 else kernels


def kernel_of(stages: Stages, target: Any, *, check: bool = True) -> Kernel:
    """The kernel of what :func:`sparsetir.lower` gave for a `tvm.target.Target`."""
    name = name_of(stages["III"])
    executable = compile_stages({name: stages}, target)
    return Kernel(executable, name, signature_of(stages), stages, target, check=check)


def compile_stages(stages: Mapping[str, Stages], target: Any) -> Any:
    """TVM's executable of functions by the name that each is to have in it.

    Their parameters are named, ordered and shaped as the author's are, whatever stage III has.
    """
    functions = {name: _with_natural_shapes(name, s) for name, s in stages.items()}
    return tvm.compile(tvm.IRModule(functions), target=target)


def _with_natural_shapes(name: str, stages: Stages) -> tirx.PrimFunc:
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
