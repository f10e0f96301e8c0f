"""Sparse tensors of higher order (CSF)."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

from .common import FEATURES, Arrays, Program, csf, csr, fill, garbage, mask3, scatter_sum, values


def csf_inputs(
    rng: np.random.Generator, case: str, dtype: str, idtype: str
) -> tuple[np.ndarray, Arrays]:
    """A pattern of order three, and its CSF arrays with values `a`."""
    mask = mask3(rng, case)
    j_ptr, j_idx, k_ptr, k_idx = csf(mask, idtype)
    return mask, {
        "a": values(rng, len(k_idx), dtype),
        "j_ptr": j_ptr,
        "j_idx": j_idx,
        "k_ptr": k_ptr,
        "k_idx": k_idx,
        "m": mask.shape[0],
        "n": mask.shape[1],
        "p": mask.shape[2],
        "nnz_j": len(j_idx),
        "nnz_k": len(k_idx),
    }


def csf_coordinates(args: Arrays, k_ptr: str = "k_ptr") -> tuple[np.ndarray, np.ndarray]:
    """(i, fiber) of each leaf; the fiber's j is `j_idx[fiber]`."""
    fiber = np.repeat(np.arange(args["nnz_j"]), np.diff(args[k_ptr]))
    return np.repeat(np.arange(args["m"]), np.diff(args["j_ptr"]))[fiber], fiber


def make_csf_sum(dtype: str, idtype: str) -> Any:
    """Y[i] = sum over j and k of A[i, j, k]."""
    Index = getattr(T, idtype)

    @T.prim_func
    def csf_sum(
        a: T.handle, y: T.handle, j_ptr: T.handle, j_idx: T.handle, k_ptr: T.handle,
        k_idx: T.handle, m: Index, n: Index, p: Index, nnz_j: Index, nnz_k: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx), idtype)
        K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx), idtype)
        A = T.match_sparse_buffer(a, (I, J, K), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J, K], "SRR", "csf_sum") as [i, j, k]:
            with T.init():
                Y[i] = 0.0
            Y[i] = Y[i] + A[i, j, k]

    return csf_sum


def csf_sum_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of csf_sum."""
    _, args = csf_inputs(rng, case, dtype, idtype)
    if case == "nonfinite":
        args["a"][-1] = np.nan
    return {**args, "y": garbage(args["m"], dtype)}


def csf_sum_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of the stored elements."""
    return {"y": scatter_sum(args["m"], csf_coordinates(args)[0], args["a"])}


def make_csf_siblings(dtype: str, idtype: str) -> Any:
    """Y[i] = sum of A[i, j, k] * B[i, j, k], two leaves of one tree: A is searched."""
    Index = getattr(T, idtype)

    @T.prim_func
    def csf_siblings(
        a: T.handle, b: T.handle, y: T.handle, j_ptr: T.handle, j_idx: T.handle,
        k_ptr: T.handle, k_idx: T.handle, l_ptr: T.handle, l_idx: T.handle,
        m: Index, n: Index, p: Index, nnz_j: Index, nnz_k: Index, nnz_l: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx), idtype)
        K0 = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx), idtype)
        K1 = T.sparse_variable(J, (p, nnz_l), (l_ptr, l_idx), idtype)
        A = T.match_sparse_buffer(a, (I, J, K0), dtype)
        B = T.match_sparse_buffer(b, (I, J, K1), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J, K1], "SRR", "inner") as [i, j, k]:
            with T.init():
                Y[i] = 0.0
            Y[i] = Y[i] + A[i, j, k] * B[i, j, k]

    return csf_siblings


def csf_siblings_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of csf_siblings; some fibers of B are empty."""
    mask, args = csf_inputs(rng, case, dtype, idtype)
    other = rng.random(mask.shape) < 0.5
    l_ptr, l_idx = csr(other[mask.any(axis=2)], idtype)
    b = values(rng, len(l_idx), dtype)
    if case == "nonfinite":
        b[-1], b[len(b) // 2] = np.inf, np.nan
    return {
        **args,
        "b": b,
        "y": garbage(args["m"], dtype),
        "l_ptr": l_ptr,
        "l_idx": l_idx,
        "nnz_l": len(l_idx),
    }


def csf_siblings_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The elements of B times what A holds there, zero where it holds nothing."""
    _, fiber_a = csf_coordinates(args)
    dense = np.zeros((args["nnz_j"], args["p"]))
    dense[fiber_a, args["k_idx"]] = args["a"]
    rows, fiber = csf_coordinates(args, "l_ptr")
    terms = args["b"].astype(np.float64) * dense[fiber, args["l_idx"]]
    return {"y": scatter_sum(args["m"], rows, terms)}


