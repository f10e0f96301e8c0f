"""Iterations over several sparse operands together: unions and intersections."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import (
    FINITE,
    Arrays,
    csr_arrays,
    fill,
    mask2,
    mask3,
    parents_of,
    program,
    rows_of,
    scatter_sum,
    values,
)  # fmt: skip
from .tensor import csf_of, places


def _operand(
    rng: np.random.Generator, mask: np.ndarray, name: str, dtype: str, idtype: str, n: str = "n"
) -> Arrays:
    """`a`, `a_ptr`, `a_idx`, `a_nnz`, `m`, `n`."""
    args = csr_arrays(mask, idtype, f"{name}_ptr", f"{name}_idx", f"{name}_nnz", n=n)
    return {**args, name: values(rng, args[f"{name}_nnz"], dtype)}


def _operands(names: str) -> Any:
    """CSR matrices of one shape."""

    def inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
        args: Arrays = {}
        for name in names:
            args |= _operand(rng, mask2(rng, case), name, dtype, idtype)
        return args

    return inputs


def dense_of(args: Arrays, name: str) -> np.ndarray:
    """The array of a CSR operand, in float64."""
    out = np.zeros((args["m"], args["n"]))
    out[parents_of(args[f"{name}_ptr"]), args[f"{name}_idx"]] = args[name]
    return out


def stored_of(args: Arrays, name: str) -> np.ndarray:
    """The mask of a CSR operand."""
    return dense_of({**args, name: np.ones(len(args[name]))}, name) != 0


def _sum(args: Arrays) -> np.ndarray:
    """Garbage where nothing is stored."""
    stored = stored_of(args, "a") | stored_of(args, "b")
    return np.where(stored, dense_of(args, "a") + dense_of(args, "b"), args["c"])


def _sampled_product(args: Arrays) -> np.ndarray:
    """Sums over what both store; infinities elsewhere do not show."""
    both = stored_of(args, "a") & stored_of(args, "b")
    weights = dense_of(args, "a") * dense_of(args, "b")
    return np.where(both[..., None], weights[..., None] * args["d"], 0.0).sum(axis=1)


def _largest_sum(args: Arrays) -> np.ndarray:
    total = dense_of(args, "a") + dense_of(args, "b") + dense_of(args, "d")
    return np.maximum(total.max(axis=1, initial=0), 0)


def _rows_and_slots(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A in DCSR, B in slots, with padding between them."""
    mask, other = mask2(rng, case), mask2(rng, case)
    rows = np.flatnonzero(mask.any(axis=1))
    cols = max(1, int(other.sum(axis=1).max()) + 1)
    slots = np.full((len(mask), cols), -1)
    for row, columns in zip(slots, map(np.flatnonzero, other), strict=True):
        row[np.sort(rng.permutation(cols)[: len(columns)])] = columns
    args = {**_operand(rng, mask[rows], "a", dtype, idtype), "m": len(mask), "rows": len(rows)}
    args |= {"row_ptr": np.array([0, len(rows)], idtype), "row_idx": rows.astype(idtype)}
    args |= {"slots": slots.reshape(-1).astype(idtype), "cols": cols}
    return {**args, "b": fill(rng, "small", slots.size, dtype)}


def _sums_of_rows(args: Arrays) -> np.ndarray:
    sums = scatter_sum(args["m"], args["row_idx"][rows_of(args, "a_ptr")], 2 * args["a"])
    stored = args["slots"].reshape(args["m"], -1) >= 0
    return sums + np.where(stored, args["b"].reshape(stored.shape), 0).sum(1)


