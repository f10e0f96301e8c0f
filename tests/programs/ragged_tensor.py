"""Ragged tensors (dense_variable axes): sums, fused axes, batched products."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

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


def make_ragged_sum(dtype: str, idtype: str) -> Any:
    """Y[i] = sum of ragged row i."""
    Index = getattr(T, idtype)

    @T.prim_func
    def ragged_sum(
        a: T.handle, y: T.handle, indptr: T.handle, m: Index, n: Index, nnz: Index
    ) -> None:
        I = T.dense_fixed(m, idtype)
        J = T.dense_variable(I, (n, nnz), indptr, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J], "SR", "ragged_sum") as [i, j]:
            with T.init():
                Y[i] = 0.0
            Y[i] = Y[i] + A[i, j]

    return ragged_sum


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


def make_ragged_fuse3(dtype: str, idtype: str) -> Any:
    """B[i, j, k] = sum over l of A[i, j, k, l], with I, J and K fused."""
    Index = getattr(T, idtype)

    @T.prim_func
    def ragged_fuse3(
        a: T.handle, b: T.handle, j_ptr: T.handle, k_ptr: T.handle, l_ptr: T.handle,
        m: Index, n: Index, p: Index, q: Index, nnz_j: Index, nnz_k: Index, nnz_l: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.dense_variable(I, (n, nnz_j), j_ptr, idtype)
        K = T.dense_variable(J, (p, nnz_k), k_ptr, idtype)
        L = T.dense_variable(K, (q, nnz_l), l_ptr, idtype)
        A = T.match_sparse_buffer(a, (I, J, K, L), dtype)
        B = T.match_sparse_buffer(b, (I, J, K), dtype)
        with T.sp_iter([T.fuse(I, J, K), L], "SSSR", "sum") as [i, j, k, l]:
            with T.init():
                B[i, j, k] = 0.0
            B[i, j, k] = B[i, j, k] + A[i, j, k, l]

    return ragged_fuse3


def make_fuse_reduce(dtype: str, idtype: str) -> Any:
    """B[i, j] = sum over k and l of A[i, j, k, l], with I and J, and with K and L fused."""
    Index = getattr(T, idtype)

    @T.prim_func
    def ragged_fuse_reduce(
        a: T.handle, b: T.handle, j_ptr: T.handle, k_ptr: T.handle, l_ptr: T.handle,
        m: Index, n: Index, p: Index, q: Index, nnz_j: Index, nnz_k: Index, nnz_l: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.dense_variable(I, (n, nnz_j), j_ptr, idtype)
        K = T.dense_variable(J, (p, nnz_k), k_ptr, idtype)
        L = T.dense_variable(K, (q, nnz_l), l_ptr, idtype)
        A = T.match_sparse_buffer(a, (I, J, K, L), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        with T.sp_iter([T.fuse(I, J), T.fuse(K, L)], "SSRR", "sum") as [i, j, k, l]:
            with T.init():
                B[i, j] = 0.0
            B[i, j] = B[i, j] + A[i, j, k, l]

    return ragged_fuse_reduce


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


def make_ragged_matmul(dtype: str, idtype: str) -> Any:
    """Z[b] = X[b] Y[b], matrices of different sizes in each batch."""
    Index = getattr(T, idtype)

    @T.prim_func
    def ragged_matmul(
        x: T.handle, y: T.handle, z: T.handle, i_ptr: T.handle, j_ptr: T.handle,
        k_ptr: T.handle, ij_ptr: T.handle, jk_ptr: T.handle, ik_ptr: T.handle, batch: Index,
        m: Index, n: Index, p: Index, nnz_i: Index, nnz_j: Index, nnz_k: Index,
        nnz_ij: Index, nnz_jk: Index, nnz_ik: Index,
    ) -> None:  # fmt: skip
        BATCH = T.dense_fixed(batch, idtype)
        I = T.dense_variable(BATCH, (m, nnz_i), i_ptr, idtype)
        J = T.dense_variable(BATCH, (n, nnz_j), j_ptr, idtype)
        K = T.dense_variable(BATCH, (p, nnz_k), k_ptr, idtype)
        IJ = T.dense_variable(I, (n, nnz_ij), ij_ptr, idtype)
        JK = T.dense_variable(J, (p, nnz_jk), jk_ptr, idtype)
        IK = T.dense_variable(I, (p, nnz_ik), ik_ptr, idtype)
        X = T.match_sparse_buffer(x, (BATCH, I, IJ), dtype)
        Y = T.match_sparse_buffer(y, (BATCH, J, JK), dtype)
        Z = T.match_sparse_buffer(z, (BATCH, I, IK), dtype)
        with T.sp_iter([BATCH, I, J, K], "SSRS", "matmul") as [b, i, j, k]:
            with T.init():
                Z[b, i, k] = 0.0
            Z[b, i, k] = Z[b, i, k] + X[b, i, j] * Y[b, j, k]

    return ragged_matmul


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
