"""Gradients of relational gather-matmul-scatter for the weights of relations and of edges:

dW[r, k, l] = sum over i, j of A[r, i, j] * X[j, k] * dY[i, l]
dA[r, i, j] = sum over k, l of X[j, k] * W[r, k, l] * dY[i, l]

The programs over CSF by relation, which templates for GPUs decompose and schedule. Those in chunks
of rows, for CPUs, are in :mod:`sparsetir.schedules.operators.rgms_backward`. (SparseTIR, section
4.4.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


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
    write = Writer("rgms_gradient", idtype)
    write.dense(R="relations")
    write.variable("I", "R", "m", "nnz_rows", "row_ptr", "rows")
    write.variable("J", "I", "n", "nnz", "indptr", "indices")
    write.dense(M="m", N="n", K="feat_in", L="feat")
    write.buffer("x", "N K", dtype)
    write.buffer("grad", "M L", dtype, "G")
    elements = {"DW": "R K L", "X": "J K", "G": "I L"}
    if problem.weighted:
        write.buffer("a", "R I J", problem.values or dtype)
        elements = {"DW": "R K L", "A": "R I J", "X": "J K", "G": "I L"}
    if problem.edges:
        write.dense(E="nnz")
        write.buffer("edge", "R I J", idtype)
        write.buffer("w", "R K L", dtype)
        write.buffer("out", "E", acc, "DA")
        write.visit("rgms_da_init", "E", "S", [f"DA[e] = T.{acc}(0)"])
        x, w, g = (write.load(*at, acc) for at in (("X", "j k"), ("W", "r k l"), ("G", "i l")))
        line = f"DA[EDGE[r, i, j]] = DA[EDGE[r, i, j]] + {x} * ({w} * {g})"
        write.visit("rgms_da", "R I J K L", "SSSRR", [line])
    else:
        write.buffer("out", "R K L", acc, "DW")
        write.products("rgms_dw", "R I J K L", "SRRSS", elements, acc)
    arrays = "a x w grad out edge row_ptr rows indptr indices"
    return write.program(f"{arrays} relations m n nnz_rows nnz feat_in feat")


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
