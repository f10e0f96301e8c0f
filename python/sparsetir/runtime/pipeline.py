"""The stages of the compiler, in their order: all kernels are built here.

- I: a program over coordinates; a schedule's primitives transform it.
- II: `lower_sparse_iter` makes loops over positions.
- II scheduled: by TVM's primitives and passes if the schedule uses them; else by `multiversion` for
  CPUs and `default_schedule` for GPUs. Then `materialize_loop_kinds` turns annotations into loop
  kinds.
- III: `lower_sparse_buffer` flattens buffers; then come the passes of :data:`LAST`, and
  `without_unread`. TVM compiles the result.

`build`, plans, the operators for torch, the tuner, the command line and the benchmarks all use this
module, so that one of them shows the same stages that the others compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.target import Target
from tvm.tirx.buffer import buffer_data

from sparsetir.runtime.arrays import itemsize
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.launch_limits import PIPELINE
from sparsetir.runtime.pool import work_of_threads
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.signature import Signature, changed_layout, natural_shapes, signature_of
from sparsetir.schedules.default import default_schedule
from sparsetir.schedules.multiversion import multiversion
from sparsetir.schedules.passes import locals_on_stack
from sparsetir.schedules.passes.bounded_shifts import bounded_shifts
from sparsetir.schedules.passes.conditions_in_place import conditions_in_place
from sparsetir.schedules.passes.equal_work import equal_work
from sparsetir.schedules.passes.exact_constants import exact_constants
from sparsetir.schedules.passes.flat_features import flat_features
from sparsetir.schedules.passes.flat_fills import flat_fills
from sparsetir.schedules.passes.fused_rows import fused_rows
from sparsetir.schedules.passes.held_choices import held_choices
from sparsetir.schedules.passes.ieee_floats import ieee_floats
from sparsetir.schedules.passes.launches import accessed_by_host, binds_threads
from sparsetir.schedules.passes.loops_from_zero import loops_from_zero
from sparsetir.schedules.passes.normal_form import normal_form
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds
from sparsetir.schedules.passes.rounded_bfloat16 import rounded_bfloat16
from sparsetir.schedules.passes.serial_lanes import serial_lanes
from sparsetir.schedules.passes.short_loops import short_loops
from sparsetir.schedules.passes.sound_tail_hints import sound_tail_hints
from sparsetir.schedules.passes.supported_operations import supported_operations
from sparsetir.schedules.passes.whole_workspaces import (
    WHOLE,
    is_flat,
    whole_workspaces,
    without_passes,
)
from sparsetir.schedules.targets import (
    TargetLike,
    code_target,
    features_needed,
    has_tensor_cores,
    is_gpu,
    missing_of,
    pool,
    resolve_target,
)
from sparsetir.schedules.template import Template
from sparsetir.sparse_ir.annotations import ATOMIC, GPU_UNITS
from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.lower_sparse_buffer import lower_sparse_buffer
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    buffer_var,
    nodes_of,
    sparse_iterations,
    substitute,
    variables_of,
)
from sparsetir.sparse_ir.position_space import LAYOUTS, SIGNATURE
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.speculation import any_number, total_divisions
from sparsetir.sparse_ir.tir import block_with, with_body
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.workers import units_of

# The last passes by whether the target is a GPU; each takes the function, and the stage-II function
# that it was lowered from.
LAST: dict[bool, tuple[Callable[..., tirx.PrimFunc], ...]] = {
    False: (
        lambda func, _: flat_fills(func, pool(), work_of_threads()),
        lambda func, _: short_loops(func, work_of_threads()) if pool() > 1 else func,
        lambda func, _: equal_work(func, pool()),
        lambda func, _: sound_tail_hints(func),
        lambda func, _: bounded_shifts(serial_lanes(func)),
        lambda func, _: conditions_in_place(loops_from_zero(func)),
        lambda func, marked: whole_workspaces(func, {*map(str, marked.attrs.get(LAYOUTS, {}))}),
        lambda func, _: held_choices(ieee_floats(supported_operations(func, gpu=False))),
    ),
    True: (
        lambda func, _: exact_constants(func),
        lambda func, _: sound_tail_hints(func),
        lambda func, _: bounded_shifts(serial_lanes(func)),
        lambda func, _: conditions_in_place(loops_from_zero(func)),
        lambda func, _: ieee_floats(supported_operations(func, gpu=True)),
    ),
}

# libc's absolute value of a 64-bit integer, which leaves an address unchanged. TVM's own casts from
# a pointer to an integer fail in its passes for types of few bits.
ADDRESS = "labs"

# The function at "I", "II" (as lowered), "II scheduled" and "III" (as compiled), in this order.
# Stages before that of the original function are missing.
Stages = dict[str, Any]


def lower(
    func: Any,
    schedule: Callable[..., object] | None = None,
    config: object = None,
    target: TargetLike = "llvm",
) -> Stages:
    """Lower a function through all stages, up to the compiled one.

    Parameters
    ----------
    func : SparseFunc, Schedule, PrimFunc or tvm.s_tir.Schedule
        A function of stage I; a :class:`Schedule`, whose function is used as scheduled so far; a
        function of stage II, a plain PrimFunc, or a `tvm.s_tir.Schedule` of one of them, used
        unchanged. It is not modified.
    schedule : callable, optional
        `schedule(sch, config)`, called with a new :class:`Schedule` of the stage-I function;
        without a config `schedule(sch)`. Its result is ignored. By default, and if it does not
        continue to stage II itself, the default schedule for the target follows.
    config : optional
        The config for `schedule`.
    target : str, dict or tvm.target.Target
        The same as for :func:`sparsetir.build`.

    Returns
    -------
    Stages
        "III" is the result of the target's last passes (such as constants that print exactly for
        GPUs), and has only the computed parameters that it needs.

    Raises
    ------
    LoweringError, ScheduleError
        If it cannot be lowered or scheduled.
    TypeError
        For an object of another kind.
    ValueError
        For a schedule with a function that is scheduled, and a config without a schedule.
    """
    target = resolve_target(target)
    _check(func, schedule, config)
    if isinstance(func, s_tir.Schedule):
        func = _only(func)
    if isinstance(func, tirx.PrimFunc):
        return _finished({"II scheduled": func} if SIGNATURE in func.attrs else {}, func, target)
    sch = func if isinstance(func, Schedule) else Schedule(func)
    if schedule is not None:
        schedule(*(sch,) if config is None else (sch, config))
    return _schedule_stages(sch, target)


def lower_template(
    template: Template, problem: Any, config: Any, target: TargetLike = "llvm"
) -> Stages:
    """Lower the program of a template for a problem, scheduled with a config, through all stages.

    template : a :class:`sparsetir.schedules.template.Template`
    config : reduced here to the part that kernels depend on (its `compiled`)

    Raises ScheduleError for a config that does not support the problem or the target.
    """
    config = getattr(config, "compiled", config)
    return lower(template.program(problem, config), template.apply, config, target)


def _binds_in_stage_one(func: SparseFunc) -> bool:
    """Whether `parallelize` has divided loops among blocks and threads."""
    return any(units_of(it) & set(GPU_UNITS) for it in sparse_iterations(func))


def name_of(func: SparseFunc | tirx.PrimFunc) -> str:
    """The name of a function outside a module."""
    return str(func.attrs["global_symbol"]) if "global_symbol" in func.attrs else "main"


def _schedule_stages(sch: Schedule, target: Target) -> Stages:
    """The stages of a schedule's function; the default one follows unless it is in stage II."""
    atomic = [it.name for it in sparse_iterations(sch.func) if ATOMIC in it.annotations]
    if atomic and not is_gpu(target):
        raise ScheduleError(
            f"lower: iteration '{atomic[0]}' adds atomically, which target {target.kind.name} does "
            "not; legal is a GPU, or a format that stores each row in one piece"
        )
    # The only place that distinguishes schedules in stage II: they hold a `tvm.s_tir.Schedule`.
    second = getattr(sch, "stage_two", None)
    func, few = sch.func, None
    if second is None and not sch.trace.instructions:  # a schedule's loops and their order stay
        func = flat_features(func) if is_gpu(target) else normal_form(func)
        fused = func if is_gpu(target) else fused_rows(func, few=True)
        few = None if fused is func else fused
    if second is None and not is_gpu(target):
        stages = multiversion(func, target, work_of_threads(), few)
    else:
        lowered = lower_sparse_iter(func) if second is None else sch.lowered
        scheduled = lowered if second is None else _only(second)
        if second is None or is_gpu(target) and _binds_in_stage_one(func):
            scheduled = default_schedule(scheduled, target)  # for loops not yet bound
        stages = {"I": func, "II": lowered, "II scheduled": scheduled}
    return _finished(stages, stages["II scheduled"], target)


