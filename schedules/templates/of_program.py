"""Operators that are a program and a record alone: the default schedule, and tiles in registers.

A search tries what :mod:`sparsetir.schedules.search.program_space` makes of the program; without
any choice a kernel has the default schedule, on CPUs and GPUs.
"""

from __future__ import annotations

from typing import Any

from sparsetir.schedules.operators.operands import OPERATORS, OfProgram
from sparsetir.schedules.operators.problems import Arranged, CsrPattern
from sparsetir.schedules.search import program_space
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.schedules.template import Asked, Choices, Template, Tried, register
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


def candidates(problem: OfProgram, given: Any, target: Any) -> list[Choices]:
    """The default schedule."""
    del problem, given, target
    return [Choices()]


def choices(asked: Asked) -> Tried | None:
    """Those of the program's space; None for a GPU, for which there is none."""
    if is_gpu(asked.target):
        return None
    given = asked.given
    sizes = {"m": given.m, "n": given.n, "nnz": given.nnz, "feat": given.feat}
    func = asked.problem.program()
    tried = program_space.space_of(func, sizes, vector_bits(asked.target), given.threads)
    return {"scheduled": (False, True), **tried}, _choices


def _choices(scheduled: bool, **chosen: Any) -> Choices | None:
    """A config; without a schedule there is one alone."""
    return Choices(chosen) if scheduled else Choices()


register(
    Template(
        Choices, OfProgram, program, program_space.apply, arrange, None, candidates, choices,
    )
)  # fmt: skip
