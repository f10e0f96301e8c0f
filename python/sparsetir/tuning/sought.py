"""Searches before their first trial: what is tuned, its space, and the configs to begin with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from tvm.target import Target

from sparsetir.planning.plan import requested
from sparsetir.planning.request import DEFAULTS, default_threads
from sparsetir.records.task import Config
from sparsetir.runtime.bound_arguments import bound_arguments
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.search.choose import candidates
from sparsetir.schedules.search.configs import is_choice
from sparsetir.schedules.search.program_space import config_of, space_of
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.targets import TargetLike, is_gpu, resolve_target, vector_bits
from sparsetir.schedules.template import Branch, Choices
from sparsetir.sparse_ir.index_arrays import is_integer
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.tuning.program import ProgramTask
from sparsetir.tuning.schedule_ref import ScheduleRef
from sparsetir.tuning.tuned import Search, Tuned, TunedPlan, TunedProgram, TunedSparse

MOST_CONFIGS = 100_000  # of a space that is enumerated


# A search, its space, and configs to start with, the default first.
SearchSetup: TypeAlias = tuple[Search, Space, list[Config]]


def operator_search(
    op: str, *matrices: object, target: TargetLike, device: str | None, **options: object
) -> SearchSetup:
    """The search for an operator on a matrix, over the configs of its templates.

    matrices, options : arguments of :func:`sparsetir.planning.plan.requested`
    """
    try:
        request = requested(op, *matrices, target=target, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("plan: ", "tune: ", 1)) from error
    wanted, on = request.whole, request.operator.on
    if wanted.gpu and on != "matrix":
        raise wrong("tune", "target", f"a CPU for '{op}'", wanted.target.kind.name)
    key, space = request.key(device), wanted.space()
    if on == "matrix":
        configs = list(candidates(wanted.problem, wanted.statistics, wanted.target))
        return Tuned(request, key, [], configs[0]), space, configs
    default = wanted.chosen()
    if on == "matrices":
        return TunedSparse(request, key, [], default), space, [default]
    # Its plain program with arguments; plans look records up by the operator's own key.
    template = wanted.template(default)
    program = template.program(wanted.problem)
    known = {**wanted.pattern.arguments(), **wanted.sizes}
    known = {n: known[n] for p in program.params if (n := str(p.name)) in known}
    arguments = bound_arguments(program, known, rng=np.random.default_rng(0))
    schedule = ScheduleRef.of(template.apply)
    task = ProgramTask(program, arguments, schedule, wanted.target, wanted.threads, key.op)
    return TunedPlan(task, key, [], default, request=request), space, [default]


def program_search(
    program: object,
    arguments: object,
    schedule: Callable[..., object] | None,
    choices: Mapping[str, Sequence[object]] | None,
    *,
    target: TargetLike,
    threads: int | None,
) -> SearchSetup:
    """The search for a function with arguments, over the choices of a schedule."""
    if not isinstance(program, SparseFunc):
        expected = "the name of an operator or a stage-I function"
        raise wrong("tune", "op", expected, type(program).__name__, TypeError)
    if threads is not None and not (is_integer(threads) and threads >= 1):
        raise ValueError(f"tune: argument 'threads': expected 1 or more, got {threads!r}")
    threads = int(threads or default_threads())
    bound = bound_arguments(program, arguments)
    if schedule is not None and choices is None:
        raise ValueError("tune: argument 'space': expected a dict of choices with a schedule")
    ref = None if schedule is None else ScheduleRef.of(schedule)
    wanted = {} if choices is None else _checked(choices)
    if schedule is None:
        wanted = _derived(program, bound, wanted, target, threads)
    count = math.prod(len(values) for values in wanted.values())
    if count > MOST_CONFIGS:
        raise wrong("tune", "space", f"at most {MOST_CONFIGS:,} configs", f"{count:,}")
    task = ProgramTask(program, bound, ref, resolve_target(target, "tune"), threads)
    make = config_of if schedule is None else lambda **chosen: Choices(chosen)
    branch = Branch("schedule", wanted, make)
    default = Choices()
    return TunedProgram(task, task.key(), [], default), Space((branch,)), [default]


def _checked(choices: object) -> dict[str, tuple[object, ...]]:
    """Check a user's space."""
    caller = "tune: argument 'space'"
    if not isinstance(choices, Mapping) or not choices:
        raise ValueError(f"{caller}: expected a dict of choices by name, got {choices!r}")
    out: dict[str, tuple[object, ...]] = {}
    for name, values in choices.items():
        if not isinstance(name, str):
            raise ValueError(f"{caller}: expected texts as names, got {name!r}")
        if not isinstance(values, list | tuple | range) or not values:
            raise ValueError(f"{caller}: '{name}': expected a list of choices, got {values!r}")
        for value in values:
            if not is_choice(value):
                raise ValueError(
                    f"{caller}: '{name}': expected numbers, texts, booleans or None, got {value!r}"
                )
        if len(set(values)) < len(values):
            raise ValueError(
                f"{caller}: '{name}': expected choices that differ, got {list(values)}"
            )
        out[name] = tuple(values)
    return out


def choices_of(
    program: SparseFunc, arguments: Mapping[str, object], target: Target, threads: int
) -> dict[str, tuple[object, ...]]:
    """The space derived from a function for a CPU; empty if there is nothing to choose.

    arguments : the function's arguments
    """
    sizes = {name: x for name, x in arguments.items() if isinstance(x, int)}
    return space_of(program, sizes, vector_bits(target), threads)


def _derived(
    program: SparseFunc,
    arguments: Mapping[str, object],
    wanted: Mapping[str, tuple[object, ...]],
    target: TargetLike,
    threads: int,
) -> dict[str, tuple[object, ...]]:
    """The space derived from a function, with some of its choices replaced."""
    resolved = resolve_target(target, "tune")
    if is_gpu(resolved):
        raise ValueError(
            "tune: argument 'schedule': expected one for a GPU, for which none is derived from a "
            "function; give schedule and space"
        )
    derived = choices_of(program, arguments, resolved, threads)
    if not derived:
        raise ValueError(
            f"tune: argument 'schedule': expected one for '{program.name}', as none is derived: "
            "no innermost loop is over a dense axis whose length is an argument; give schedule and "
            "space"
        )
    for name in wanted:
        if name not in derived:
            raise ValueError(
                f"tune: argument 'space': there is no '{name}' without a schedule; there are "
                f"{', '.join(derived)}"
            )
    return {**derived, **wanted}


def check_numbers(
    trials: Any, seed: Any, workers: Any, memory_limit: Any, seconds: Mapping[str, Any]
) -> None:
    """Raise for options of a search that are not numbers, or too small."""
    whole = (("trials", trials, 1), ("seed", seed, 0), ("workers", workers, 1))
    for name, value, least in (*whole, ("memory_limit", memory_limit, 1)):
        if not (is_integer(value) and value >= least) and (name, value) != ("memory_limit", None):
            raise wrong("tune", name, f"{least} or more", f"{value!r}")
    for name, value in seconds.items():
        positive = isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0
        if not positive and (name, value) != ("seconds", None):
            raise wrong("tune", name, "more than 0", f"{value!r}")


def refuse_options(what: str, given: Mapping[str, object]) -> None:
    """Raise for options that do not apply to the task, unless they have their defaults."""
    for name, value in given.items():
        if value is not None and not (name in DEFAULTS and value == DEFAULTS[name]):
            raise ValueError(f"tune: argument '{name}': expected none for {what}, got {value!r}")
