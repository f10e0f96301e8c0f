"""Ragged tensors (dense_variable axes): sums, fused axes, batched products."""

from __future__ import annotations

import numpy as np

from small import making

from .common import (
    Arrays,
    Program,
    compress,
    finite,
    garbage,
    parents_of,
    ragged,
    scatter_sum,
    values,
)

ROWS = {"single_row": 1}


def longest(lengths: np.ndarray) -> int:
    """The longest row, one where there is none."""
    return int(lengths.max(initial=1))


# Y[i] = sum of ragged row i.
make_ragged_sum = making("ragged_sum", """
with T.sp_iter([I, J], "SR", "ragged_sum") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j]
""", "J = T.dense_variable(I, (n, nnz), indptr)", A="I J", Y="I")  # fmt: skip


def ragged_sum_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ragged_sum."""
    lengths = ragged(rng, case, ROWS.get(case, 9), 7)
    nnz = int(lengths.sum())
    a = values(rng, nnz, dtype)
    if case == "nonfinite":
        a[0] = np.nan
    return {
        "a": a,
        "y": garbage(len(lengths), dtype),
        "indptr": compress(lengths, idtype),
        "m": len(lengths),
        "n": longest(lengths),
        "nnz": nnz,
    }


def ragged_sum_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of each row."""
    return {"y": scatter_sum(args["m"], parents_of(args["indptr"]), args["a"])}


# B[i, j, k] = sum over l of A[i, j, k, l], with I, J and K fused.
make_ragged_fuse3 = making("ragged_fuse3", """
with T.sp_iter([T.fuse(I, J, K), L], "SSSR", "sum") as [i, j, k, l]:
    with T.init():
        B[i, j, k] = 0.0
    B[i, j, k] = B[i, j, k] + A[i, j, k, l]
""", """
J = T.dense_variable(I, (n, nnz_j), j_ptr)
K = T.dense_variable(J, (p, nnz_k), k_ptr)
L = T.dense_variable(K, (q, nnz_l), l_ptr)
""", first="m n p q", A="I J K L", B="I J K")  # fmt: skip


# B[i, j] = sum over k and l of A[i, j, k, l], with I and J, and with K and L fused.
make_fuse_reduce = making("ragged_fuse_reduce", """
with T.sp_iter([T.fuse(I, J), T.fuse(K, L)], "SSRR", "sum") as [i, j, k, l]:
    with T.init():
        B[i, j] = 0.0
    B[i, j] = B[i, j] + A[i, j, k, l]
""", """
J = T.dense_variable(I, (n, nnz_j), j_ptr)
K = T.dense_variable(J, (p, nnz_k), k_ptr)
L = T.dense_variable(K, (q, nnz_l), l_ptr)
""", first="m n p q", A="I J K L", B="I J")  # fmt: skip


def ragged4_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of the sums over a ragged tensor of order four, but for `b`."""
    args: Arrays = {"m": ROWS.get(case, 5)}
    rows = args["m"]
    for axis, size in zip("jkl", "npq", strict=True):
        lengths = ragged(rng, case, rows, 4)
        args[f"{axis}_ptr"] = compress(lengths, idtype)
        args[size] = longest(lengths)
        rows = args[f"nnz_{axis}"] = int(lengths.sum())
    return {**args, "a": values(rng, rows, dtype)}


def ragged_fuse_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ragged_fuse2 and ragged_fuse3."""
    args = ragged4_inputs(rng, case, dtype, idtype)
    return {**args, "b": garbage(args["nnz_k"], dtype)}


def ragged_fuse_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of each innermost row."""
    return {"b": scatter_sum(args["nnz_k"], parents_of(args["l_ptr"]), args["a"])}


def reduce_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ragged_fuse_reduce."""
    args = ragged4_inputs(rng, case, dtype, idtype)
    return {**args, "b": garbage(args["nnz_j"], dtype)}


def reduce_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of the innermost two levels."""
    where = parents_of(args["k_ptr"])[parents_of(args["l_ptr"])]
    return {"b": scatter_sum(args["nnz_j"], where, args["a"])}


# Z[b] = X[b] Y[b], matrices of different sizes in each batch.
make_ragged_matmul = making("ragged_matmul", """
with T.sp_iter([BATCH, I, J, K], "SSRS", "matmul") as [b, i, j, k]:
    with T.init():
        Z[b, i, k] = 0.0
    Z[b, i, k] = Z[b, i, k] + X[b, i, j] * Y[b, j, k]
""", """
BATCH = T.dense_fixed(batch)
I = T.dense_variable(BATCH, (m, nnz_i), i_ptr)
J = T.dense_variable(BATCH, (n, nnz_j), j_ptr)
K = T.dense_variable(BATCH, (p, nnz_k), k_ptr)
IJ = T.dense_variable(I, (n, nnz_ij), ij_ptr)
JK = T.dense_variable(J, (p, nnz_jk), jk_ptr)
IK = T.dense_variable(I, (p, nnz_ik), ik_ptr)
""", first="batch m n p", X="BATCH I IJ", Y="BATCH J JK", Z="BATCH I IK")  # fmt: skip


def ragged_matmul_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ragged_matmul."""
    batch = ROWS.get(case, 4)
    sizes = {axis: ragged(rng, case, batch, 5) for axis in "ijk"}
    if case == "single_row":
        sizes = {"i": np.array([3]), "j": np.array([4]), "k": np.array([2])}
    args: Arrays = {"batch": batch}
    for axis, size in zip("ijk", "mnp", strict=True):
        args[f"{axis}_ptr"] = compress(sizes[axis], idtype)
        args[size] = longest(sizes[axis])
        args[f"nnz_{axis}"] = int(sizes[axis].sum())
    for rows, cols in ("ij", "jk", "ik"):
        lengths = np.repeat(sizes[cols], sizes[rows])
        args[f"{rows}{cols}_ptr"] = compress(lengths, idtype)
        args[f"nnz_{rows}{cols}"] = int(lengths.sum())
    return {
        **args,
        "x": values(rng, args["nnz_ij"], dtype),
        "y": values(rng, args["nnz_jk"], dtype),
        "z": garbage(args["nnz_ik"], dtype),
    }


def ragged_matmul_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """One dense product per batch."""
    parts, x_at, y_at = [np.zeros(0)], 0, 0
    sizes = [np.diff(args[f"{axis}_ptr"]) for axis in "ijk"]
    for i, j, k in zip(*sizes, strict=True):
        x = args["x"][x_at : x_at + i * j].astype(np.float64).reshape(i, j)
        y = args["y"][y_at : y_at + j * k].astype(np.float64).reshape(j, k)
        x_at, y_at = x_at + i * j, y_at + j * k
        parts.append((x @ y).reshape(-1))
    return {"z": np.concatenate(parts)}


PROGRAMS = [
    Program("ragged_sum", make_ragged_sum, ragged_sum_inputs, ragged_sum_oracle, ("y",)),
    finite("ragged_fuse3", make_ragged_fuse3, ragged_fuse_inputs, ragged_fuse_oracle, ("b",)),
    finite("ragged_fuse_reduce", make_fuse_reduce, reduce_inputs, reduce_oracle, ("b",)),
    finite("ragged_matmul", make_ragged_matmul, ragged_matmul_inputs, ragged_matmul_oracle, ("z",)),
]
