"""The stages of the compiler, in their order: the one way to kernels.

- I: a program over coordinates; a schedule's primitives transform it.
- II: `lower_sparse_iter` makes loops over positions.
- II scheduled: by TVM's primitives and passes where the schedule goes on to them; else by
  `multiversion` for CPUs and `default_schedule` for GPUs. Then `materialize_loop_kinds` makes loop
  kinds of annotations.
- III: `lower_sparse_buffer` makes buffers flat; then come the passes of :data:`LAST`, and
  `without_unread`. TVM compiles what they give.

`build`, plans, the operators for torch, the tuner, the command line and the bench all come through
here, so that what one of them shows is what the others compile. TVM compiles stage III.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.target import Target

from sparsetir.runtime.pool import work_of_threads
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.signature import natural_shapes
from sparsetir.runtime.targets import TargetLike, features_needed, missing_of, resolve_target
from sparsetir.schedules.default import default_schedule, is_gpu
from sparsetir.schedules.multiversion import multiversion
from sparsetir.schedules.passes.bounded_shifts import bounded_shifts
from sparsetir.schedules.passes.exact_constants import exact_constants
from sparsetir.schedules.passes.ieee_floats import ieee_floats
from sparsetir.schedules.passes.launches import accessed_by_host, binds_threads
from sparsetir.schedules.passes.locals_apart import locals_apart
from sparsetir.schedules.passes.locals_on_stack import locals_on_stack
from sparsetir.schedules.passes.parallel_loops import materialize_loop_kinds
from sparsetir.schedules.passes.sound_tail_hints import sound_tail_hints
from sparsetir.schedules.passes.whole_workspaces import whole_workspaces
from sparsetir.sparse_ir.annotations import ATOMIC, GPU_UNITS
from sparsetir.sparse_ir.computed import computed_parameters
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.lower_sparse_buffer import lower_sparse_buffer
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations, variables_of
from sparsetir.sparse_ir.position_space import LAYOUTS, SIGNATURE
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.workers import units_of

# The last passes by whether the target is a GPU; each takes the function, and the one of stage II
# that it was made of.
LAST: dict[bool, tuple[Callable[[Any, Any], Any], ...]] = {
    False: (
        lambda func, _: locals_apart(func),
        lambda func, _: locals_on_stack(func),
        lambda func, _: sound_tail_hints(func),
        lambda func, _: bounded_shifts(func),
        lambda func, marked: whole_workspaces(func, {*map(str, marked.attrs.get(LAYOUTS, {}))}),
        lambda func, _: ieee_floats(func),
    ),
    True: (
        lambda func, _: exact_constants(func),
        lambda func, _: sound_tail_hints(func),
        lambda func, _: bounded_shifts(func),
        lambda func, _: ieee_floats(func),
    ),
}

# The function at "I", "II" (as lowered), "II scheduled" and "III" (what is compiled), in this
# order. There are no stages before that of the function which was given.
Stages = dict[str, Any]


def lower(
    func: Any,
    schedule: Callable[..., Any] | None = None,
    config: Any = None,
    target: TargetLike = "llvm",
) -> Stages:
    """Lower a function through all stages, up to the compiled one.

    Parameters
    ----------
    func : SparseFunc, Schedule, PrimFunc or tvm.s_tir.Schedule
        Of stage I; a :class:`Schedule`, whose function is taken as it was scheduled; of stage II,
        or a plain PrimFunc, or a `tvm.s_tir.Schedule` of one of them, taken as it is. It is left as
        it is.
    schedule : callable, optional
        `schedule(sch, config)`, called with a new :class:`Schedule` of the stage-I function;
        without a config `schedule(sch)`. What it gives back is not looked at. By default, and where
        it does not go on to stage II itself, the default schedule for the target follows.
    config : optional
        For `schedule`.
    target : str, dict or tvm.target.Target
        As for :func:`sparsetir.build`.

    Returns
    -------
    Stages
        "III" has been through the last passes of the target (locals on the stack for CPUs,
        constants that print exactly for GPUs), and has only the computed parameters that it needs.

    Raises
    ------
    LoweringError, ScheduleError
        For what cannot be lowered or scheduled.
    TypeError
        For what is none of these functions.
    ValueError
        For a schedule beside what is scheduled, and a config without a schedule.
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
    return _of_schedule(sch, target)


def lower_template(template: Any, problem: Any, config: Any, target: TargetLike = "llvm") -> Stages:
    """All stages of the kernel that a template makes of a problem and a config.

    template : a :class:`sparsetir.schedules.template.Template`
    config : what of it kernels do not depend on is left out here (its `compiled`)

    Raises ScheduleError for a config that does not serve the problem or the target.
    """
    config = getattr(config, "compiled", config)
    return lower(template.program(problem, config), template.apply, config, target)


