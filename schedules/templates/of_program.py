"""Operators without a template of their own, such as those of a program and a record alone.

A search tries what :mod:`sparsetir.schedules.search.program_space` makes of the program; without
any choice a kernel has the default schedule, on CPUs and GPUs.
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
)
from sparsetir.schedules.operators.operands import OPERATORS, OfProgram
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Sddmm
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.schedules.template import TEMPLATES, Asked, Choices, Template, Tried, register
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations


def program(problem: OfProgram, config: Any = None) -> SparseFunc:
    """That of the operator."""
    del config
    return problem.program()


def arrange(matrix: CsrPattern, problem: OfProgram, config: Any) -> Arranged:
    """CSR as it is; of a program over the transposed matrix, sizes are those of the matrix."""
    del config
    given = matrix.arguments()
    if OPERATORS[problem.op].transposed:
        given |= {"m": given["n"], "n": given["m"]}
    return Arranged(matrix, given)


class OfEdges:
    """Values of edges as kernels take them; what a ConvertedFormat says of itself."""

    padding = 0.0
    keeps_order = True

    def values(self, /, **stored: Any) -> Mapping[str, Any]:
        """Values as they are."""
        return {"e": stored["A"]}


def arrange_edges(matrix: CsrPattern, problem: Any, config: Any) -> Arranged:
    """CSR as it is, with values for each edge."""
    del problem, config
    return Arranged(OfEdges(), matrix.arguments())


def default_of(
    problem: Any, sizes: Mapping[str, Any], target: Any, threads: int, work_of_threads: int
) -> Choices:
    """What the program's space says of sizes that are known; small work is for one thread.

    sizes : by the names of the program's parameters
    threads, work_of_threads : as of :class:`sparsetir.schedules.search.choose.Statistics`
    """
    func, gpu = _program(problem), is_gpu(target)
    known = program_space.default_of(func, sizes, gpu)
    few = not gpu and (threads < 2 or program_space.work_of(func, sizes) < work_of_threads)
    return Choices({**known, "threads": 1} if few else known)


def check_choices(config: Choices, problem: Any, sizes: Mapping[str, Any]) -> None:
    """Raise ScheduleError for choices of another program, and for other sizes compiled in."""
    if (Choices, type(problem)) not in TEMPLATES:
        kind = type(problem).__name__
        raise ScheduleError(f"plan: argument 'config': expected one for {kind}, got {config!r}")
    func = _program(problem)
    own = program_space.default_of(func, sizes, gpu=True)
    known = [it.name for it in sparse_iterations(func)]
    for name, size in config.items():
        if name.partition(".")[0] not in (*known, "threads", "registers"):
            expected = f"choices of {', '.join(known)}, threads or registers"
            raise ScheduleError(f"plan: argument 'config': '{name}': expected {expected}")
        if name.endswith(".size") and size not in (0, own.get(name, size)):
            raise ScheduleError(
                f"plan: argument 'config': '{name}': serves {size} features, got {own[name]}"
            )


def tried_around(
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
            return program_space.together(**chosen)
        kept = {name: chosen[name] for name in (default if tiled else chosen) if name in chosen}
        return Choices({name: x for name, x in {**kept, "threads": threads}.items() if x})

    return {**({"scheduled": (False, True)} if tiled else {}), **space}, make


def candidates(problem: Any, given: Any, target: Any) -> list[Choices]:
    """The default for a matrix."""
    return [default_of(problem, _sizes(given), target, given.threads, given.work_of_threads)]


def choices(asked: Asked) -> Tried | None:
    """Those of the program's space; None for a GPU, for which there is none."""
    if is_gpu(asked.target):
        return None
    problem, given, target = asked.problem, asked.given, asked.target
    return tried_around(asked.known[0], problem, _sizes(given), target, given.threads)


def _program(problem: Any) -> SparseFunc:
    return TEMPLATES[Choices, type(problem)].program(problem)


def _sizes(given: Any) -> dict[str, int]:
    return {name: getattr(given, name) for name in ("m", "n", "nnz", "feat")}


def _register(problem: type, program: Callable[..., SparseFunc], **how: Any) -> None:
    how = {"candidates": candidates, "choices": choices, **how}
    register(Template(Choices, problem, program, program_space.apply, **how))


_register(OfProgram, program, arrange=arrange, gpu=None)
_register(Sddmm, sddmm.program)
for problem, of in (
    (edge_attention.EdgeAttention, edge_attention),
    (edge_messages.EdgeMessages, edge_messages),
    (edge_softmax.EdgeSoftmax, edge_softmax),
    (edge_sums.EdgeSums, edge_sums),
    (messages.Messages, messages),
):
    _register(problem, of.program, arrange=arrange_edges, gpu=None)
