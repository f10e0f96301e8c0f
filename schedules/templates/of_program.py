"""Operators without a template, such as those with only a program and a record.

A search tries the space that :mod:`sparsetir.schedules.search.program_space` derives from the
program; without choices a kernel has the default schedule, on CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparsetir.schedules.operators import (
    edge_attention,
    edge_messages,
    edge_softmax,
    edge_sums,
    messages,
    sddmm,
    spmm,
)
from sparsetir.schedules.operators.operands import OPERATORS, OfProgram
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Sddmm, SpmmInSteps, Stored
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.schedules.template import TEMPLATES, Choices, SearchInput, Template, Tried, register
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations


def program(problem: OfProgram, config: Any = None) -> SparseFunc:
    """The operator's program."""
    del config
    return problem.program()


def arrange(matrix: CsrPattern, problem: OfProgram, config: Any) -> Arranged:
    """CSR unchanged; for a program over the transposed matrix, sizes are those of the matrix."""
    del config
    arguments = matrix.arguments()
    if OPERATORS[problem.op].transposed:
        arguments |= {"m": arguments["n"], "n": arguments["m"]}
    return Arranged(Stored(), arguments)


def arrange_edges(matrix: CsrPattern, problem: Any, config: Any) -> Arranged:
    """CSR unchanged, with values for each edge."""
    del problem, config
    return Arranged(Stored(lambda A: {"e": A}), matrix.arguments())


def default_of(
    problem: Any, sizes: Mapping[str, Any], target: Any, threads: int, work_of_threads: int
) -> Choices:
    """Default choices of the program's space for known sizes; small work runs on one thread.

    sizes : by the program's parameter names
    threads, work_of_threads : as in :class:`sparsetir.schedules.search.choose.Statistics`
    """
    func, gpu = _program(problem), is_gpu(target)
    choices_of_space = program_space.default_of(func, sizes, gpu)
    few = not gpu and (threads < 2 or program_space.work_of(func, sizes) < work_of_threads)
    return Choices({**choices_of_space, "threads": 1} if few else choices_of_space)


def check_choices(config: Choices, problem: Any, sizes: Mapping[str, Any]) -> None:
    """Raise ScheduleError for choices of another program, and for other sizes compiled in."""
    if (Choices, type(problem)) not in TEMPLATES:
        kind = type(problem).__name__
        raise ScheduleError(f"plan: argument 'config': expected one for {kind}, got {config!r}")
    func = _program(problem)
    defaults = program_space.default_of(func, sizes, gpu=True)
    iterations = [it.name for it in sparse_iterations(func)]
    for name, size in config.items():
        if name.partition(".")[0] not in (*iterations, "threads", "registers"):
            expected = f"choices of {', '.join(iterations)}, threads or registers"
            raise ScheduleError(f"plan: argument 'config': '{name}': expected {expected}")
        if name.endswith(".size") and size not in (0, defaults.get(name, size)):
            raise ScheduleError(
                f"plan: argument 'config': '{name}': serves {size} features, got {defaults[name]}"
            )


def choices_near_default(
    default: Choices, problem: Any, sizes: Mapping[str, Any], target: Any, threads: int
) -> Tried:
    """The choices of the program's space for a CPU, those of the default first."""
    space = program_space.space_of(_program(problem), sizes, vector_bits(target), threads)
    number = default.get("threads", 0)
    if threads > 1:
        space["threads"] = (number, 1 - number)
    tiled = any(name.endswith(".vectors") for name in space)

    def make(scheduled: bool = False, threads: int = number, **chosen: Any) -> Choices | None:
        """A config: the tiles of the space, or the default's choices with other values."""
        if scheduled:
            return program_space.config_of(**chosen)
        kept = {name: chosen[name] for name in (default if tiled else chosen) if name in chosen}
        return Choices({name: x for name, x in {**kept, "threads": threads}.items() if x})

    return {**({"scheduled": (False, True)} if tiled else {}), **space}, make


def candidates(problem: Any, stats: Any, target: Any) -> list[Choices]:
    """The default for a matrix."""
    return [default_of(problem, _sizes(stats), target, stats.threads, stats.work_of_threads)]


def choices(search: SearchInput) -> Tried | None:
    """Choices of the program's space; None for a GPU, which has no such space."""
    if is_gpu(search.target):
        return None
    problem, stats, target = search.problem, search.given, search.target
    return choices_near_default(search.known[0], problem, _sizes(stats), target, stats.threads)


def _program(problem: Any) -> SparseFunc:
    return TEMPLATES[Choices, type(problem)].program(problem)


def _sizes(stats: Any) -> dict[str, int]:
    return {name: getattr(stats, name) for name in ("m", "n", "nnz", "feat")}


def _register(problem: type, program: Callable[..., SparseFunc], **how: Any) -> None:
    how = {"candidates": candidates, "choices": choices, **how}
    register(Template(Choices, problem, program, program_space.apply, **how))


_register(OfProgram, program, arrange=arrange, gpu=None)
_register(Sddmm, sddmm.program)
_register(SpmmInSteps, spmm.program, gpu=None)
for problem, of in (
    (edge_attention.EdgeAttention, edge_attention),
    (edge_messages.EdgeMessages, edge_messages),
    (edge_softmax.EdgeSoftmax, edge_softmax),
    (edge_sums.EdgeSums, edge_sums),
    (messages.Messages, messages),
):
    _register(problem, of.program, arrange=arrange_edges, gpu=None)
