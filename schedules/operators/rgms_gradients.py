"""Gradients of relational gather-matmul-scatter for the weights of relations and of edges:

dW[r, k, l] = sum over i, j of A[r, i, j] * X[j, k] * dY[i, l]
dA[r, i, j] = sum over k, l of X[j, k] * W[r, k, l] * dY[i, l]

The programs over CSF by relation, which templates for GPUs decompose and schedule. Those in chunks
of rows, for CPUs, are in :mod:`sparsetir.schedules.operators.rgms_backward`. (SparseTIR, section
4.4.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class RgmsGradient(Problem):
    """The part of the arguments that a kernel is compiled for; results are float32 (or float64).

    dtype : of X, dY and W, and of A's values by default
    values : of A's values: float32 for 16-bit types too
    idtype : of the index arrays
    weighted : whether elements have values; the gradient of A asks for none
    edges : the gradient of A, instead of that of W
    """

    dtype: str = "float32"
    idtype: str = "int32"
    weighted: bool = True
    values: str | None = None
    edges: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)
        legal = None, self.dtype, self.accumulator
        fits = self.values in legal
        expect(self, "values", fits, f"None, '{self.dtype}' or '{self.accumulator}'")
        expect(self, "weighted", not (self.weighted and self.edges), "False with 'edges'")

    @property
    def out(self) -> str:
        """The type of the result."""
        return self.accumulator


@memoized
def program(problem: RgmsGradient) -> SparseFunc:
    """The operator as a stage-I function over CSF by relation.

    x : (n, feat_in) ; grad : (m, feat)
    a : (nnz,), absent where the problem is not weighted ; out : (relations, feat_in, feat) of W
    or w : (relations, feat_in, feat) ; out : (nnz,) of A, whose element for each stored one is in
    edge : (nnz,) integers, all different
    row_ptr : (relations + 1,) ; rows : (nnz_rows,) rows of each relation that are not empty
    indptr : (nnz_rows + 1,) ; indices : (nnz,) columns, in any order within a row
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    size, weighted, edges = getattr(T, idtype), problem.weighted, problem.edges
    zero = tirx.const(0.0, acc)

    @T.prim_func
    def rgms_gradient(
        a: T.handle, x: T.handle, w: T.handle, grad: T.handle, out: T.handle, edge: T.handle,
        row_ptr: T.handle, rows: T.handle, indptr: T.handle, indices: T.handle, relations: size,
        m: size, n: size, nnz_rows: size, nnz: size, feat_in: size, feat: size,
    ) -> None:  # fmt: skip
        R = T.dense_fixed(relations, idtype)
        I = T.sparse_variable(R, (m, nnz_rows), (row_ptr, rows), idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat_in, idtype)
        L = T.dense_fixed(feat, idtype)
        X = T.match_sparse_buffer(x, (N, K), dtype)
        G = T.match_sparse_buffer(grad, (M, L), dtype)
        if weighted:
            A = T.match_sparse_buffer(a, (R, I, J), problem.values or dtype)
        if edges:
            E = T.dense_fixed(nnz, idtype)
            EDGE = T.match_sparse_buffer(edge, (R, I, J), idtype)
            W = T.match_sparse_buffer(w, (R, K, L), dtype)
            DA = T.match_sparse_buffer(out, (E,), acc)
            with T.sp_iter([E], "S", "rgms_da_init") as [e]:
                DA[e] = zero
            with T.sp_iter([R, I, J, K, L], "SSSRR", "rgms_da") as [r, i, j, k, l]:
                product = T.meta_var(T.cast(W[r, k, l], acc) * T.cast(G[i, l], acc))
                DA[EDGE[r, i, j]] = DA[EDGE[r, i, j]] + T.cast(X[j, k], acc) * product
        else:
            DW = T.match_sparse_buffer(out, (R, K, L), acc)
            with T.sp_iter([R, I, J, K, L], "SRRSS", "rgms_dw") as [r, i, j, k, l]:
                with T.init():
                    DW[r, k, l] = zero
                x_jk = T.meta_var(T.cast(X[j, k], acc))
                term = T.meta_var(T.cast(A[r, i, j], acc) * x_jk if weighted else x_jk)
                DW[r, k, l] = DW[r, k, l] + term * T.cast(G[i, l], acc)

    unused = {"a": not weighted, "w": not edges, "edge": not edges}
    return with_parameters(rgms_gradient, unused)


# Of `ops`, on a GPU: no plan is asked for them by name.
RGMS_WEIGHT = register(
    Operator(
        "rgms_weight", RgmsGradient, "the gradient of rgms for the weights of relations",
        {"x": "ni", "grad": "mk", "out": "rik"}, True, None, reductions=(), program=program,
        on="relations", options=(),
    )
)  # fmt: skip
RGMS_EDGE = register(
    Operator(
        "rgms_edge", RgmsGradient, "the gradient of rgms for the weights of edges",
        {"x": "ni", "grad": "mk", "w": "rik", "out": "e"}, False, None, reductions=(),
        program=program, on="relations", options=(),
    )
)  # fmt: skip