def _binds_in_stage_one(func: SparseFunc) -> bool:
    """Whether `parallelize` has divided loops among blocks and threads."""
    return any(units_of(it) & set(GPU_UNITS) for it in sparse_iterations(func))


def name_of(func: Any) -> str:
    """The name that a function has by itself."""
    return str(func.attrs["global_symbol"]) if "global_symbol" in func.attrs else "main"


def _of_schedule(sch: Schedule, target: Target) -> Stages:
    """The stages of what a schedule has come to."""
    atomic = [it.name for it in sparse_iterations(sch.func) if ATOMIC in it.annotations]
    if atomic and not is_gpu(target):
        raise ScheduleError(
            f"lower: iteration '{atomic[0]}' adds atomically, which target {target.kind.name} does "
            "not; legal is a GPU, or a format that stores each row in one piece"
        )
    # The one place that knows of schedules which have gone on to stage II: they hold a
    # `tvm.s_tir.Schedule` from then on.
    second = getattr(sch, "stage_two", None)
    if second is None and not is_gpu(target):
        stages = multiversion(sch.func, target, work_of_threads())
    else:
        lowered = lower_sparse_iter(sch.func) if second is None else sch.lowered
        scheduled = lowered if second is None else _only(second)
        if second is None or is_gpu(target) and _binds_in_stage_one(sch.func):
            scheduled = default_schedule(scheduled, target)  # of what is not bound yet
        stages = {"I": sch.func, "II": lowered, "II scheduled": scheduled}
    return _finished(stages, stages["II scheduled"], target)


def _finished(stages: dict[str, Any], scheduled: Any, target: Target) -> Stages:
    """With stage III, through the passes that come last."""
    gpu, marked = is_gpu(target), materialize_loop_kinds(scheduled)
    threads = binds_threads(marked.body)
    if threads and not gpu:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' is scheduled for the threads of a GPU, which target "
            f"{target.kind.name} has not; expected a GPU"
        )
    if gpu and not threads:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' is scheduled for no threads, as target "
            f"{target.kind.name} needs; bind its loops, or give the stage-I function for the "
            "default schedule"
        )
    lacks = missing_of(features_needed(scheduled), target)
    if lacks:
        raise ScheduleError(
            f"lower: '{name_of(scheduled)}' is scheduled for a CPU with {' and '.join(lacks)}, "
            f"which target {target} has not; choose another schedule, or a target that has"
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
    return {**stages, "III": without_unread(last, marked) if SIGNATURE in marked.attrs else last}


def without_unread(func: tirx.PrimFunc, scheduled: tirx.PrimFunc) -> tirx.PrimFunc:
    """Stage III without the computed parameters that it does not need.

    Arrays that nothing reads, which are there for recipes or were made needless by a later step of
    the schedule, and numbers that nothing reads or that are the length of an array which stays: TVM
    takes them from there. Each would take time in every call. Before::

        def scatter(C: Buffer((m,)), m: int32, order: Buffer((m,)), count: int32,
                    rows: Buffer((count,))):
            for i in range(count):
                C[rows[i]] = 1.0

    After::

        def scatter(C: Buffer((m,)), m: int32, rows: Buffer((count,))):
            ...

    What callers give stays.
    """
    given = scheduled.attrs[SIGNATURE]
    computed = computed_parameters(given)
    argument = {v.name: str(p.name) for v, p in zip(scheduled.params, given.params, strict=True)}
    made = {p for p in func.params if argument[p.name] in computed}
    needed, shapes = set(variables_of(func.body)), natural_shapes(scheduled)
    lengths = set[Any]()
    for array in filter(tirx.is_buffer_var, func.params):
        flat, natural = array.ty.shape, shapes[array.name][1]
        if array in needed or array not in made:
            for size in (*flat, *natural):
                needed |= set(variables_of(size))
        if array in needed and array in made:
            lengths |= {n for n in flat if isinstance(n, ir.Var) and n in set(natural)}
    dropped = made - (needed - lengths)
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
            "lower: argument 'schedule': expected None beside a function that is scheduled, got "
            f"one beside a {type(func).__name__}; give the stage-I function"
        )


def _only(sch: s_tir.Schedule) -> object:
    """The function of a schedule of stage II."""
    functions = list(sch.mod.functions.values())
    if len(functions) != 1:
        raise wrong("lower", "func", "a schedule of one function", f"one of {len(functions)}")
    return functions[0]
