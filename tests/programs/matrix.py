"""Sparse matrices in CSR: products, sampled products, sums."""

from __future__ import annotations

import numpy as np

from .common import (
    Arrays,
    csr_arrays,
    mask2,
    product,
    program,
    rows_of,
    scatter_sum,
    values,
)  # fmt: skip


def csr_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """`a`, `indptr`, `indices`, `m`, `n`, `nnz` of a random CSR matrix."""
    arrays = csr_arrays(mask2(rng, case), idtype)
    return {**arrays, "a": values(rng, arrays["nnz"], dtype)}


def csr_product(args: Arrays) -> np.ndarray:
    return product(args, rows_of(args), args["indices"])


def _searched_product(args: Arrays) -> np.ndarray:
    """The dense product: absent elements are zeros, and zero times infinity is NaN."""
    dense = np.zeros((args["m"], args["n"]))
    dense[rows_of(args), args["indices"]] = args["a"]
    return (dense[:, :, None] * args["b"]).sum(axis=1)


def _sampled_product(args: Arrays) -> np.ndarray:
    terms = args["x"][rows_of(args)] * args["y"][args["indices"]]
    return (args["a"][:, None] * terms).sum(axis=1)


def _infinite(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args = csr_inputs(rng, case, dtype, idtype)
    if case == "nonfinite":
        args["a"][-1] = np.inf
    return args


ALL = "I\nJ\nJ_ = T.dense_fixed(n)\nK"
PROGRAMS = [
    # y = A x.
    program("spmv", """
with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j] * X[j]
""", "J_ = T.dense_fixed(n)", csr_inputs,
        lambda args: scatter_sum(args["m"], rows_of(args), args["a"] * args["x"][args["indices"]]),
        A="I J", X="J_", Y="I", x="fill n", y="out m"),
    # C = A B, as in the paper.
    program("spmm", """
with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", ALL, csr_inputs, csr_product, A="I J", B="J_ K", C="I K", b="fill n feat", c="out m feat"),
    # C = A B with every column visited: A[i, j] is searched, and zero where it is absent.
    program("spmm_search", """
with T.sp_iter([I, J_, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", ALL, csr_inputs, _searched_product, A="I J", B="J_ K", C="I K", b="fill n feat",
        c="out m feat"),
    # OUT[i, j] = A[i, j] * (X Y^T)[i, j] where A is stored.
    program("sddmm", """
with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[i, j] * X[i, k] * Y[j, k]
""", ALL, csr_inputs, _sampled_product, A="I J", X="I K", Y="J_ K", OUT="I J",
        x="values m feat", y="fill n feat", out="out nnz"),
    # sddmm with one loop over the non-zeros.
    program("sddmm_fused", """
with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[i, j] * X[i, k] * Y[j, k]
""", ALL, csr_inputs, _sampled_product, A="I J", X="I K", Y="J_ K", OUT="I J",
        x="values m feat", y="fill n feat", out="out nnz"),
    # OUT[i, j] = exp(A[i, j]) * D[i, j] + 0.5 on the pattern of A; D is dense.
    program("elementwise", """
with T.sp_iter([I, J], "SS", "elementwise") as [i, j]:
    OUT[i, j] = T.exp(A[i, j]) * D[i, j] + T.cast(0.5, dtype)
""", "J_ = T.dense_fixed(n)", csr_inputs,
        lambda args: np.exp(args["a"]) * args["d"][rows_of(args), args["indices"]] + 0.5,
        A="I J", D="I J_", OUT="I J", d="fill m n", out="out nnz"),
    # Y[i] = sum of row i.
    program("row_sum", """
with T.sp_iter([I, J], "SR", "row_sum") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j]
""", "", _infinite, lambda args: scatter_sum(args["m"], rows_of(args), args["a"]),
        A="I J", Y="I", y="out m"),
]  # fmt: skip