def _fibers(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A CSF tensor and a CSR matrix over its first two axes."""
    args = csf_of(mask3(rng, case), idtype)
    args |= _operand(rng, mask2(rng, case), "b", dtype, idtype)
    return {**args, "a": values(rng, args["nnz_k"], dtype)}


def _fiber_sums(args: Arrays) -> np.ndarray:
    rows, parent = places(args)
    weights = dense_of(args, "b")[rows, args["j_idx"][parent]]
    return scatter_sum((args["m"], args["p"]), (rows, args["k_idx"]), args["a"] * weights)


def _square(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    size = max(mask2(rng, case).shape)
    return _operand(rng, mask2(rng, case, (size, size)), "a", dtype, idtype)


def _triangles(args: Arrays) -> np.ndarray:
    """The product with the transposed matrix, where there are elements."""
    dense = dense_of({**args, "n": args["m"]}, "a")
    return (dense @ dense.T)[rows_of(args, "a_ptr"), args["a_idx"]]


def _factors(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A matrix, and one with as many rows as it has columns."""
    args = _operand(rng, mask2(rng, case), "a", dtype, idtype, "l")
    return {**_operand(rng, mask2(rng, case, (args["l"], 7)), "b", dtype, idtype), **args}


def _product(args: Arrays) -> np.ndarray:
    left = dense_of({**args, "n": args["l"]}, "a")
    return left @ dense_of({**args, "m": args["l"]}, "b")


TWO = """
J1 = T.sparse_variable(I, (n, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
"""
FIRST = "a a_ptr a_idx b b_ptr b_idx"
PROGRAMS = [
    # C = A + B where either stores something; the rest of C is left as it is.
    program("add_csr", """
with T.sp_iter([I, T.union(J1, J2)], "SS", "add") as [i, j]:
    C[i, j] = A[i, j] + B[i, j]
""", TWO + "J = T.dense_fixed(n)", _operands("ab"), _sum, FIRST, A="I J1", B="I J2", C="I J",
        c="out m n"),
    # C = (A * B) D, what both store times a dense operand.
    program("intersect_spmm", """
with T.sp_iter([I, T.intersect(J1, J2), K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[i, j] * D[j, k]
""", TWO + "J = T.dense_fixed(n)\nK = T.dense_fixed(5)", _operands("ab"), _sampled_product,
        FIRST, A="I J1", B="I J2", D="J K", C="I K", d="fill n 5", c="out m 5"),
    # c[i] = the largest of A + B + D in a row, over what any of them stores; 0 in an empty row.
    program("union_of_three", """
with T.sp_iter([I, T.union(J1, J2, J3)], "SR", "most") as [i, j]:
    with T.init():
        C[i] = 0.0
    C[i] = T.max(C[i], A[i, j] + B[i, j] + D[i, j])
""", TWO + "J3 = T.sparse_variable(I, (n, d_nnz), (d_ptr, d_idx))", _operands("abd"),
        _largest_sum, FIRST + " d d_ptr d_idx", A="I J1", B="I J2", D="I J3", C="I", c="out m"),
    # c[i] = sum of 2 A + B in a row: of rows that are stored (DCSR), and of slots (ELL).
    program("union_dcsr_ell", """
R = T.union(I1, I2)
with T.sp_iter([O, R, T.union(J1, J2)], "SSR", "sums") as [o, i, j]:
    with T.init():
        C[i] = 0.0
    C[i] = C[i] + (A[o, i, j] * 2.0 + B[i, j])
""", """
O = T.dense_fixed(1)
I1 = T.sparse_variable(O, (m, rows), (row_ptr, row_idx))
I2 = T.dense_fixed(m)
J1 = T.sparse_variable(I1, (n, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_fixed(I2, (n, cols), slots)
""", _rows_and_slots, _sums_of_rows, "a row_ptr row_idx a_ptr a_idx b slots c m n rows a_nnz",
        A="O I1 J1", B="I2 J2", C="I2", c="out m"),
    # c[i, k] = sum of A[i, j] A[k, j] over what rows i and k share, of each element (i, k).
    program("triangles", """
with T.sp_iter(
    [I, K, T.intersect(J, T.attach(J2, K))], "SSR", "triangles"
) as [i, k, j]:  # fmt: skip
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * A[k, j]
""", """
K = T.sparse_variable(I, (m, a_nnz), (a_ptr, a_idx))
J = T.sparse_variable(I, (m, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (m, a_nnz), (a_ptr, a_idx))
""", _square, _triangles, "a a_ptr a_idx", cases=FINITE, A="I J2", C="I K", c="out a_nnz"),
    # C = A B of two sparse matrices.
    program("spgemm", """
with T.sp_iter([I, J, T.attach(K, J)], "SRS", "spgemm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", """
I
J = T.sparse_variable(I, (l, a_nnz), (a_ptr, a_idx))
L = T.dense_fixed(l)
K = T.sparse_variable(L, (n, b_nnz), (b_ptr, b_idx))
N
""", _factors, _product, FIRST + " m l n", cases=FINITE, A="I J", B="L K", C="I N",
        c="out m n"),
    # c[i, k] = sum over the fibers of a CSF tensor whose (i, j) a matrix stores, too.
    program("intersect_fibers", """
with T.sp_iter([I, T.intersect(J, J2), K], "SRS", "fibers") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j, k] * B[i, j]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
K_ = T.dense_fixed(p)
""", _fibers, _fiber_sums, "a j_ptr j_idx k_ptr k_idx b b_ptr b_idx m n p", cases=FINITE,
        A="I J K", B="I J2", C="I K_", c="out m p"),
]  # fmt: skip
