"""Ragged tensors (dense_variable axes): sums, fused axes, batched products."""

from __future__ import annotations

import numpy as np

from .common import (
    FINITE,
    Arrays,
    compress,
    parents_of,
    program,
    ragged,
    rows_of,
    scatter_sum,
    values,
)  # fmt: skip

ROWS = {"single_row": 1}


def _level(lengths: np.ndarray, idtype: str, ptr: str, longest: str, nnz: str) -> Arrays:
    """Offsets of rows of these lengths, the longest one (one where there is none), their sum."""
    longest_row, total = int(lengths.max(initial=1)), int(lengths.sum())
    return {ptr: compress(lengths, idtype), longest: longest_row, nnz: total}


def _two_levels(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    lengths = ragged(rng, case, ROWS.get(case, 9), 7)
    args = _level(lengths, idtype, "indptr", "n", "nnz")
    args |= {"a": values(rng, args["nnz"], dtype), "m": len(lengths)}
    if case == "nonfinite":
        args["a"][0] = np.nan
    return args


def _four_levels(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args: Arrays = {"m": ROWS.get(case, 5)}
    rows = args["m"]
    for axis, size in zip("jkl", "npq", strict=True):
        args |= _level(ragged(rng, case, rows, 4), idtype, f"{axis}_ptr", size, f"nnz_{axis}")
        rows = args[f"nnz_{axis}"]
    return {**args, "a": values(rng, rows, dtype)}


def _batches(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args: Arrays = {"batch": ROWS.get(case, 4)}
    sizes = {axis: ragged(rng, case, args["batch"], 5) for axis in "ijk"}
    if case == "single_row":
        sizes = {"i": np.array([3]), "j": np.array([4]), "k": np.array([2])}
    for axis, size in zip("ijk", "mnp", strict=True):
        args |= _level(sizes[axis], idtype, f"{axis}_ptr", size, f"nnz_{axis}")
    for rows, cols in ("ij", "jk", "ik"):
        lengths = np.repeat(sizes[cols], sizes[rows])
        args |= _level(lengths, idtype, f"{rows}{cols}_ptr", "longest", f"nnz_{rows}{cols}")
    return args


def _dense_products(args: Arrays) -> np.ndarray:
    """A product per batch."""
    parts, x_at, y_at = [np.zeros(0)], 0, 0
    for i, j, k in zip(*(np.diff(args[f"{axis}_ptr"]) for axis in "ijk"), strict=True):
        x = args["x"][x_at : x_at + i * j].reshape(i, j)
        y = args["y"][y_at : y_at + j * k].reshape(j, k)
        x_at, y_at = x_at + i * j, y_at + j * k
        parts.append((x @ y).reshape(-1))
    return np.concatenate(parts)


LEVELS = """
J = T.dense_variable(I, (n, nnz_j), j_ptr)
K = T.dense_variable(J, (p, nnz_k), k_ptr)
L = T.dense_variable(K, (q, nnz_l), l_ptr)
"""
PROGRAMS = [
    # Y[i] = sum of ragged row i.
    program("ragged_sum", """
with T.sp_iter([I, J], "SR", "ragged_sum") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j]
""", "J = T.dense_variable(I, (n, nnz), indptr)", _two_levels,
        lambda args: scatter_sum(args["m"], rows_of(args), args["a"]), A="I J", Y="I", y="out m"),
    # B[i, j, k] = sum over l of A[i, j, k, l], with I, J and K fused.
    program("ragged_fuse3", """
with T.sp_iter([T.fuse(I, J, K), L], "SSSR", "sum") as [i, j, k, l]:
    with T.init():
        B[i, j, k] = 0.0
    B[i, j, k] = B[i, j, k] + A[i, j, k, l]
""", LEVELS, _four_levels,
        lambda args: scatter_sum(args["nnz_k"], rows_of(args, "l_ptr"), args["a"]), "m n p q",
        cases=FINITE, A="I J K L", B="I J K", b="out nnz_k"),
    # B[i, j] = sum over k and l of A[i, j, k, l], with I and J, and with K and L fused.
    program("ragged_fuse_reduce", """
with T.sp_iter([T.fuse(I, J), T.fuse(K, L)], "SSRR", "sum") as [i, j, k, l]:
    with T.init():
        B[i, j] = 0.0
    B[i, j] = B[i, j] + A[i, j, k, l]
""", LEVELS, _four_levels, lambda args: scatter_sum(
        args["nnz_j"], parents_of(args["k_ptr"])[parents_of(args["l_ptr"])], args["a"]
    ), "m n p q", cases=FINITE, A="I J K L", B="I J", b="out nnz_j"),
    # Z[b] = X[b] Y[b], matrices of different sizes in each batch.
    program("ragged_matmul", """
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
""", _batches, _dense_products, "batch m n p", cases=FINITE, X="BATCH I IJ", Y="BATCH J JK",
        Z="BATCH I IK", x="values nnz_ij", y="values nnz_jk", z="out nnz_ik"),
]  # fmt: skip
