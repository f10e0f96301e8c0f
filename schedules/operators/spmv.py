"""Sparse times a vector: C[i] = sum over the stored j of A[i, j] * B[j]."""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.operands import register
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import SPMM
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
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    size, out_type = getattr(T, idtype), problem.out or dtype
    zero = tirx.const(0.0 if "float" in out_type else 0, out_type)

    @T.prim_func
    def spmv(
        a: T.handle, b: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (N,), dtype)
        C = T.match_sparse_buffer(out, (I,), out_type)
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            with T.init():
                C[i] = zero
            C[i] = T.cast(T.cast(C[i], acc) + T.cast(A[i, j], acc) * T.cast(B[j], acc), out_type)

    func: Any = spmv
    return func


register(replace(SPMM, name="spmv", title="sparse times a vector", vectors=True))
