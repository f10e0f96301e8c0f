"""Gradients of relational gather-matmul-scatter for the weights of relations and of edges:

dW[r, k, l] = sum over i, j of A[r, i, j] * X[j, k] * dY[i, l]
dA[r, i, j] = sum over k, l of X[j, k] * W[r, k, l] * dY[i, l]

The gradient of X is the operator itself over the transposed pattern. (SparseTIR, section 4.4.)

Rows of a relation come in chunks. What a chunk shares, sums of rows of X or rows of dY times W[r],
is in a workspace of the chunk's size, so that nothing has a row of features for each element, or
for each row of each relation. Relations come in pieces, each of chunks of one relation.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.arguments import expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.problems import Problem, memoized, with_parameters
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule.facts import assume


@dataclass(frozen=True)
class RgmsBackward(Problem):
    """The part of the operator's arguments that a kernel is compiled for.

    feat_in, feat : of X and of Y, of a block
    chunk : rows of a relation in a chunk, at most
    edges : the gradient of A, instead of that of W
    dtype : of X, the gradient of Y and W; all else is in the type of sums, float32 (float64 for
        float64)
    idtype : of the index arrays
    weighted : whether elements have values; that of A asks for none
    """

    feat_in: int
    feat: int
    chunk: int = 32
    edges: bool = False
    dtype: str = "float32"
    idtype: str = "int32"
    weighted: bool = True

    def __post_init__(self) -> None:
        expect_at_least(self, feat_in=1, feat=1, chunk=1)
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)


@memoized
def program(problem: RgmsBackward) -> SparseFunc:
    """The operator as a stage-I function over rows in chunks.

    x : (n, blocks, feat_in) ; grad : (m, blocks, feat)
    a : (nnz,), absent where the problem is not weighted
    dw : (pieces, blocks, feat_in, feat), written: sums of each piece
    or w : (relations, blocks, feat, feat_in), transposed, and relation : (pieces,) of each piece;
    da : (nnz,), written
    piece_ptr : (pieces + 1,) into chunks ; chunk_ptr : (chunks + 1,) into rows
    rows : (nnz_rows,) of the result ; indptr : (nnz_rows + 1,) ; indices : (nnz,) columns

    Features are in blocks, each multiplied by what W has for it on its diagonal; a whole W has one.
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    size, weighted, edges = getattr(T, idtype), problem.weighted, problem.edges
    zero = tirx.const(0.0, acc)

    @T.prim_func
    def rgms_backward(
        a: T.handle, x: T.handle, w: T.handle, grad: T.handle, dw: T.handle, da: T.handle,
        relation: T.handle, piece_ptr: T.handle, chunk_ptr: T.handle, rows: T.handle,
        indptr: T.handle, indices: T.handle, relations: size, pieces: size, chunks: size,
        nnz_rows: size, nnz: size, m: size, n: size, blocks: size,
    ) -> None:  # fmt: skip
        P = T.dense_fixed(pieces, idtype)
        C = T.dense_variable(P, (chunks, chunks), piece_ptr, idtype)
        I = T.dense_variable(C, (problem.chunk, nnz_rows), chunk_ptr, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        B = T.dense_fixed(blocks, idtype)
        PLACE = T.dense_fixed(problem.chunk, idtype)
        K = T.dense_fixed(problem.feat_in, idtype)
        L = T.dense_fixed(problem.feat, idtype)
        X = T.match_sparse_buffer(x, (N, B, K), dtype)
        G = T.match_sparse_buffer(grad, (M, B, L), dtype)
        ROW = T.match_sparse_buffer(rows, (P, C, I), idtype)
        if edges:
            R = T.dense_fixed(relations, idtype)
            W = T.match_sparse_buffer(w, (R, B, L, K), dtype)
            DA = T.match_sparse_buffer(da, (P, C, I, J), acc)
            REL = T.match_sparse_buffer(relation, (P,), idtype)
            TURNED = T.alloc_sparse_buffer((PLACE, K), acc, "local")
            with T.sp_iter([P, C], "SS", "chunks") as [p, c]:
                with T.sp_iter([I, J], "SS", "clear") as [i, j]:
                    DA[p, c, i, j] = zero
                with T.sp_iter([B], "R", "blocks") as [b]:
                    with T.sp_iter([PLACE, K], "SS", "start") as [i, k]:
                        TURNED[i, k] = zero
                    with T.sp_iter([I, K, L], "SSR", "turned") as [i, k, l]:
                        g_il = T.meta_var(T.cast(G[ROW[p, c, i], b, l], acc))
                        TURNED[i, k] = TURNED[i, k] + T.cast(W[REL[p], b, l, k], acc) * g_il
                    with T.sp_iter([I, J, K], "SSR", "dots") as [i, j, k]:
                        DA[p, c, i, j] = DA[p, c, i, j] + T.cast(X[j, b, k], acc) * TURNED[i, k]
        else:
            if weighted:
                A = T.match_sparse_buffer(a, (P, C, I, J), acc)
            DW = T.match_sparse_buffer(dw, (P, B, K, L), acc)
            SUM = T.alloc_sparse_buffer((PLACE, K), acc, "local")
            with T.sp_iter([P, B], "SS", "pieces") as [p, b]:
                with T.sp_iter([K, L], "SS", "clear") as [k, l]:
                    DW[p, b, k, l] = zero
                with T.sp_iter([C], "R", "chunks") as [c]:
                    with T.sp_iter([PLACE, K], "SS", "start") as [i, k]:
                        SUM[i, k] = zero
                    with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
                        x_jk = T.meta_var(T.cast(X[j, b, k], acc))
                        SUM[i, k] = SUM[i, k] + (A[p, c, i, j] * x_jk if weighted else x_jk)
                    with T.sp_iter([K, L, I], "SSR", "products") as [k, l, i]:
                        g_il = T.meta_var(T.cast(G[ROW[p, c, i], b, l], acc))
                        DW[p, b, k, l] = DW[p, b, k, l] + SUM[i, k] * g_il

    of_edges = dict.fromkeys(("w", "da", "relation", "relations"), not edges)
    unused = {"a": edges or not weighted, "dw": edges, **of_edges}
    func = with_parameters(rgms_backward, unused)
    func, _ = assume(func, "coordinates", buffer="ROW", axis="M")
    return assume(func, "coordinates", buffer="REL", axis="R")[0] if edges else func
