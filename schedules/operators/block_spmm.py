"""Sparse times dense where the matrices of all heads of a batch store the same blocks.

OUT[h, io, ii, k] = sum over the blocks jo of row io, and over ji, of A[h, io, jo, ii, ji] *
B[h, jo, ji, k]: weights of attention with a mask in blocks, times values. (SparseTIR, section
4.3.1.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.gradients import level_by_level
from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer


@dataclass(frozen=True)
class BlockSpmm(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    rows, cols : size of a block
    dtype : the type of A, B and OUT; sums are float32 (float64 for float64)
    """

    rows: int = 32
    cols: int = 32
    dtype: str = "float16"

    def __post_init__(self) -> None:
        expect_at_least(self, rows=1, cols=1)
        expect_one_of(self, dtype=DTYPES)


@dataclass(frozen=True)
class BlockSddmm(BlockSpmm):
    """The gradient of A, for a constant number of features: dense times dense where a matrix stores
    blocks, such as scores of attention with a blocked mask, and gradients of blocked weights.
    """

    feat: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_at_least(self, feat=1)


@memoized
def program(problem: BlockSpmm) -> SparseFunc:
    """The operator as a stage-I function.

    a : (heads * blocks, rows, cols), by heads, then in the order of the stored blocks
    b : (heads, nb, cols, feat) ; out : (heads, mb, rows, feat)
    indptr : (mb + 1,) ; indices : (blocks,) columns of blocks, each once in a row

    The gradient takes x, like out, and y, like b, and writes out, like a.
    """
    dtype = problem.dtype
    feat = problem.feat if isinstance(problem, BlockSddmm) else "feat"
    write = Writer("block_spmm")
    write.dense(H="heads", IO="mb")
    write.variable("JO", "IO", "nb", "blocks", "indptr", "indices")
    write.dense(II=problem.rows, JI=problem.cols, NO="nb", K=feat)
    write.buffer("a", "H IO JO II JI", dtype)
    write.buffer("b", "H NO JI K", dtype)
    write.buffer("out", "H IO II K", dtype)
    elements = {"OUT": "H IO II K", "A": "H IO JO II JI", "B": "H JO JI K"}
    write.products("spmm", "H IO JO II JI K", "SSRSRS", elements, problem.accumulator)
    func = write.program("a b out indptr indices heads mb nb blocks feat")
    if isinstance(problem, BlockSddmm):
        return level_by_level(func, "a", dtype, grad_out="x", b="y", grad_a="out")
    return func