def _finished(stages: Stages, scheduled: tirx.PrimFunc, target: Target) -> Stages:
    """Check the scheduled function, run the last passes, and add stage III."""
    gpu, marked = is_gpu(target), materialize_loop_kinds(scheduled)
    threads = binds_threads(marked.body)
    if threads and not gpu:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' is scheduled for the threads of a GPU, which target "
            f"{target.kind.name} lacks; expected a GPU"
        )
    if gpu and not threads:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' is scheduled for no threads, as target "
            f"{target.kind.name} needs; bind its loops, or give the stage-I function for the "
            "default schedule"
        )
    layout = changed_layout(scheduled) if SIGNATURE in scheduled.attrs else ""
    if layout:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}': {layout}; a schedule may change the layout of "
            "its own arrays alone, such as that of cache_read"
        )
    bound = [x for x in nodes_of(tirx.For, marked.body) if gpu and x.thread_binding is not None]
    if nodes_of(tirx.AssertStmt, *bound):
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' asserts in loops over threads, from which target "
            f"{target.kind.name} raises no errors; legal is a CPU"
        )
    lacks = missing_of(features_needed(scheduled), target)
    if lacks:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' is scheduled for a {'GPU' if gpu else 'CPU'} with "
            f"{' and '.join(lacks)}, which target {target} lacks; choose another schedule, or a "
            "target that has them"
        )
    accessed = accessed_by_host(marked.body) if gpu else ""
    if accessed:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' has loops over blocks or threads inside of others, for "
            f"which the host would access {accessed}; legal is a loop over blocks or threads "
            "around these, and a constant number of threads inside of it"
        )
    if "II scheduled" in stages:
        stages = {**stages, "II scheduled": marked}
    last = lower_sparse_buffer(marked)
    for change in LAST[gpu]:
        last = change(last, marked)
    if not has_tensor_cores(target):
        last = rounded_bfloat16(last)
    return {**stages, "III": without_unread(last, marked) if SIGNATURE in marked.attrs else last}


