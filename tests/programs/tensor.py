"""Sparse tensors of higher order (CSF)."""

from __future__ import annotations

import numpy as np

from small import making

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


# Y[i] = sum over j and k of A[i, j, k].
make_csf_sum = making("csf_sum", """
with T.sp_iter([I, J, K], "SRR", "csf_sum") as [i, j, k]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j, k]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
""", first="m n p", A="I J K", Y="I")  # fmt: skip


def csf_sum_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of csf_sum."""
    _, args = csf_inputs(rng, case, dtype, idtype)
    if case == "nonfinite":
        args["a"][-1] = np.nan
    return {**args, "y": garbage(args["m"], dtype)}


def csf_sum_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of the stored elements."""
    return {"y": scatter_sum(args["m"], csf_coordinates(args)[0], args["a"])}


# Y[i] = sum of A[i, j, k] * B[i, j, k], two leaves of one tree: A is searched.
make_csf_siblings = making("csf_siblings", """
with T.sp_iter([I, J, K1], "SRR", "inner") as [i, j, k]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j, k] * B[i, j, k]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K0 = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
K1 = T.sparse_variable(J, (p, nnz_l), (l_ptr, l_idx))
""", first="m n p", A="I J K0", B="I J K1", Y="I")  # fmt: skip


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


# Y[i, j] = sum over k of A[i, j, k] * X[k], on the fibers of A.
make_ttv = making("ttv", """
with T.sp_iter([I, J, K], "SSR", "ttv") as [i, j, k]:
    with T.init():
        Y[i, j] = 0.0
    Y[i, j] = Y[i, j] + A[i, j, k] * X[k]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
K_ = T.dense_fixed(p)
""", first="m n p", A="I J K", X="K_", Y="I J")  # fmt: skip


def ttv_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of ttv."""
    _, args = csf_inputs(rng, case, dtype, idtype)
    x = fill(rng, case, args["p"], dtype)
    return {**args, "x": x, "y": garbage(args["nnz_j"], dtype)}


def ttv_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products over each fiber."""
    terms = args["a"].astype(np.float64) * args["x"][args["k_idx"]]
    return {"y": scatter_sum(args["nnz_j"], csf_coordinates(args)[1], terms)}


# Y[i, j, f] = sum over k of A[i, j, k] * B[k, f], on the fibers of A.
make_ttm = making("ttm", """
with T.sp_iter([I, J, K, F], "SSRS", "ttm") as [i, j, k, f]:
    with T.init():
        Y[i, j, f] = 0.0
    Y[i, j, f] = Y[i, j, f] + A[i, j, k] * B[k, f]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
K_ = T.dense_fixed(p)
F = T.dense_fixed(feat)
""", first="m n p", A="I J K", B="K_ F", Y="I J F")  # fmt: skip


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


# Y[i, f] = sum over j and k of A[i, j, k] * B[j, f] * C[k, f].
make_mttkrp = making("mttkrp", """
with T.sp_iter([I, J, K, F], "SRRS", "mttkrp") as [i, j, k, f]:
    with T.init():
        Y[i, f] = 0.0
    Y[i, f] = Y[i, f] + A[i, j, k] * B[j, f] * C[k, f]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
J_ = T.dense_fixed(n)
K_ = T.dense_fixed(p)
F = T.dense_fixed(feat)
""", first="m n p", A="I J K", B="J_ F", C="K_ F", Y="I F")  # fmt: skip


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
