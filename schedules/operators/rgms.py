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
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class Rgms(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    dtype : of A's values, of X, W and Y; sums are in float32 (float64 for float64)
    values : of A's values, `dtype` by default: float32 for 16-bit types too, such as for means
    idtype : of the index arrays
    weighted : whether elements have values; without, A[r, i, j] is 1 where it is stored
    out : of Y, that of X by default: float32 for 16-bit types too
    added : to what is in Y, whose type is that of sums then; without, Y is set
    in_blocks : whether features are in blocks, each multiplied by a matrix of its own: what W[r]
        has on its diagonal
    """

    dtype: str = "float32"
    idtype: str = "int32"
    weighted: bool = True
    out: str | None = None
    values: str | None = None
    added: bool = False
    in_blocks: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)
        legal = None, self.dtype, self.accumulator
        for name in ("out", "values"):
            fits = getattr(self, name) in legal
            expect(self, name, fits, f"None, '{self.dtype}' or '{self.accumulator}'")
        summed = not self.added or (self.out or self.dtype) == self.accumulator
        expect(self, "added", summed, f"False where the result is not {self.accumulator}")


@memoized
def program(problem: Rgms) -> SparseFunc:
    """The operator as a stage-I function over CSF by relation, which every template schedules.

    a : (nnz,), absent where the problem is not weighted
    x : (n, feat_in) ; w : (relations, feat_in, feat) ; out : (m, feat)
    row_ptr : (relations + 1,) ; rows : (nnz_rows,) rows of each relation that are not empty
    indptr : (nnz_rows + 1,) ; indices : (nnz,) columns, in any order within a row

    With features in blocks x : (n, blocks, feat_in), w : (relations, blocks, feat_in, feat) and
    out : (m, blocks, feat), sizes being those of a block.
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    out_type, size = problem.out or dtype, getattr(T, idtype)
    weighted, sets, in_blocks = problem.weighted, not problem.added, problem.in_blocks
    zero, kinds = tirx.const(0.0, out_type), "RSSRRS" if in_blocks else "RSRRS"

    def term(a: Any, x: Any, w: Any) -> Any:
        x = T.cast(x, acc)
        return (x if a is None else T.cast(a, acc) * x) * T.cast(w, acc)

    @T.prim_func
    def rgms(
        a: T.handle, x: T.handle, w: T.handle, out: T.handle, row_ptr: T.handle, rows: T.handle,
        indptr: T.handle, indices: T.handle, relations: size, m: size, n: size, nnz_rows: size,
        nnz: size, blocks: size, feat_in: size, feat: size,
    ) -> None:  # fmt: skip
        R = T.dense_fixed(relations, idtype)
        I = T.sparse_variable(R, (m, nnz_rows), (row_ptr, rows), idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        if in_blocks:
            B = T.dense_fixed(blocks, idtype)
        K = T.dense_fixed(feat_in, idtype)
        L = T.dense_fixed(feat, idtype)
        block = T.meta_var([B] if in_blocks else [])
        if weighted:
            A = T.match_sparse_buffer(a, (R, I, J), problem.values or dtype)
        X = T.match_sparse_buffer(x, (N, *block, K), dtype)
        W = T.match_sparse_buffer(w, (R, *block, K, L), dtype)
        Y = T.match_sparse_buffer(out, (M, *block, L), out_type)
        with T.sp_iter([R, I, *block, J, K, L], kinds, "rgms") as [r, i, *b, j, k, l]:
            if sets:
                with T.init():
                    Y[(i, *b, l)] = zero
            a_rij = T.meta_var(A[r, i, j] if weighted else None)
            added = T.meta_var(term(a_rij, X[(j, *b, k)], W[(r, *b, k, l)]))
            Y[(i, *b, l)] = T.cast(T.cast(Y[(i, *b, l)], acc) + added, out_type)

    return with_parameters(rgms, {"a": not weighted, "blocks": not in_blocks})


RGMS = register(
    Operator(
        "rgms", Rgms, "relational gather-matmul-scatter", {"x": "nbi", "w": "rbik", "out": "mbk"},
        True, None, reductions=(), program=program, on="relations",
        options=("feat_in", "weighted", "out_dtype"),
    )
)  # fmt: skip