def without_unread(func: tirx.PrimFunc, scheduled: tirx.PrimFunc) -> tirx.PrimFunc:
    """Drop the computed parameters that stage III does not need.

    These are arrays that nothing reads, which only recipes use or a later step of the schedule made
    unused, and numbers that nothing reads or that are the length of a remaining array, from which
    TVM reads it. Each would take time in every call. Before::

        def scatter(C: Buffer((m,)), m: int32, order: Buffer((m,)), count: int32,
                    rows: Buffer((count,))):
            for i in range(count):
                C[rows[i]] = 1.0

    After::

        def scatter(C: Buffer((m,)), m: int32, rows: Buffer((count,))):
            ...

    The caller's parameters stay.
    """
    source = scheduled.attrs[SIGNATURE]
    computed = computed_parameters(source)
    argument = {v.name: str(p.name) for v, p in zip(scheduled.params, source.params, strict=True)}
    of_recipes = {p for p in func.params if argument[p.name] in computed}
    needed, shapes = set(variables_of(func.body)), natural_shapes(scheduled)
    lengths = set[tirx.Var]()
    for array in filter(tirx.is_buffer_var, func.params):
        flat, natural = array.ty.shape, shapes[array.name][1]
        if array in needed or array not in of_recipes:
            for size in (*flat, *natural):
                needed |= set(variables_of(size))
        if array in needed and array in of_recipes:
            lengths |= {n for n in flat if isinstance(n, ir.Var) and n in set(natural)}
    dropped = of_recipes - (needed - lengths)
    params = [p for p in func.params if p not in dropped]
    return tirx.PrimFunc(params, func.body, func.ret_type, func.attrs, func.span)


def _check(func: object, schedule: object, config: object) -> None:
    if not isinstance(func, SparseFunc | Schedule | tirx.PrimFunc | s_tir.Schedule):
        expected = "a stage-I function, a PrimFunc, a Schedule or an s_tir.Schedule"
        raise wrong("lower", "func", expected, type(func).__name__, TypeError)
    if schedule is None:
        if config is not None:
            raise wrong(
                "lower", "config", "None without a schedule, which it is for", f"{config!r}"
            )
        return
    if not callable(schedule):
        raise TypeError(
            "lower: argument 'schedule': expected a function (sch, config) or None, got "
            f"{type(schedule).__name__}"
        )
    if not isinstance(func, SparseFunc):
        raise ValueError(
            "lower: argument 'schedule': expected None for a function that is scheduled, got "
            f"one with a {type(func).__name__}; give the stage-I function"
        )


def _only(sch: s_tir.Schedule) -> object:
    """The function of a schedule of stage II."""
    functions = list(sch.mod.functions.values())
    if len(functions) != 1:
        raise wrong("lower", "func", "a schedule of one function", f"one of {len(functions)}")
    return functions[0]


# -- from stage III to a kernel ------------------------------------------------------------------


def kernel_of(stages: Stages, target: Target, *, check: bool = True) -> Kernel:
    """Compile the stages from :func:`sparsetir.lower` to a kernel."""
    name = name_of(stages["III"])
    return kernels_of({name: stages}, target, check)[name]


def kernels_of(stages: Mapping[str, Stages], target: Target, check: bool) -> dict[str, Kernel]:
    """Compile functions, by the names that they get in one module, to kernels."""
    module = compile_stages(stages, target)
    return {
        name: Kernel(module, name, signature_of(s), s, target, check=check)
        for name, s in stages.items()
    }


