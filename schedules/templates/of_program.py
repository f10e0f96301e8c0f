"""Operators without a template of their own, such as those of a program and a record alone.

A search tries what :mod:`sparsetir.schedules.search.program_space` makes of the program; without
any choice a kernel has the default schedule, on CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsetir.schedules.operators import edge_messages, edge_sums, sddmm
from sparsetir.schedules.operators.operands import OPERATORS, OfProgram
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Sddmm
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.schedules.template import TEMPLATES, Asked, Choices, Template, Tried, register
from sparsetir.sparse_ir.nodes import SparseFunc


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


def candidates(problem: Any, given: Any, target: Any) -> list[Choices]:
    """The default schedule; on CPUs before it what the program's space says of these sizes."""
    known = {} if is_gpu(target) else program_space.default_of(_program(problem), _sizes(given))
    return [Choices(known), Choices()] if known else [Choices()]


def choices(asked: Asked) -> Tried | None:
    """Those of the program's space; None for a GPU, for which there is none."""
    if is_gpu(asked.target):
        return None
    of = _program(asked.problem), _sizes(asked.given)
    tried = program_space.space_of(*of, vector_bits(asked.target), asked.given.threads)
    return {"scheduled": (False, True), **tried}, _choices


def _program(problem: Any) -> SparseFunc:
    return TEMPLATES[Choices, type(problem)].program(problem)


def _sizes(given: Any) -> dict[str, int]:
    return {name: getattr(given, name) for name in ("m", "n", "nnz", "feat")}


def _choices(scheduled: bool, **chosen: Any) -> Choices | None:
    """A config; without a schedule there is one alone."""
    return Choices(chosen) if scheduled else Choices()


def _register(problem: type, program: Callable[..., SparseFunc], **how: Any) -> None:
    how = {"candidates": candidates, "choices": choices, **how}
    register(Template(Choices, problem, program, program_space.apply, **how))


_register(OfProgram, program, arrange=arrange, gpu=None)
for problem, of in (
    (Sddmm, sddmm),
    (edge_messages.EdgeMessages, edge_messages),
    (edge_sums.EdgeSums, edge_sums),
):
    _register(problem, of.program)