def make_ttv(dtype: str, idtype: str) -> Any:
    """Y[i, j] = sum over k of A[i, j, k] * X[k], on the fibers of A."""
    Index = getattr(T, idtype)

    @T.prim_func
    def ttv(
        a: T.handle, x: T.handle, y: T.handle, j_ptr: T.handle, j_idx: T.handle,
        k_ptr: T.handle, k_idx: T.handle,
        m: Index, n: Index, p: Index, nnz_j: Index, nnz_k: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx), idtype)
        K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx), idtype)
        K_ = T.dense_fixed(p, idtype)
        A = T.match_sparse_buffer(a, (I, J, K), dtype)
        X = T.match_sparse_buffer(x, (K_,), dtype)
        Y = T.match_sparse_buffer(y, (I, J), dtype)
        with T.sp_iter([I, J, K], "SSR", "ttv") as [i, j, k]:
            with T.init():
                Y[i, j] = 0.0
            Y[i, j] = Y[i, j] + A[i, j, k] * X[k]

    return ttv


def ttv_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ttv."""
    _, args = csf_inputs(rng, case, dtype, idtype)
    x = fill(rng, case, args["p"], dtype)
    return {**args, "x": x, "y": garbage(args["nnz_j"], dtype)}


def ttv_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products over each fiber."""
    terms = args["a"].astype(np.float64) * args["x"][args["k_idx"]]
    return {"y": scatter_sum(args["nnz_j"], csf_coordinates(args)[1], terms)}


def make_ttm(dtype: str, idtype: str) -> Any:
    """Y[i, j, f] = sum over k of A[i, j, k] * B[k, f], on the fibers of A."""
    Index = getattr(T, idtype)

    @T.prim_func
    def ttm(
        a: T.handle, b: T.handle, y: T.handle, j_ptr: T.handle, j_idx: T.handle,
        k_ptr: T.handle, k_idx: T.handle,
        m: Index, n: Index, p: Index, nnz_j: Index, nnz_k: Index, feat: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx), idtype)
        K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx), idtype)
        K_ = T.dense_fixed(p, idtype)
        F = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J, K), dtype)
        B = T.match_sparse_buffer(b, (K_, F), dtype)
        Y = T.match_sparse_buffer(y, (I, J, F), dtype)
        with T.sp_iter([I, J, K, F], "SSRS", "ttm") as [i, j, k, f]:
            with T.init():
                Y[i, j, f] = 0.0
            Y[i, j, f] = Y[i, j, f] + A[i, j, k] * B[k, f]

    return ttm


def ttm_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ttm."""
    _, args = csf_inputs(rng, case, dtype, idtype)
    feat = FEATURES[case]
    return {
        **args,
        "b": fill(rng, case, (args["p"], feat), dtype),
        "y": garbage((args["nnz_j"], feat), dtype),
        "feat": feat,
    }


def ttm_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products over each fiber."""
    terms = args["a"].astype(np.float64)[:, None] * args["b"][args["k_idx"]]
    return {"y": scatter_sum(args["y"].shape, csf_coordinates(args)[1], terms)}


def make_mttkrp(dtype: str, idtype: str) -> Any:
    """Y[i, f] = sum over j and k of A[i, j, k] * B[j, f] * C[k, f]."""
    Index = getattr(T, idtype)

    @T.prim_func
    def mttkrp(
        a: T.handle, b: T.handle, c: T.handle, y: T.handle, j_ptr: T.handle, j_idx: T.handle,
        k_ptr: T.handle, k_idx: T.handle,
        m: Index, n: Index, p: Index, nnz_j: Index, nnz_k: Index, feat: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx), idtype)
        K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx), idtype)
        J_ = T.dense_fixed(n, idtype)
        K_ = T.dense_fixed(p, idtype)
        F = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J, K), dtype)
        B = T.match_sparse_buffer(b, (J_, F), dtype)
        C = T.match_sparse_buffer(c, (K_, F), dtype)
        Y = T.match_sparse_buffer(y, (I, F), dtype)
        with T.sp_iter([I, J, K, F], "SRRS", "mttkrp") as [i, j, k, f]:
            with T.init():
                Y[i, f] = 0.0
            Y[i, f] = Y[i, f] + A[i, j, k] * B[j, f] * C[k, f]

    return mttkrp


def mttkrp_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of mttkrp."""
    _, args = csf_inputs(rng, case, dtype, idtype)
    feat = FEATURES[case]
    return {
        **args,
        "b": values(rng, (args["n"], feat), dtype),
        "c": fill(rng, case, (args["p"], feat), dtype),
        "y": garbage((args["m"], feat), dtype),
        "feat": feat,
    }


def mttkrp_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products over each row."""
    rows, fiber = csf_coordinates(args)
    a, b, c = (args[name].astype(np.float64) for name in "abc")
    terms = a[:, None] * b[args["j_idx"][fiber]] * c[args["k_idx"]]
    return {"y": scatter_sum(args["y"].shape, rows, terms)}


PROGRAMS = [
    Program("csf_sum", make_csf_sum, csf_sum_inputs, csf_sum_oracle, ("y",)),
    Program("csf_siblings", make_csf_siblings, csf_siblings_inputs, csf_siblings_oracle, ("y",)),
    Program("ttv", make_ttv, ttv_inputs, ttv_oracle, ("y",)),
    Program("ttm", make_ttm, ttm_inputs, ttm_oracle, ("y",)),
    Program("mttkrp", make_mttkrp, mttkrp_inputs, mttkrp_oracle, ("y",)),
]
