"""Sums at the ends of edges in any order, without sorting them.

C[i, k] = sum over the edges e from j to i of W[e] * B[j, k], or the mean. Each edge updates a whole
row of C, where :mod:`sparsetir.schedules.operators.spmm` writes each row once: for new patterns,
whose edges would have to be sorted for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


@dataclass(frozen=True)
class EdgeSums(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    dtype : the type of W, B, C and sums, "float32" or "float64"
    idtype : the type of the edges
    weighted : whether edges have values; otherwise these are 1
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
    w : (nnz,) ; b : (n, feat) ; c : (m, feat) ; count : (m,) edges of each row, for a mean
    """
    dtype, idtype, weight = problem.dtype, problem.idtype, "W[e] * " * problem.weighted
    zero, one = (f"T.{dtype}({number})" for number in (0, 1))
    write = Writer("edge_sums", idtype)
    write.dense(E="nnz", I="m", J="n", K="feat")
    for name, axis in (("source", "J"), ("target", "I")):
        write.buffer(name, "E", idtype)
        write.fact("coordinates", buffer=name.upper(), axis=axis)
    write.buffer("b", "J K", dtype)
    write.buffer("c", "I K", dtype)
    if weight:
        write.buffer("w", "E", dtype)
    write.visit("zero", "I K", "SS", [f"C[i, k] = {zero}"])
    line = f"C[TARGET[e], k] = C[TARGET[e], k] + {weight}B[SOURCE[e], k]"
    write.visit("added", "E K", "SS", [line])
    if problem.mean:
        write.buffer("count", "I", dtype, "N")
        write.visit("none", "I", "S", [f"N[i] = {zero}"])
        write.visit("counted", "E", "S", [f"N[TARGET[e]] = N[TARGET[e]] + {one}"])
        line = f"C[i, k] = C[i, k] * ({one} / T.max(N[i], {one}))"
        write.visit("divided", "I K", "SS", [line])
    return write.program("source target w b c count m n nnz feat")
