"""Relational gather-matmul-scatter:

Y[i, l] = sum over r, j, k of A[r, i, j] * X[j, k] * W[r, k, l]

A sum over relations r: rows of X that are gathered along the stored (i, j) of a relation, times the
relation's matrix, are added to rows of Y. It is the layer of an RGCN, relations being kinds of
edges, and a sparse convolution, relations being offsets. (SparseTIR, section 4.4.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.problems import (
    DTYPES,
    IDTYPES,
    Problem,
    made_once,
    with_parameters,
)
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["Rgms", "program"]


@dataclass(frozen=True)
class Rgms(Problem):
    """What a kernel is compiled for.

    dtype : of A's values, of X, W and Y; sums are in float32 (float64 for float64)
    values : of A's values, `dtype` by default: float32 for 16-bit types too, such as for means
    idtype : of the index arrays
    weighted : whether elements have values; without, A[r, i, j] is 1 where it is stored
    out : of Y, that of X by default: float32 for 16-bit types too
    """

    dtype: str = "float32"
    idtype: str = "int32"
    weighted: bool = True
    out: str | None = None
    values: str | None = None

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)
        legal = None, self.dtype, self.accumulator
        for name in ("out", "values"):
            fits = getattr(self, name) in legal
            expect(self, name, fits, f"None, '{self.dtype}' or '{self.accumulator}'")


@made_once
def program(problem: Rgms) -> SparseFunc:
    """The operator as a stage-I function over CSF by relation, which every template schedules.

    a : (nnz,), absent where the problem is not weighted
    x : (n, feat_in) ; w : (relations, feat_in, feat) ; out : (m, feat)
    row_ptr : (relations + 1,) ; rows : (nnz_rows,) rows of each relation that are not empty
    indptr : (nnz_rows + 1,) ; indices : (nnz,) columns, in any order within a row
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    out_type, size = problem.out or dtype, getattr(T, idtype)
    weighted, zero = problem.weighted, tirx.const(0.0, out_type)

    def term(a: Any, x: Any, w: Any) -> Any:
        x = T.cast(x, acc)
        return (T.cast(a, acc) * x if weighted else x) * T.cast(w, acc)

    @T.prim_func
    def rgms(
        a: T.handle, x: T.handle, w: T.handle, out: T.handle, row_ptr: T.handle, rows: T.handle,
        indptr: T.handle, indices: T.handle, relations: size, m: size, n: size, nnz_rows: size,
        nnz: size, feat_in: size, feat: size,
    ) -> None:  # fmt: skip
        R = T.dense_fixed(relations, idtype)
        I = T.sparse_variable(R, (m, nnz_rows), (row_ptr, rows), idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat_in, idtype)
        L = T.dense_fixed(feat, idtype)
        if weighted:
            A = T.match_sparse_buffer(a, (R, I, J), problem.values or dtype)
        X = T.match_sparse_buffer(x, (N, K), dtype)
        W = T.match_sparse_buffer(w, (R, K, L), dtype)
        Y = T.match_sparse_buffer(out, (M, L), out_type)
        with T.sp_iter([R, I, J, K, L], "RSRRS", "rgms") as [r, i, j, k, l]:
            with T.init():
                Y[i, l] = zero
            Y[i, l] = T.cast(
                T.cast(Y[i, l], acc) + term(A[r, i, j] if weighted else None, X[j, k], W[r, k, l]),
                out_type,
            )

    return with_parameters(rgms, {"a": not weighted})
