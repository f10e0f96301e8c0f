"""Programs for the tests of positions, peel and assume; import sparsetir before it."""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from tvm.script import sparse_tir as T


@T.prim_func
def scaled(
    a: T.handle, b: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J, K), "float32")
    B = T.match_sparse_buffer(b, (N,), "float32")
    OUT = T.match_sparse_buffer(out, (K, I, J), "float32")
    with T.sp_iter([K, T.fuse(I, J)], "SSS", "scaled") as [k, i, j]:
        OUT[k, i, j] = A[i, j, k] * B[j]


@T.prim_func
def total(
    a: T.handle, b: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    O = T.dense_fixed(1)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (N,), "float32")
    OUT = T.match_sparse_buffer(out, (O,), "float32")
    with T.sp_iter([O, T.fuse(I, J)], "SRR", "total") as [o, i, j]:
        with T.init():
            OUT[o] = 0.0
        OUT[o] = OUT[o] + A[i, j] * B[j]


@T.prim_func
def twice(
    a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    with T.sp_iter([T.fuse(I, J)], "SS", "first") as [i, j]:
        B[i, j] = A[i, j] + 1.0
    with T.sp_iter([I, J], "SS", "second") as [i, j]:
        A[i, j] = A[i, j] + 1.0


@T.prim_func
def neighbours(
    a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    with T.sp_iter([T.fuse(I, J)], "SS", "shifted") as [i, j]:
        B[i, j] = A[i, j + 1]


@T.prim_func
def again(b: T.handle, c: T.handle, n: T.int32) -> None:
    O = T.dense_fixed(3)
    I = T.dense_fixed(n)
    B = T.match_sparse_buffer(b, (O, I), "float32")
    C = T.match_sparse_buffer(c, (I,), "float32")
    with T.sp_iter([O, I], "SS", "again") as [o, i]:
        with T.init():
            C[i] = 0.0
        C[i] = C[i] + B[o, i]


@T.prim_func
def relations(
    w: T.handle, etype: T.handle, out: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, slots: T.int32, r: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_fixed(I, (n, slots), indices)
    R = T.dense_fixed(r)
    W = T.match_sparse_buffer(w, (R,), "float32")
    ETYPE = T.match_sparse_buffer(etype, (I, J), "int32")
    OUT = T.match_sparse_buffer(out, (I,), "float32")
    with T.sp_iter([I, J], "SR", "relations") as [i, j]:
        with T.init():
            OUT[i] = 0.0
        OUT[i] = OUT[i] + W[ETYPE[i, j]]


@T.prim_func
def positive(
    a: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    OUT = T.match_sparse_buffer(out, (I,), "float32")
    with T.sp_iter([I, J], "SR", "positive") as [i, j]:
        with T.init():
            OUT[i] = 0.0
        if A[i, j] > 0.0:
            OUT[i] = OUT[i] + A[i, j]


@T.prim_func
def rows_reduced(
    a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32,
    nnz: T.int32,
) -> None:  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (N,), "float32")
    with T.sp_iter([I, J], "RS", "sums") as [i, j]:
        with T.init():
            B[j] = T.float32(0)
        B[j] = B[j] + A[i, j]


@T.prim_func
def two_reads(b: T.handle, c: T.handle, d: T.handle, m: T.int32) -> None:
    I = T.dense_fixed(m)
    K = T.dense_fixed(8)
    B = T.match_sparse_buffer(b, (I, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    D = T.match_sparse_buffer(d, (I, K), "float32")
    with T.sp_iter([I, K], "SS", "first") as [i, k]:
        C[i, k] = B[i, k] + B[0, k]
    with T.sp_iter([I, K], "SS", "second") as [i, k]:
        D[i, k] = B[i, k]


@T.prim_func
def layer(
    a: T.handle, x: T.handle, w: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
) -> None:  # fmt: skip
    """Y = A X W, as plain loops."""
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    K = T.dense_fixed(4)
    L = T.dense_fixed(6)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (N, K), "float32")
    W = T.match_sparse_buffer(w, (K, L), "float32")
    Y = T.match_sparse_buffer(y, (I, L), "float32")
    with T.sp_iter([I, J, K, L], "SRRS", "layer") as [i, j, k, l]:
        with T.init():
            Y[i, l] = 1.0
        Y[i, l] = Y[i, l] + A[i, j] * X[j, k] * W[k, l]


# Sums of what each fiber of a tensor of order 4 stores.
SUMS = """
@T.prim_func
def sums(
    a: T.handle, y: T.handle, j_ptr: T.handle, j_idx: T.handle, k_ptr: T.handle, k_idx: T.handle,
    l_ptr: T.handle, l_idx: T.handle, m: T.int32, n: T.int32, p: T.int32, q: T.int32,
    nnz_j: T.int32, nnz_k: T.int32, nnz_l: T.int32,
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
    K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
    L = T.sparse_variable(K, (q, nnz_l), (l_ptr, l_idx))
    A = T.match_sparse_buffer(a, (I, J, K, L), "float32")
    Y = T.match_sparse_buffer(y, (I, J), "float32")
    with T.sp_iter([I, J, K, L], "SSRR", "sums") as [i, j, k, l]:
        with T.init():
            Y[i, j] = 0.0
        Y[i, j] = Y[i, j] + A[i, j, k, l]
"""


# A softmax of rows for each head, in steps.
SOFTMAX = """
@T.prim_func
def softmax(
    x: T.handle, y: T.handle, indptr: T.handle, m: T.int32, nnz: T.int32, heads: T.int32
) -> None:
    I = T.dense_fixed(m)
    J = T.dense_variable(I, (nnz, nnz), indptr)
    H = T.dense_fixed(heads)
    X = T.match_sparse_buffer(x, (I, J, H), "float32")
    Y = T.match_sparse_buffer(y, (I, J, H), "float32")
    TOP = T.alloc_sparse_buffer((), "float32", "local")
    TOTAL = T.alloc_sparse_buffer((), "float32", "local")
    with T.sp_iter([I, H], "SS", "rows") as [i, h]:
        with T.sp_iter([J], "R", "top") as [j]:
            with T.init():
                TOP[()] = T.min_value("float32")
            TOP[()] = T.max(TOP[()], X[i, j, h])
        with T.sp_iter([J], "S", "powers") as [j]:
            Y[i, j, h] = T.exp(X[i, j, h] - TOP[()])
        with T.sp_iter([J], "R", "total") as [j]:
            with T.init():
                TOTAL[()] = T.float32(0.0)
            TOTAL[()] = TOTAL[()] + Y[i, j, h]
        TOTAL[()] = T.float32(1.0) / TOTAL[()]
        with T.sp_iter([J], "S", "divide") as [j]:
            Y[i, j, h] = Y[i, j, h] * TOTAL[()]
"""
