"""Linear maps with weights in blocks: Y = X W^T + b, and the gradient of W where it is stored.

Features are contiguous in X (tokens, in) and Y (tokens, out), as torch has them, so a block has its
values by columns: those that a value of X is multiplied with stand side by side.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.problems import Problem, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc


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


@memoized
def linear(problem: BlockLinear) -> SparseFunc:
    """The operator as a stage-I function.

    x : (tokens, n * cols) ; w : (blocks, cols, rows) ; y : (tokens, m * rows), written
    bias : (m * rows,)
    indptr : (m + 1,) ; indices : (blocks,), where rows of blocks have blocks
    """
    dtype, idtype, rows, cols = problem.dtype, problem.idtype, problem.rows, problem.cols
    acc, bias, size = problem.accumulator, problem.bias, getattr(T, idtype)

    @T.prim_func
    def block_linear(
        x: T.handle, w: T.handle, bias_: T.handle, y: T.handle, indptr: T.handle,
        indices: T.handle, tokens: size, m: size, n: size, blocks: size,
    ) -> None:  # fmt: skip
        TOKEN = T.dense_fixed(tokens, idtype)
        IO = T.dense_fixed(m, idtype)
        JO = T.sparse_variable(IO, (n, blocks), (indptr, indices), idtype)
        JI = T.dense_fixed(cols, idtype)
        II = T.dense_fixed(rows, idtype)
        IN = T.dense_fixed(n * cols, idtype)
        OUT = T.dense_fixed(m * rows, idtype)
        X = T.match_sparse_buffer(x, (TOKEN, IN), acc)
        W = T.match_sparse_buffer(w, (IO, JO, JI, II), acc)
        if bias:
            BIAS = T.match_sparse_buffer(bias_, (OUT,), acc)
        Y = T.match_sparse_buffer(y, (TOKEN, OUT), dtype)
        with T.sp_iter([IO, TOKEN, JO, JI, II], "SSRRS", "linear") as [io, t, jo, ji, ii]:
            with T.init():
                Y[t, io * rows + ii] = (
                    T.cast(BIAS[io * rows + ii], dtype) if bias else T.cast(0.0, dtype)
                )
            Y[t, io * rows + ii] = T.cast(
                T.cast(Y[t, io * rows + ii], acc) + W[io, jo, ji, ii] * X[t, jo * cols + ji], dtype
            )

    return with_parameters(block_linear, {"bias_": not bias})


@memoized
def outer(problem: BlockOuter) -> SparseFunc:
    """The operator as a stage-I function.

    x : (tokens, n * cols) ; y : (tokens, m * rows) ; g : (blocks, cols, rows), written
    indptr : (m + 1,) ; indices : (blocks,)
    """
    dtype, idtype, rows, cols = problem.dtype, problem.idtype, problem.rows, problem.cols
    size = getattr(T, idtype)

    @T.prim_func
    def block_outer(
        x: T.handle, y: T.handle, g: T.handle, indptr: T.handle, indices: T.handle,
        tokens: size, m: size, n: size, blocks: size,
    ) -> None:  # fmt: skip
        TOKEN = T.dense_fixed(tokens, idtype)
        IO = T.dense_fixed(m, idtype)
        JO = T.sparse_variable(IO, (n, blocks), (indptr, indices), idtype)
        JI = T.dense_fixed(cols, idtype)
        II = T.dense_fixed(rows, idtype)
        IN = T.dense_fixed(n * cols, idtype)
        OUT = T.dense_fixed(m * rows, idtype)
        X = T.match_sparse_buffer(x, (TOKEN, IN), dtype)
        Y = T.match_sparse_buffer(y, (TOKEN, OUT), dtype)
        G = T.match_sparse_buffer(g, (IO, JO, JI, II), dtype)
        with T.sp_iter([IO, JO, JI, TOKEN, II], "SSSRS", "outer") as [io, jo, ji, t, ii]:
            with T.init():
                G[io, jo, ji, ii] = T.cast(0.0, dtype)
            G[io, jo, ji, ii] = G[io, jo, ji, ii] + X[t, jo * cols + ji] * Y[t, io * rows + ii]

    return with_parameters(block_outer, {})
