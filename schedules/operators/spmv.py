"""Sparse times a vector: C[i] = sum over the stored j of A[i, j] * B[j]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsetir.schedules.operators.operands import register
from sparsetir.schedules.operators.problems import Spmm, refuse_unsupported
from sparsetir.schedules.operators.spmm import SPMM, written
from sparsetir.sparse_ir.nodes import SparseFunc


def program(problem: Spmm, config: Any = None) -> SparseFunc:
    """The operator as a stage-I function.

    a : (nnz,) ; b : (n,) ; out : (m,)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row

    Raises ScheduleError for a mean, a maximum and heads.
    """
    refuse_unsupported("spmv", config, problem)
    return written(problem, "spmv")


register(replace(SPMM, name="spmv", title="sparse times a vector", vectors=True))
