"""The measured functions, as script."""

from __future__ import annotations

SPMM = """
@T.prim_func
def spmm(
    a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
) -> None:
    I = T.dense_fixed(m, "int32")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_ = T.dense_fixed(n, "int32")
    K = T.dense_fixed(feat, "int32")
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
"""

# Scores, softmax over the stored elements of a row, and product.
ATTENTION = """
@T.prim_func
def attention(
    q: T.handle, k: T.handle, v: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
) -> None:
    I = T.dense_fixed(m, "int32")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_ = T.dense_fixed(n, "int32")
    F = T.dense_fixed(feat, "int32")
    Q = T.match_sparse_buffer(q, (I, F), "float32")
    K = T.match_sparse_buffer(k, (J_, F), "float32")
    V = T.match_sparse_buffer(v, (J_, F), "float32")
    OUT = T.match_sparse_buffer(out, (I, F), "float32")
    S = T.alloc_sparse_buffer((I, J), "float32")
    P = T.alloc_sparse_buffer((I, J), "float32")
    TOP = T.alloc_sparse_buffer((I,), "float32")
    TOTAL = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I, J, F], "SSR", "scores") as [i, j, f]:
        with T.init():
            S[i, j] = 0.0
        S[i, j] = S[i, j] + Q[i, f] * K[j, f]
    with T.sp_iter([I], "S", "softmax") as [i]:
        with T.sp_iter([J], "R", "top") as [j]:
            with T.init():
                TOP[i] = T.min_value("float32")
            TOP[i] = T.max(TOP[i], S[i, j])
        with T.sp_iter([J], "R", "total") as [j]:
            with T.init():
                TOTAL[i] = 0.0
            TOTAL[i] = TOTAL[i] + T.exp(S[i, j] - TOP[i])
        with T.sp_iter([J], "S", "divide") as [j]:
            P[i, j] = T.exp(S[i, j] - TOP[i]) / TOTAL[i]
    with T.sp_iter([I, J, F], "SRS", "product") as [i, j, f]:
        with T.init():
            OUT[i, f] = 0.0
        OUT[i, f] = OUT[i, f] + P[i, j] * V[j, f]
"""

# OUT[i, j] = X[i] . Y[j] where something is stored.
SDDMM = """
@T.prim_func
def sddmm(
    x: T.handle, y: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
) -> None:
    I = T.dense_fixed(m, "int32")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_ = T.dense_fixed(n, "int32")
    K = T.dense_fixed(feat, "int32")
    X = T.match_sparse_buffer(x, (I, K), "float32")
    Y = T.match_sparse_buffer(y, (J_, K), "float32")
    OUT = T.match_sparse_buffer(out, (I, J), "float32")
    with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
        with T.init():
            OUT[i, j] = 0.0
        OUT[i, j] = OUT[i, j] + X[i, k] * Y[j, k]
"""

# Y[v] = sum over the edges v to e, and those e to w, of X[w].
TWO_HOP = """
@T.prim_func
def two_hop(
    x: T.handle, y: T.handle, there_ptr: T.handle, there_idx: T.handle, back_ptr: T.handle,
    back_idx: T.handle, m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
) -> None:
    V = T.dense_fixed(m, "int32")
    E = T.dense_fixed(n, "int32")
    VE = T.sparse_variable(V, (n, nnz), (there_ptr, there_idx), "int32")
    EW = T.sparse_variable(E, (m, nnz), (back_ptr, back_idx), "int32")
    F = T.dense_fixed(feat, "int32")
    X = T.match_sparse_buffer(x, (V, F), "float32")
    Y = T.match_sparse_buffer(y, (V, F), "float32")
    with T.sp_iter([V, VE, T.attach(EW, VE), F], "SRRS", "two_hop") as [v, e, w, f]:
        with T.init():
            Y[v, f] = 0.0
        Y[v, f] = Y[v, f] + X[w, f]
"""

# Y[i] = sum over relations r and neighbours j of A[r, i, j] X[j] W[r].
RELATIONAL = """
@T.prim_func
def relational(
    a: T.handle, x: T.handle, w: T.handle, y: T.handle, i_ptr: T.handle, i_idx: T.handle,
    j_ptr: T.handle, j_idx: T.handle, relations: T.int32, m: T.int32, n: T.int32, nnz_i: T.int32,
    nnz_j: T.int32, feat_in: T.int32, feat: T.int32,
) -> None:
    R = T.dense_fixed(relations, "int32")
    I = T.sparse_variable(R, (m, nnz_i), (i_ptr, i_idx), "int32")
    J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx), "int32")
    I_ = T.dense_fixed(m, "int32")
    J_ = T.dense_fixed(n, "int32")
    K = T.dense_fixed(feat_in, "int32")
    L = T.dense_fixed(feat, "int32")
    A = T.match_sparse_buffer(a, (R, I, J), "float32")
    X = T.match_sparse_buffer(x, (J_, K), "float32")
    W = T.match_sparse_buffer(w, (R, K, L), "float32")
    Y = T.match_sparse_buffer(y, (I_, L), "float32")
    with T.sp_iter([R, I, J, K, L], "RSRRS", "relational") as [r, i, j, k, l]:
        with T.init():
            Y[i, l] = 0.0
        Y[i, l] = Y[i, l] + A[r, i, j] * X[j, k] * W[r, k, l]
"""

# A format as a user describes it: two rows together.
ROW_PAIRS = """
@T.prim_func
def row_pairs(
    a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
) -> None:
    IO = T.dense_fixed(m)
    J2 = T.sparse_variable(IO, (n, nnz), (indptr, indices))
    II = T.dense_fixed(2)
    A = T.match_sparse_buffer(a, (IO, J2, II), "float32")
"""
