"""Linear maps with blocked weights: Y = X W^T + b, and the gradient of W where it is stored.

Features are contiguous in X (tokens, in) and Y (tokens, out), as in torch, so a block stores its
values by columns: those that are multiplied with one value of X are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.gradients import level_by_level
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, cast, reduced


@dataclass(frozen=True)
class BlockLinear(Problem):
    """Y[t, i] = bias[i] + the sum over the stored j of W[i, j] * X[t, j].

    rows, cols : size of a block
    dtype : the type of Y; X, W and the bias have the type of the sums
    idtype : the type of indptr and indices
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


class BlockOuter(BlockLinear):
    """The gradient G of W where it stores elements, in the type of the sums.

    G[i, j] = the sum over all t of Y[t, i] * X[t, j]
    """


@memoized
def program(problem: BlockLinear) -> SparseFunc:
    """The operator as a stage-I function.

    x : (tokens, n * cols) ; w : (blocks, cols, rows) ; y : (tokens, m * rows), written
    bias_ : (m * rows,)
    indptr : (m + 1,) ; indices : (blocks,), the stored blocks of each row of blocks

    For the gradient x and y are inputs, and g, like w, is written.
    """
    dtype, acc, cols = problem.dtype, problem.accumulator, problem.cols
    row = f"io * {problem.rows} + ii"
    write = Writer("block_linear", problem.idtype)
    write.dense(TOKEN="tokens", IO="m")
    write.variable("JO", "IO", "n", "blocks", "indptr", "indices")
    write.dense(JI=cols, II=problem.rows, IN=f"n * {cols}", OUT=f"m * {problem.rows}")
    write.buffer("x", "TOKEN IN", acc)
    write.buffer("w", "IO JO JI II", acc)
    first = f"T.{dtype}(0)"
    if problem.bias:
        write.buffer("bias_", "OUT", acc, "BIAS")
        first = cast(f"BIAS[{row}]", acc, dtype)
    write.buffer("y", "TOKEN OUT", dtype)
    term = f"W[io, jo, ji, ii] * X[t, jo * {cols} + ji]"
    lines = reduced("sum", f"Y[t, {row}]", term, acc, dtype, first)
    write.visit("linear", "IO TOKEN JO JI II", "SSRRS", lines, "io t jo ji ii")
    func = write.program("x w bias_ y indptr indices tokens m n blocks")
    if isinstance(problem, BlockOuter):
        return level_by_level(func, "w", acc, grad_y="y", grad_w="g")
    return func
