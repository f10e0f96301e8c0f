"""Sparse matrices in CSR: products, sampled products, sums."""

from __future__ import annotations

import numpy as np

from small import making

from .common import (
    CASES,
    FEATURES,
    Arrays,
    Program,
    csr,
    fill,
    garbage,
    mask2,
    parents_of,
    scatter_sum,
    values,
)


def csr_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """`a`, `indptr`, `indices`, `m`, `n`, `nnz` of a random CSR matrix."""
    mask = mask2(rng, case)
    indptr, indices = csr(mask, idtype)
    m, n = mask.shape
    return {
        "a": values(rng, len(indices), dtype),
        "indptr": indptr,
        "indices": indices,
        "m": m,
        "n": n,
        "nnz": len(indices),
    }


# y = A x.
make_spmv = making("spmv", """
with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j] * X[j]
""", "J_ = T.dense_fixed(n)", A="I J", X="J_", Y="I")  # fmt: skip


def spmv_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmv."""
    args = csr_inputs(rng, case, dtype, idtype)
    return {**args, "x": fill(rng, case, args["n"], dtype), "y": garbage(args["m"], dtype)}


def spmv_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products over the stored elements."""
    terms = args["a"].astype(np.float64) * args["x"][args["indices"]]
    return {"y": scatter_sum(args["m"], parents_of(args["indptr"]), terms)}


# C = A B, as in the paper.
make_spmm = making("spmm", """
with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", "I\nJ\nJ_ = T.dense_fixed(n)\nK", A="I J", B="J_ K", C="I K")  # fmt: skip


# C = A B with every column visited: A[i, j] is searched, and zero where it is absent.
make_spmm_search = making("spmm_search", """
with T.sp_iter([I, J_, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", "I\nJ\nJ_ = T.dense_fixed(n)\nK", A="I J", B="J_ K", C="I K")  # fmt: skip


def spmm_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm."""
    args, feat = csr_inputs(rng, case, dtype, idtype), FEATURES[case]
    return {
        **args,
        "b": fill(rng, case, (args["n"], feat), dtype),
        "c": garbage((args["m"], feat), dtype),
        "feat": feat,
    }


def spmm_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products over the stored elements."""
    terms = args["a"].astype(np.float64)[:, None] * args["b"][args["indices"]]
    return {"c": scatter_sum(args["c"].shape, parents_of(args["indptr"]), terms)}


def spmm_search_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The dense product: absent elements are zeros, and zero times infinity is NaN."""
    dense = np.zeros((args["m"], args["n"]))
    dense[parents_of(args["indptr"]), args["indices"]] = args["a"]
    return {"c": (dense[:, :, None] * args["b"].astype(np.float64)).sum(axis=1)}


# OUT[i, j] = A[i, j] * (X Y^T)[i, j] where A is stored.
make_sddmm = making("sddmm", """
with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[i, j] * X[i, k] * Y[j, k]
""", "I\nJ\nJ_ = T.dense_fixed(n)\nK", A="I J", X="I K", Y="J_ K", OUT="I J")  # fmt: skip


# sddmm with one loop over the non-zeros.
make_sddmm_fused = making("sddmm_fused", """
with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[i, j] * X[i, k] * Y[j, k]
""", "I\nJ\nJ_ = T.dense_fixed(n)\nK", A="I J", X="I K", Y="J_ K", OUT="I J")  # fmt: skip


def sddmm_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of sddmm."""
    args, feat = csr_inputs(rng, case, dtype, idtype), FEATURES[case]
    return {
        **args,
        "x": values(rng, (args["m"], feat), dtype),
        "y": fill(rng, case, (args["n"], feat), dtype),
        "out": garbage(args["nnz"], dtype),
        "feat": feat,
    }


def sddmm_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """A row of X times a row of Y for each stored element."""
    a, x, y = (args[name].astype(np.float64) for name in "axy")
    left, right = x[parents_of(args["indptr"])], y[args["indices"]]
    return {"out": (a[:, None] * left * right).sum(axis=1)}


# OUT[i, j] = exp(A[i, j]) * D[i, j] + 0.5 on the pattern of A; D is dense.
make_elementwise = making("elementwise", """
with T.sp_iter([I, J], "SS", "elementwise") as [i, j]:
    OUT[i, j] = T.exp(A[i, j]) * D[i, j] + T.cast(0.5, dtype)
""", "J_ = T.dense_fixed(n)", A="I J", D="I J_", OUT="I J")  # fmt: skip


def elementwise_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of elementwise."""
    args = csr_inputs(rng, case, dtype, idtype)
    dense = fill(rng, case, (args["m"], args["n"]), dtype)
    return {**args, "d": dense, "out": garbage(args["nnz"], dtype)}


def elementwise_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The same on arrays."""
    dense = args["d"].astype(np.float64)[parents_of(args["indptr"]), args["indices"]]
    return {"out": np.exp(args["a"].astype(np.float64)) * dense + 0.5}


# Y[i] = sum of row i.
make_row_sum = making("row_sum", """
with T.sp_iter([I, J], "SR", "row_sum") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j]
""", A="I J", Y="I")  # fmt: skip


def row_sum_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of row_sum."""
    args = csr_inputs(rng, case, dtype, idtype)
    if case == "nonfinite":
        args["a"][-1] = np.inf
    return {**args, "y": garbage(args["m"], dtype)}


def row_sum_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of the stored elements of each row."""
    return {"y": scatter_sum(args["m"], parents_of(args["indptr"]), args["a"])}


PROGRAMS = [
    Program("spmv", make_spmv, spmv_inputs, spmv_oracle, ("y",)),
    Program("spmm", make_spmm, spmm_inputs, spmm_oracle, ("c",)),
    Program("spmm_search", make_spmm_search, spmm_inputs, spmm_search_oracle, ("c",)),
    Program("sddmm", make_sddmm, sddmm_inputs, sddmm_oracle, ("out",)),
    Program("sddmm_fused", make_sddmm_fused, sddmm_inputs, sddmm_oracle, ("out",)),
    Program("elementwise", make_elementwise, elementwise_inputs, elementwise_oracle, ("out",)),
    Program("row_sum", make_row_sum, row_sum_inputs, row_sum_oracle, ("y",), cases=CASES),
]
