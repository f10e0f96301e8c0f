"""Build kernels from functions of any stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, overload

import tvm
from tvm import s_tir, tirx

from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.kernel_cache import kept_kernel
from sparsetir.runtime.pipeline import kernels_of, lower, name_of
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.row_orders import by_pattern
from sparsetir.schedules.passes.normal_form import normal_form
from sparsetir.schedules.row_orders import row_orders
from sparsetir.schedules.targets import TargetLike, is_gpu, resolve_target
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule


@overload
def build(
    obj: SparseFunc | Schedule,
    target: TargetLike = "llvm",
    *,
    schedule: Callable[..., object] | None = None,
    config: object = None,
    check: bool = True,
) -> Kernel: ...


@overload
def build(
    obj: Any,
    target: TargetLike = "llvm",
    *,
    schedule: Callable[..., object] | None = None,
    config: object = None,
    check: bool = True,
) -> Any: ...


def build(
    obj: Any,
    target: TargetLike = "llvm",
    *,
    schedule: Callable[..., object] | None = None,
    config: object = None,
    check: bool = True,
) -> Any:
    """Compile a program to a kernel.

    Parameters
    ----------
    obj : SparseFunc, Schedule, PrimFunc, tvm.s_tir.Schedule or IRModule
        A stage-I function, or a :class:`Schedule` of one, gets the default schedule for the target.
        A stage-II function, or a `tvm.s_tir.Schedule` of one, is built unchanged.
    target : str, dict or tvm.target.Target
        "cpu" or "llvm" (this machine's CPU with its vector width), "cuda" (this machine's GPU, or
        sm_80 if there is none), or anything `tvm.target.Target` takes, such as `{"kind": "cuda",
        "arch": "sm_90"}`.
    schedule, config : optional
        The same as for :func:`sparsetir.lower`; with a single function only.
    check : bool
        Whether the kernel checks index arrays that it has not seen before (see :class:`Kernel`).

    Returns
    -------
    Kernel or dict of str to Kernel
        A dict, by name, for a module of several functions.

    Raises
    ------
    LoweringError, ScheduleError
        As for :func:`sparsetir.lower`.
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
                "build: argument 'schedule': expected None for a module of several functions "
                f"({', '.join(functions)})"
            )
    elif isinstance(obj, SparseFunc | Schedule | tirx.PrimFunc):
        functions = {name_of(obj.func if isinstance(obj, Schedule) else obj): obj}
    else:
        expected = "a stage-I function, a PrimFunc, a Schedule, an s_tir.Schedule or an IRModule"
        raise wrong("build", "obj", expected, type(obj).__name__, TypeError)
    if isinstance(obj, SparseFunc | Schedule):
        now = _snapshot(obj)
        stages, what = partial(lower, now, schedule, config, target), partial(_text, now, schedule)
        kernel = kept_kernel(what, target, stages, check)[0]
        if isinstance(now, SparseFunc) and schedule is None and check and not is_gpu(target):
            plain = normal_form(now)
            rows = row_orders(plain, target)
            kernel.by_pattern = None if rows is None else by_pattern(kernel, plain, rows)
        return kernel
    stages = {name: lower(f, schedule, config, target) for name, f in functions.items()}
    kernels = kernels_of(stages, target, check)
    return next(iter(kernels.values())) if len(kernels) == 1 else kernels


def _snapshot(obj: SparseFunc | Schedule) -> SparseFunc | Schedule:
    """Copy the program, as a stage-I schedule may change before it is lowered again."""
    if isinstance(obj, SparseFunc) or obj.stage_two is not None:
        return obj
    now = Schedule(obj.func)
    now.trace.instructions += obj.trace.instructions
    return now


def _text(obj: SparseFunc | Schedule, schedule: object) -> str:
    """The text that the lowering depends on; "" if it depends on more than a stage-I program."""
    if isinstance(obj, SparseFunc):
        return tvm.ir.save_json(obj) if schedule is None else ""
    # Loop orders that a schedule asked for are kept.
    steps = bool(obj.trace.instructions)
    return f"{tvm.ir.save_json(obj.func)} {steps}" if obj.stage_two is None else ""
