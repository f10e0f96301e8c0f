"""Programs for the tests of positions, peel and assume."""

from __future__ import annotations

from small import small, text_of

scaled = small("scaled", """
with T.sp_iter([K, T.fuse(I, J)], "SSS", "scaled") as [k, i, j]:
    OUT[k, i, j] = A[i, j, k] * B[j]
""", A="I J K", B="N", OUT="K I J")  # fmt: skip
total = small("total", """
with T.sp_iter([O, T.fuse(I, J)], "SRR", "total") as [o, i, j]:
    with T.init():
        OUT[o] = 0.0
    OUT[o] = OUT[o] + A[i, j] * B[j]
""", "O = T.dense_fixed(1)", A="I J", B="N", OUT="O")  # fmt: skip
twice = small("twice", """
with T.sp_iter([T.fuse(I, J)], "SS", "first") as [i, j]:
    B[i, j] = A[i, j] + 1.0
with T.sp_iter([I, J], "SS", "second") as [i, j]:
    A[i, j] = A[i, j] + 1.0
""", A="I J", B="I J")  # fmt: skip
neighbours = small("neighbours", """
with T.sp_iter([T.fuse(I, J)], "SS", "shifted") as [i, j]:
    B[i, j] = A[i, j + 1]
""", A="I J", B="I J")  # fmt: skip
again = small("again", """
with T.sp_iter([O, I], "SS", "again") as [o, i]:
    with T.init():
        C[i] = 0.0
    C[i] = C[i] + B[o, i]
""", "O = T.dense_fixed(3)", B="O I", C="I")  # fmt: skip
relations = small("relations", """
with T.sp_iter([I, J], "SR", "relations") as [i, j]:
    with T.init():
        OUT[i] = 0.0
    OUT[i] = OUT[i] + W[ETYPE[i, j]]
""", "J = T.sparse_fixed(I, (n, slots), indices)\nR = T.dense_fixed(r)",
    W="R", ETYPE="I J int32", OUT="I")  # fmt: skip
positive = small("positive", """
with T.sp_iter([I, J], "SR", "positive") as [i, j]:
    with T.init():
        OUT[i] = 0.0
    if A[i, j] > 0.0:
        OUT[i] = OUT[i] + A[i, j]
""", A="I J", OUT="I")  # fmt: skip
rows_reduced = small("rows_reduced", """
with T.sp_iter([I, J], "RS", "sums") as [i, j]:
    with T.init():
        B[j] = T.float32(0)
    B[j] = B[j] + A[i, j]
""", A="I J", B="N")  # fmt: skip
two_reads = small("two_reads", """
with T.sp_iter([I, K], "SS", "first") as [i, k]:
    C[i, k] = B[i, k] + B[0, k]
with T.sp_iter([I, K], "SS", "second") as [i, k]:
    D[i, k] = B[i, k]
""", "K = T.dense_fixed(8)", B="I K", C="I K", D="I K")  # fmt: skip
# Y = A X W, as plain loops.
layer = small("layer", """
with T.sp_iter([I, J, K, L], "SRRS", "layer") as [i, j, k, l]:
    with T.init():
        Y[i, l] = 1.0
    Y[i, l] = Y[i, l] + A[i, j] * X[j, k] * W[k, l]
""", "K = T.dense_fixed(4)\nL = T.dense_fixed(6)", A="I J", X="N K", W="K L", Y="I L")  # fmt: skip


# Sums of what each fiber of a tensor of order 4 stores.
SUMS = text_of("sums", """
with T.sp_iter([I, J, K, L], "SSRR", "sums") as [i, j, k, l]:
    with T.init():
        Y[i, j] = 0.0
    Y[i, j] = Y[i, j] + A[i, j, k, l]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
L = T.sparse_variable(K, (q, nnz_l), (l_ptr, l_idx))
""", A="I J K L", Y="I J")  # fmt: skip


# A softmax of rows for each head, in steps.
SOFTMAX = text_of("softmax", """
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
""", "J = T.dense_variable(I, (nnz, nnz), indptr)\nH = T.dense_fixed(heads)",
    X="I J H", Y="I J H")  # fmt: skip
