"""Relational gather-matmul-scatter:

Y[i, l] = sum over r, j, k of A[r, i, j] * X[j, k] * W[r, k, l]

A sum over relations r: rows of X gathered along the stored (i, j) of a relation, times the
relation's matrix, are added to rows of Y. It is the layer of an RGCN, with kinds of edges as
relations, and a sparse convolution, with offsets as relations. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.gradients import level_by_level
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


@dataclass(frozen=True)
class Rgms(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    dtype : the type of A's values, of X, W and Y; sums are float32 (float64 for float64)
    values : the type of A's values, by default `dtype`: float32 for 16-bit types too, e.g. for
        means
    idtype : the type of the index arrays
    weighted : whether elements have values; otherwise A[r, i, j] is 1 where it is stored
    out : the type of Y, by default that of X: float32 for 16-bit types too
    added : whether Y, then of the type of sums, is added to rather than set
    in_blocks : whether features are in blocks, each multiplied by its own matrix: the diagonal
        blocks of W[r]
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


@dataclass(frozen=True)
class RgmsGradient(Problem):
    """The gradient of W, or, with `edges`, of the values of A; the result has the type of sums.

    dtype : the type of X, W and the gradient of Y
    idtype, weighted, values : as in :class:`Rgms`; the gradient of A does not read values
    in_blocks : as in :class:`Rgms`, for CPUs: relations are passed in pieces
    """

    dtype: str = "float32"
    idtype: str = "int32"
    weighted: bool = True
    values: str | None = None
    edges: bool = False
    in_blocks: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)
        legal = None, self.dtype, self.accumulator
        fits = self.values in legal
        expect(self, "values", fits, f"None, '{self.dtype}' or '{self.accumulator}'")
        expect(self, "weighted", not (self.weighted and self.edges), "False with 'edges'")

    @property
    def of(self) -> Rgms:
        """The problem whose gradient it is."""
        weighted = self.weighted or self.edges
        return Rgms(self.dtype, self.idtype, weighted, None, self.values, False, self.in_blocks)

    @property
    def out(self) -> str:
        """The type of the result."""
        return self.accumulator


@memoized
def program(problem: Rgms) -> SparseFunc:
    """The operator as a stage-I function over CSF by relation, which every template schedules.

    a : (nnz,), absent if the problem is not weighted
    x : (n, feat_in) ; w : (relations, feat_in, feat) ; out : (m, feat)
    row_ptr : (relations + 1,) ; rows : (nnz_rows,) nonempty rows of each relation
    indptr : (nnz_rows + 1,) ; indices : (nnz,) columns, in any order within a row

    With features in blocks x : (n, blocks, feat_in), w : (relations, blocks, feat_in, feat) and
    out : (m, blocks, feat), with the sizes of a block.
    """
    return _written(problem)


@memoized
def gradient(problem: RgmsGradient) -> SparseFunc:
    """The derived gradient as a stage-I function, with the parameters of :func:`program`.

    grad : like the result there ; out : like w, or like a

    With `edges`, edge : (nnz,) distinct integers, the element of `out` for each stored one. In
    blocks, elements are in order, w is transposed, (relations, blocks, feat, feat_in), and
    relation : (pieces,) is the relation of each piece.
    """
    of = "a" if problem.edges else "w"
    names = {"grad_out": "grad", f"grad_{of}": "out"}
    func = _written(problem.of, problem.edges)
    return level_by_level(func, of, problem.accumulator, **names)


def _written(problem: Rgms, for_edges: bool = False) -> SparseFunc:
    """The program, or the variant of it from which the gradient for edge values is derived."""
    dtype, b = problem.dtype, "B" * problem.in_blocks
    by_edge, in_pieces = for_edges and not b, for_edges and bool(b)
    elements = {"Y": f"I {b} L", "A": "R I J", "X": f"J {b} K", "W": f"R {b} K L"}
    write = Writer("rgms", problem.idtype)
    write.dense(R="pieces" if in_pieces else "relations")
    write.variable("I", "R", "m", "nnz_rows", "row_ptr", "rows")
    write.variable("J", "I", "n", "nnz", "indptr", "indices")
    write.dense(M="m", N="n", **({b: "blocks"} if b else {}), K="feat_in", L="feat")
    if by_edge:
        write.dense(E="nnz")
        write.buffer("edge", "R I J", problem.idtype)
        elements["A"] = "EDGE[r,i,j]"
    if in_pieces:
        write.dense(RELATION_="relations")
        write.buffer("relation", "R", problem.idtype)
        write.fact("coordinates", buffer="RELATION", axis="RELATION_")
        elements["W"] = "RELATION[r] b l k"
    if problem.weighted:
        write.buffer("a", "E" if by_edge else "R I J", problem.values or dtype)
    else:
        del elements["A"]
    write.buffer("x", f"N {b} K", dtype)
    write.buffer("w", "RELATION_ B L K" if in_pieces else elements["W"], dtype)
    write.buffer("out", f"M {b} L", problem.out or dtype, "Y")
    visit = "rgms", f"R I {b} J K L", "RSSRRS" if b else "RSRRS"
    write.products(*visit, elements, problem.accumulator, sets=not problem.added)
    params = "a x w out edge relation row_ptr rows indptr indices pieces relations m n nnz_rows nnz"
    return write.program(f"{params} blocks feat_in feat")


RGMS = register(
    Operator(
        "rgms", Rgms, "relational gather-matmul-scatter",
        {"x": "n blocks feat_in", "w": "relations blocks feat_in feat", "out": "m blocks feat"},
        True, None, reductions=(), program=program, on="relations",
        options=("feat_in", "weighted", "out_dtype"),
    )
)  # fmt: skip
# For `ops` on a GPU: not accepted by plans by name.
RGMS_WEIGHT = register(
    Operator(
        "rgms_weight", RgmsGradient, "the gradient of rgms for the weights of relations",
        {"x": "n feat_in", "grad": "m feat", "out": "relations feat_in feat"}, True, None,
        reductions=(), program=gradient, on="relations", options=(),
    )
)  # fmt: skip
RGMS_EDGE = register(
    Operator(
        "rgms_edge", RgmsGradient, "the gradient of rgms for the weights of edges",
        {"x": "n feat_in", "grad": "m feat", "w": "relations feat_in feat", "out": "nnz"}, False,
        None, reductions=(), program=gradient, on="relations", options=(),
    )
)  # fmt: skip
