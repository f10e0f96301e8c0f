"""Which element of each row a maximum or minimum of a sparse-dense product is of."""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["SpmmArg", "program"]


@dataclass(frozen=True)
class SpmmArg:
    """ARG[i, k] = place of the first stored j of row i where A[i, j] * B[j, k] is C[i, k].

    dtype : "float32" or "float64", of A's values, of B and of C. Not shorter: LLVM does not round
        a product to 16 bits only to compare it, so that it would not be what C has
    idtype : of indptr, indices, places and the result
    weighted : whether A has values; else they are all one
    """

    dtype: str = "float32"
    idtype: str = "int32"
    weighted: bool = True


def program(problem: SpmmArg) -> SparseFunc:
    """The stage-I function; made for the default schedule.

    Its arrays, beside A's values a (nnz,), B (n, feat), indptr (m + 1,) and indices (nnz,):

    places : (nnz,) what stands for each element in the result, none negative
    c : (m, feat) the maximum or minimum of the terms, NaN where one of them is
    out : (m, feat) the place of the first element that has it; -1 in rows without elements
    """
    dtype, idtype = problem.dtype, problem.idtype
    size, none, weighted = getattr(T, idtype), tirx.const(-1, idtype), problem.weighted

    def is_it(term: Any, extremum: Any) -> Any:
        return tirx.any(term == extremum, tirx.all(tirx.isnan(term), tirx.isnan(extremum)))

    @T.prim_func
    def spmm_arg(
        a: T.handle, b: T.handle, c: T.handle, out: T.handle, places: T.handle,
        indptr: T.handle, indices: T.handle, m: size, n: size, nnz: size, feat: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        if weighted:
            A = T.match_sparse_buffer(a, (I, J), dtype)
        P = T.match_sparse_buffer(places, (I, J), idtype)
        B = T.match_sparse_buffer(b, (N, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        OUT = T.match_sparse_buffer(out, (I, K), idtype)
        with T.sp_iter([I, J, K], "SRS", "find") as [i, j, k]:
            with T.init():
                OUT[i, k] = none
            OUT[i, k] = T.Select(
                tirx.all(
                    OUT[i, k] < 0,
                    is_it(A[i, j] * B[j, k] if weighted else B[j, k], C[i, k]),
                ),
                P[i, j],
                OUT[i, k],
            )

    return spmm_arg.replace(params=[p for p in spmm_arg.params if weighted or p.name != "a"])
