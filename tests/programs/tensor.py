"""Sparse tensors of higher order (CSF)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .common import Arrays, csf, csr, mask3, parents_of, program, scatter_sum, values


def csf_of(mask: np.ndarray, idtype: str) -> Arrays:
    """The arrays and sizes of a pattern of order three."""
    names = ("j_ptr", "j_idx", "k_ptr", "k_idx")
    args: Arrays = dict(zip(names, csf(mask, idtype), strict=True))
    args |= dict(zip("mnp", mask.shape, strict=True))
    return {**args, "nnz_j": len(args["j_idx"]), "nnz_k": len(args["k_idx"])}


def _csf(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args = csf_of(mask3(rng, case), idtype)
    return {**args, "a": values(rng, args["nnz_k"], dtype)}


def _with_nan(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args = _csf(rng, case, dtype, idtype)
    if case == "nonfinite":
        args["a"][-1] = np.nan
    return args


def _siblings(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Some fibers of B are empty."""
    mask = mask3(rng, case)
    args = csf_of(mask, idtype)
    args["a"] = values(rng, args["nnz_k"], dtype)
    l_ptr, l_idx = csr((rng.random(mask.shape) < 0.5)[mask.any(axis=2)], idtype)
    b = values(rng, len(l_idx), dtype)
    if case == "nonfinite":
        b[-1], b[len(b) // 2] = np.inf, np.nan
    return {**args, "b": b, "l_ptr": l_ptr, "l_idx": l_idx, "nnz_l": len(l_idx)}


def places(args: Arrays, k_ptr: str = "k_ptr") -> tuple[np.ndarray, np.ndarray]:
    """(i, fiber) of each leaf; the fiber's j is `j_idx[fiber]`."""
    fiber = parents_of(args[k_ptr])
    return parents_of(args["j_ptr"])[fiber], fiber


def _inner_products(args: Arrays) -> np.ndarray:
    """The elements of B times what A holds there, zero where it holds nothing."""
    dense = np.zeros((args["nnz_j"], args["p"]))
    dense[places(args)[1], args["k_idx"]] = args["a"]
    rows, fiber = places(args, "l_ptr")
    return scatter_sum(args["m"], rows, args["b"] * dense[fiber, args["l_idx"]])


def _fiber_sums(name: str) -> Callable[[Arrays], np.ndarray]:
    """Sums over each fiber, of values times what an operand has at their k."""

    def oracle(args: Arrays) -> np.ndarray:
        operand = args[name][args["k_idx"]]
        terms = args["a"].reshape(-1, *[1] * (operand.ndim - 1)) * operand
        return scatter_sum(args["y"].shape, places(args)[1], terms)

    return oracle


def _mttkrp(args: Arrays) -> np.ndarray:
    rows, fiber = places(args)
    terms = args["b"][args["j_idx"][fiber]] * args["c"][args["k_idx"]]
    return scatter_sum(args["y"].shape, rows, args["a"][:, None] * terms)


LEVELS = """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
"""
PROGRAMS = [
    # Y[i] = sum over j and k of A[i, j, k].
    program("csf_sum", """
with T.sp_iter([I, J, K], "SRR", "csf_sum") as [i, j, k]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j, k]
""", LEVELS, _with_nan, lambda args: scatter_sum(args["m"], places(args)[0], args["a"]), "m n p",
        A="I J K", Y="I", y="out m"),
    # Y[i] = sum of A[i, j, k] * B[i, j, k], two leaves of one tree: A is searched.
    program("csf_siblings", """
with T.sp_iter([I, J, K1], "SRR", "inner") as [i, j, k]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j, k] * B[i, j, k]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K0 = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
K1 = T.sparse_variable(J, (p, nnz_l), (l_ptr, l_idx))
""", _siblings, _inner_products, "m n p", A="I J K0", B="I J K1", Y="I", y="out m"),
    # Y[i, j] = sum over k of A[i, j, k] * X[k], on the fibers of A.
    program("ttv", """
with T.sp_iter([I, J, K], "SSR", "ttv") as [i, j, k]:
    with T.init():
        Y[i, j] = 0.0
    Y[i, j] = Y[i, j] + A[i, j, k] * X[k]
""", LEVELS + "K_ = T.dense_fixed(p)", _csf, _fiber_sums("x"), "m n p",
        A="I J K", X="K_", Y="I J", x="fill p", y="out nnz_j"),
    # Y[i, j, f] = sum over k of A[i, j, k] * B[k, f], on the fibers of A.
    program("ttm", """
with T.sp_iter([I, J, K, F], "SSRS", "ttm") as [i, j, k, f]:
    with T.init():
        Y[i, j, f] = 0.0
    Y[i, j, f] = Y[i, j, f] + A[i, j, k] * B[k, f]
""", LEVELS + "K_ = T.dense_fixed(p)\nF = T.dense_fixed(feat)", _csf, _fiber_sums("b"), "m n p",
        A="I J K", B="K_ F", Y="I J F", b="fill p feat", y="out nnz_j feat"),
    # Y[i, f] = sum over j and k of A[i, j, k] * B[j, f] * C[k, f].
    program("mttkrp", """
with T.sp_iter([I, J, K, F], "SRRS", "mttkrp") as [i, j, k, f]:
    with T.init():
        Y[i, f] = 0.0
    Y[i, f] = Y[i, f] + A[i, j, k] * B[j, f] * C[k, f]
""", LEVELS + "J_ = T.dense_fixed(n)\nK_ = T.dense_fixed(p)\nF = T.dense_fixed(feat)",
        _csf, _mttkrp, "m n p", A="I J K", B="J_ F", C="K_ F", Y="I F",
        b="values n feat", c="fill p feat", y="out m feat"),
]  # fmt: skip
