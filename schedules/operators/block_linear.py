"""Linear maps with weights in blocks: Y = X W^T + b, and the gradient of W where it is stored.

Features are contiguous in X (tokens, in) and Y (tokens, out), as torch has them, so a block has its
values by columns: those that a value of X is multiplied with stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, cast, reduced


@dataclass(frozen=True)
class BlockLinear(Problem):
    """Y[t, i] = bias[i] + the sum over the stored j of W[i, j] * X[t, j].

    rows, cols : of a block
    dtype : of Y; X, W and the bias are of the type of the sums
    idtype : of indptr and indices
    bias : whether there is one
    """

    rows: int
    cols: int
    dtype: str = "float32"
    idtype: str = "int32"
    bias: bool = False

    def __post_init__(self) -> None:
        expect_at_least(self, rows=1, cols=1)
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)


@dataclass(frozen=True)
class BlockOuter(Problem):
    """G[i, j] = the sum over all t of Y[t, i] * X[t, j] where an element is stored.

    rows, cols : of a block
    dtype : of X, Y and G, that sums are in
    idtype : of indptr and indices
    """

    rows: int
    cols: int
    dtype: str = "float32"
    idtype: str = "int32"

    def __post_init__(self) -> None:
        expect_at_least(self, rows=1, cols=1)
        expect_one_of(self, dtype=("float32", "float64"), idtype=IDTYPES)


def _declared(name: str, problem: BlockLinear | BlockOuter) -> Writer:
    """A writer with the axes of a problem."""
    rows, cols = problem.rows, problem.cols
    write = Writer(name, problem.idtype)
    write.dense(TOKEN="tokens", IO="m")
    write.variable("JO", "IO", "n", "blocks", "indptr", "indices")
    write.dense(JI=cols, II=rows, IN=f"n * {cols}", OUT=f"m * {rows}")
    return write


@memoized
def linear(problem: BlockLinear) -> SparseFunc:
    """The operator as a stage-I function.

    x : (tokens, n * cols) ; w : (blocks, cols, rows) ; y : (tokens, m * rows), written
    bias : (m * rows,)
    indptr : (m + 1,) ; indices : (blocks,), where rows of blocks have blocks
    """
    dtype, acc, row = problem.dtype, problem.accumulator, f"io * {problem.rows} + ii"
    write = _declared("block_linear", problem)
    write.buffer("x", "TOKEN IN", acc)
    write.buffer("w", "IO JO JI II", acc)
    first = f"T.{dtype}(0)"
    if problem.bias:
        write.buffer("bias_", "OUT", acc, "BIAS")
        first = cast(f"BIAS[{row}]", acc, dtype)
    write.buffer("y", "TOKEN OUT", dtype)
    term = f"W[io, jo, ji, ii] * X[t, jo * {problem.cols} + ji]"
    lines = reduced("sum", f"Y[t, {row}]", term, acc, dtype, first)
    write.visit("linear", "IO TOKEN JO JI II", "SSRRS", lines, "io t jo ji ii")
    return write.program("x w bias_ y indptr indices tokens m n blocks")


@memoized
def outer(problem: BlockOuter) -> SparseFunc:
    """The operator as a stage-I function.

    x : (tokens, n * cols) ; y : (tokens, m * rows) ; g : (blocks, cols, rows), written
    indptr : (m + 1,) ; indices : (blocks,)
    """
    dtype = problem.dtype
    write = _declared("block_outer", problem)
    write.buffer("x", "TOKEN IN", dtype)
    write.buffer("y", "TOKEN OUT", dtype)
    write.buffer("g", "IO JO JI II", dtype)
    term = f"X[t, jo * {problem.cols} + ji] * Y[t, io * {problem.rows} + ii]"
    lines = reduced("sum", "G[io, jo, ji, ii]", term, dtype, dtype)
    write.visit("outer", "IO JO JI TOKEN II", "SSSRS", lines, "io jo ji t ii")
    return write.program("x y g indptr indices tokens m n blocks")
