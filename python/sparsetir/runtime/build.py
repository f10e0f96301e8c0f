"""From a function of any stage to a kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, overload

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import buffer_data

from sparsetir.runtime.arrays import itemsize
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import Stages, lower, name_of
from sparsetir.runtime.signature import natural_shapes, signature_of
from sparsetir.runtime.targets import TargetLike, resolve_target
from sparsetir.schedules.passes.whole_workspaces import WHOLE, without_compaction
from sparsetir.sparse_ir.nodes import SparseFunc, buffer_var, substitute
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.tir import block_with

# Of libc: the absolute value of a 64-bit integer, which for an address is itself. TVM's own ways to
# make an integer of a pointer fail in its passes for types of few bits.
ADDRESS = "labs"


@overload
def build(
    obj: SparseFunc | Schedule,
    target: TargetLike = "llvm",
    *,
    schedule: Callable[..., Any] | None = None,
    config: Any = None,
    check: bool = True,
) -> Kernel: ...


@overload
def build(
    obj: Any,
    target: TargetLike = "llvm",
    *,
    schedule: Callable[..., Any] | None = None,
    config: Any = None,
    check: bool = True,
) -> Any: ...


def build(
    obj: Any,
    target: TargetLike = "llvm",
    *,
    schedule: Callable[..., Any] | None = None,
    config: Any = None,
    check: bool = True,
) -> Any:
    """Compile a program to a kernel.

    Parameters
    ----------
    obj : SparseFunc, Schedule, PrimFunc, tvm.s_tir.Schedule or IRModule
        A stage-I function, or a :class:`Schedule` of one, gets the default schedule for the target.
        A stage-II function, or a `tvm.s_tir.Schedule` of one, is built as it is.
    target : str, dict or tvm.target.Target
        "cpu" or "llvm" (this machine's CPU with its vector width), "cuda" (this machine's GPU, or
        sm_80 where there is none), or anything `tvm.target.Target` takes, such as `{"kind": "cuda",
        "arch": "sm_90"}`.
    schedule, config : optional
        As for :func:`sparsetir.lower`; with a single function only.
    check : bool
        Whether the kernel checks index arrays that it has not seen (see :class:`Kernel`).

    Returns
    -------
    Kernel or dict of str to Kernel
        A dict, by name, for a module of several functions.

    Raises
    ------
    LoweringError, ScheduleError
        As :func:`sparsetir.lower`.
    TypeError
        For another kind of object.
    ValueError
        For an unknown target, and for a module without functions.
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


def kernel_of(stages: Stages, target: object, *, check: bool = True) -> Kernel:
    """The kernel of what :func:`sparsetir.lower` gave for a `tvm.target.Target`."""
    name = name_of(stages["III"])
    executable = compile_stages({name: stages}, target)
    return Kernel(executable, name, signature_of(stages), stages, target, check=check)


def compile_stages(stages: Mapping[str, Stages], target: object) -> object:
    """TVM's executable of functions by the name that each is to have in it.

    Their parameters are named, ordered and shaped as the author's are, whatever stage III has.
    """
    functions = {name: with_natural_shapes(name, s) for name, s in stages.items()}
    whole = any(WHOLE in f.attrs for f in functions.values())
    with without_compaction() if whole else contextlib.nullcontext():
        return tvm.compile(tvm.IRModule(functions), target=target)


def with_natural_shapes(name: str, stages: Stages, check: bool = True) -> tirx.PrimFunc:
    """Stage III behind parameters that are named, ordered and shaped as the author's are.

    check : that no array which is written shares memory with another one
    """
    func = stages["III"].with_attr("global_symbol", name)
    if "II scheduled" not in stages:
        return _of_any_alignment(func, stages)
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
    checks = _disjoint(params, signature_of(stages)) if check else []
    body = tirx.SeqStmt([*checks, *views, root.body])
    block = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return tirx.PrimFunc(params, s_tir.SBlockRealize([], True, block), attrs=func.attrs)


def _of_any_alignment(func: tirx.PrimFunc, stages: Stages) -> tirx.PrimFunc:
    """A plain PrimFunc whose arrays need no more alignment than their elements."""
    relaxed = {
        v: buffer_var(v.ty.shape, v.ty.dtype, v.name, v.ty.storage_scope, itemsize(str(v.ty.dtype)))
        for v in func.params
        if tirx.is_buffer_var(v)
    }
    params = [relaxed.get(p, p) for p in func.params]
    body = substitute(func.body, relaxed)
    checks = _disjoint(params, signature_of(stages))
    if isinstance(body, s_tir.SBlockRealize):
        inside = tirx.SeqStmt([*checks, body.block.body])
        body = s_tir.SBlockRealize([], True, block_with(body.block, body=inside))
    elif checks:
        body = tirx.SeqStmt([*checks, body])
    return tirx.PrimFunc(params, body, ret_type=func.ret_type, attrs=func.attrs)


def _disjoint(params: list[Any], signature: Any) -> list[tirx.Stmt]:
    """Assertions that no array which is written has bytes in common with another one.

    Here they take a nanosecond each; to ask NumPy and torch for the memory of two arrays takes half
    a microsecond.
    """
    arrays = {p.name: p for p in params if tirx.is_buffer_var(p)}
    written = [signature.names[i] for i in signature.outputs]
    found: list[tirx.Stmt] = []
    spans = {}
    for name, array in arrays.items() if written else ():
        begin = tirx.Var(f"{name}_begin", "int64")
        first = tirx.address_of(array[(0,) * len(array.ty.shape)])
        found.append(tirx.Bind(begin, tirx.call_pure_extern("int64", ADDRESS, first)))
        spans[name] = begin, _bytes(array)
    names = list(arrays)
    for name in written:
        begin, size = spans[name]
        for other in names:
            if other == name or (other in written and names.index(other) < names.index(name)):
                continue
            start, length = spans[other]
            ends = begin + size <= start, start + length <= begin
            apart = tirx.any(size == 0, length == 0, *ends)
            message = [tvm.ir.StringImm(f"'{name}' shares memory with '{other}'")]
            found.append(tirx.AssertStmt(apart, tvm.ir.StringImm("ValueError"), message))
    return found


def _bytes(array: Any) -> Any:
    """That a contiguous array takes."""
    size: Any = tirx.IntImm("int64", itemsize(str(array.ty.dtype)))
    for extent in array.ty.shape:
        size = size * tirx.Cast("int64", extent)
    return size
