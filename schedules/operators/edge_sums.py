"""Sums at the ends of edges that come as they are, in no order: nothing is sorted for them.

C[i, k] = sum over the edges e from j to i of W[e] * B[j, k], or the mean. Each edge writes to a
whole row of C, where :mod:`sparsetir.schedules.operators.spmm` writes each row once: for patterns
that are new, whose edges would have to be sorted for that.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.problems import Problem, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.facts import assume


@dataclass(frozen=True)
class EdgeSums(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    dtype : of W, B and C, "float32" or "float64"; sums are in it
    idtype : of the edges
    weighted : whether edges have values, which else are 1
    mean : whether sums are divided by the number of edges of their row
    """

    dtype: str = "float32"
    idtype: str = "int64"
    weighted: bool = False
    mean: bool = False


@memoized
def program(problem: EdgeSums) -> SparseFunc:
    """The operator as a stage-I function.

    source, target : (nnz,) the j and the i of each edge, known to be in range
    w : (nnz,) ; b : (n, feat) ; c : (m, feat) ; count : (m,) edges of each row, of a mean
    """
    dtype, idtype, weighted, mean = problem.dtype, problem.idtype, problem.weighted, problem.mean
    size, real = getattr(T, idtype), getattr(T, dtype)

    @T.prim_func
    def edge_sums(
        source: T.handle, target: T.handle, w: T.handle, b: T.handle, c: T.handle,
        count: T.handle, m: size, n: size, nnz: size, feat: size,
    ) -> None:  # fmt: skip
        E = T.dense_fixed(nnz, idtype)
        I = T.dense_fixed(m, idtype)
        J = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        SOURCE = T.match_sparse_buffer(source, (E,), idtype)
        TARGET = T.match_sparse_buffer(target, (E,), idtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        if weighted:
            W = T.match_sparse_buffer(w, (E,), dtype)
        with T.sp_iter([I, K], "SS", "zero") as [i, k]:
            C[i, k] = real(0.0)
        with T.sp_iter([E, K], "SS", "added") as [e, k]:
            C[TARGET[e], k] = C[TARGET[e], k] + (
                W[e] * B[SOURCE[e], k] if weighted else B[SOURCE[e], k]
            )
        if mean:
            N = T.match_sparse_buffer(count, (I,), dtype)
            with T.sp_iter([I], "S", "none") as [i]:
                N[i] = real(0.0)
            with T.sp_iter([E], "S", "counted") as [e]:
                N[TARGET[e]] = N[TARGET[e]] + real(1.0)
            with T.sp_iter([I, K], "SS", "divided") as [i, k]:
                C[i, k] = C[i, k] * (real(1.0) / T.max(N[i], real(1.0)))

    func = with_parameters(edge_sums, {"w": not weighted, "count": not mean})
    func, _ = assume(func, "coordinates", buffer="SOURCE", axis="J")
    func, _ = assume(func, "coordinates", buffer="TARGET", axis="I")
    return func