def compile_stages(stages: Mapping[str, Stages], target: Target) -> object:
    """Compile functions to TVM's executable, by the names that they get in it.

    Parameters have the names, order and shapes of the author's program, unlike those of stage III.
    """
    functions = {name: with_natural_shapes(name, s) for name, s in stages.items()}
    left_out = set[str]()
    if any(WHOLE in f.attrs for f in functions.values()):
        left_out.add("CompactBufferAllocation")
    if not is_gpu(target) and all(map(is_flat, functions.values())):
        left_out.add("FlattenBuffer")
    pipeline = PIPELINE if is_gpu(target) else locals_on_stack.PIPELINE
    code = code_target(target)
    with without_passes(left_out) if left_out else contextlib.nullcontext():
        try:
            return tvm.compile(tvm.IRModule(functions), target=code, tir_pipeline=pipeline)
        except tvm.error.InternalError as error:
            # Of a size, in a branch that is not taken unless it is 0 (TVM 0.27).
            if "Find divide by zero" not in str(error):
                raise
            rules = total_divisions(any_number)
            functions = {k: with_body(f, map_expr(f.body, rules)) for k, f in functions.items()}
            return tvm.compile(tvm.IRModule(functions), target=code, tir_pipeline=pipeline)


def with_natural_shapes(name: str, stages: Stages, check: bool = True) -> tirx.PrimFunc:
    """Give stage III parameters with the names, order and shapes of the author's program.

    check : assert that no written array shares memory with another one
    """
    func = stages["III"].with_attr("global_symbol", name)
    if "II scheduled" not in stages:
        return _relax_alignment(name, func, stages)
    shapes = natural_shapes(stages["II scheduled"])
    params: list[tirx.Var] = []
    views: list[tirx.Stmt] = []
    arrays: dict[str, tirx.Var] = {}
    for flat in func.params:
        if not tirx.is_buffer_var(flat):
            params.append(flat)
            continue
        argument, shape = shapes[flat.name]
        ty = flat.ty
        param = buffer_var(shape, ty.dtype, argument, ty.storage_scope, ty.data_alignment)
        views.append(tirx.DeclBuffer(flat, data=buffer_data(param)))
        params.append(param)
        arrays[argument] = flat
    root = func.body.block
    checks = _disjoint(name, arrays, signature_of(stages)) if check else []
    body = tirx.SeqStmt([*views, *checks, root.body])
    block = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return tirx.PrimFunc(params, s_tir.SBlockRealize([], True, block), attrs=func.attrs)


def _relax_alignment(name: str, func: tirx.PrimFunc, stages: Stages) -> tirx.PrimFunc:
    """Relax the alignment of a plain PrimFunc's arrays to that of their elements."""
    relaxed = {
        v: buffer_var(v.ty.shape, v.ty.dtype, v.name, v.ty.storage_scope, itemsize(str(v.ty.dtype)))
        for v in func.params
        if tirx.is_buffer_var(v)
    }
    params = [relaxed.get(p, p) for p in func.params]
    body = substitute(func.body, relaxed)
    arrays = {p.name: p for p in params if tirx.is_buffer_var(p)}
    checks = _disjoint(name, arrays, signature_of(stages))
    if isinstance(body, s_tir.SBlockRealize):
        inside = tirx.SeqStmt([*checks, body.block.body])
        body = s_tir.SBlockRealize([], True, block_with(body.block, body=inside))
    elif checks:
        body = tirx.SeqStmt([*checks, body])
    return tirx.PrimFunc(params, body, ret_type=func.ret_type, attrs=func.attrs)


def _disjoint(caller: str, arrays: Mapping[str, Any], signature: Signature) -> list[tirx.Stmt]:
    """Assertions that no written array shares memory with another one.

    arrays : by parameter

    In the kernel they take a nanosecond each; asking NumPy and torch for the memory of two arrays
    takes half a microsecond.
    """
    written = [signature.names[i] for i in signature.outputs]
    checks: list[tirx.Stmt] = []
    spans = {}
    for name, array in arrays.items() if written else ():
        begin = tirx.Var(f"{name}_begin", "int64")
        first = tirx.address_of(array[(0,) * len(array.ty.shape)])
        checks.append(tirx.Bind(begin, tirx.call_pure_extern("int64", ADDRESS, first)))
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
            text = f"{caller}: argument '{name}' is written and shares memory with '{other}'"
            checks.append(tirx.AssertStmt(apart, ir.StringImm("ValueError"), [ir.StringImm(text)]))
    return checks


def _bytes(array: tirx.Var) -> ir.Expr:
    """Bytes that a contiguous array occupies."""
    size = tirx.IntImm("int64", itemsize(str(array.ty.dtype)))
    for extent in array.ty.shape:
        size = size * tirx.Cast("int64", extent)
    return size
