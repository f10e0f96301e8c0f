"""Sparse times dense: C[i, k] = reduce over the stored j of A[i, j] * B[j, k]."""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.reductions import COMBINES, EXTREMA, REDUCERS
from sparsetir.schedules.operators.operands import CHUNK, Operator, each_head, register
from sparsetir.schedules.operators.problems import (
    CsrPattern,
    Spmm,
    memoized,
    reduced,
    with_parameters,
)
from sparsetir.sparse_ir.nodes import SparseFunc


@memoized
def program(problem: Spmm) -> SparseFunc:
    """The operator as a stage-I function, which every template schedules.

    Its arrays, with a dimension of heads before those of A, B and C where the problem is batched:

    a : (nnz,) ; b : (n, feat) ; out : (m, feat)
    indptr : (m + 1,) ; indices : (nnz,) columns, in any order within a row
    row : (m,) computed, in the accumulator's type; for a mean what terms are multiplied with, for a
        maximum or minimum what rows begin with: an infinity, and 0 without elements; absent for a
        sum
    """
    dtype, idtype, acc, reduce = (
        problem.dtype, problem.idtype, problem.accumulator, problem.reduce,
    )  # fmt: skip
    scaled, with_row = REDUCERS[reduce].is_scaled, REDUCERS[reduce].row is not None
    batched, size = problem.batched, getattr(T, idtype)
    out_type = problem.out or dtype
    zero = tirx.const(0.0 if "float" in out_type else 0, out_type)

    def term(a: Any, b: Any, row: Any) -> Any:
        product = T.cast(a, acc) * T.cast(b, acc)
        return product * row if scaled else product

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        heads: size, m: size, n: size, nnz: size, feat: size, row: T.handle,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        if batched:
            H = T.dense_fixed(heads, idtype)
        head = T.meta_var([H] if batched else [])
        A = T.match_sparse_buffer(a, (*head, I, J), dtype)
        B = T.match_sparse_buffer(b, (*head, N, K), dtype)
        C = T.match_sparse_buffer(out, (*head, I, K), out_type)
        if with_row:
            ROW = T.match_sparse_buffer(row, (I,), acc)
        with T.sp_iter([*head, I, J, K], "SSRS"[not batched :], "spmm") as [*h, i, j, k]:
            with T.init():
                C[(*h, i, k)] = T.cast(ROW[i], out_type) if reduce in EXTREMA else zero
            total = T.meta_var(T.cast(C[(*h, i, k)], acc))
            row_i = T.meta_var(ROW[i] if scaled else None)
            C[(*h, i, k)] = T.cast(
                reduced(reduce, total, term(A[(*h, i, j)], B[(*h, j, k)], row_i)), out_type
            )

    return with_parameters(spmm, {"row": not with_row, "heads": not batched}, reduce)


@each_head
def reference(
    problem: Spmm, pattern: CsrPattern, values: Any, operands: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result C, and the sums of the absolute values of its terms."""
    (b,) = operands
    values, b = np.asarray(values, "float64"), np.asarray(b, "float64")
    if problem.reduce in EXTREMA:
        # The least is the greatest of the negatives.
        sign = 1 if COMBINES[problem.reduce].symbol == ">" else -1
        exact = sign * _largest(pattern, sign * values, b)
        return exact, _largest(pattern, np.abs(values), np.abs(b))
    indptr, indices, shape = pattern
    sums = []
    for data, dense in ((values, b), (np.abs(values), np.abs(b))):
        out = sp.csr_array((data, indices, indptr), shape=shape) @ dense
        if REDUCERS[problem.reduce].is_scaled:
            counts = np.maximum(np.diff(indptr), 1)
            out = out / counts.reshape(-1, *[1] * (out.ndim - 1))
        sums.append(out)
    return sums[0], sums[1]


def _largest(pattern: CsrPattern, values: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest product of each row and feature, 0 in rows without elements; keeps NaN."""
    indptr, indices, (m, _) = pattern
    width = int(np.prod(b.shape[1:], dtype=int))
    dense, out = b.reshape(len(b), width), np.zeros((m, width))
    rows = np.flatnonzero(np.diff(indptr))
    step = max(1, CHUNK // max(1, len(indices)))
    for start in range(0, width if len(rows) else 0, step):
        part = slice(start, start + step)
        products = values[:, None] * dense[indices, part]
        out[rows, part] = np.maximum.reduceat(products, indptr[rows], axis=0)
    return out.reshape(m, *b.shape[1:])


SPMM = register(
    Operator(
        "spmm", Spmm, "sparse times dense", {"b": "nk", "out": "mk"}, True, reference,
        program=program,
    )
)  # fmt: skip
