"""Sparse times a vector: C[i] = sum over the stored j of A[i, j] * B[j]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsetir.schedules.operators.operands import register
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import SPMM, written
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc


def serves(problem: Spmm) -> bool:
    """Whether there is a program for a problem: sums of one matrix."""
    return problem.reduce == "sum" and not problem.batched


def program(problem: Spmm, config: Any = None) -> SparseFunc:
    """The operator as a stage-I function.

    a : (nnz,) ; b : (n,) ; out : (m,)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row

    Raises ScheduleError for a mean, a maximum and heads.
    """
    if not serves(problem):
        raise ScheduleError(
            f"spmv: argument 'config': {type(config).__name__} serves sums of one matrix, "
            f"got reduce='{problem.reduce}', batched={problem.batched}"
        )
    return written(problem, "spmv")


register(replace(SPMM, name="spmv", title="sparse times a vector", vectors=True))
