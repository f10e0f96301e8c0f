"""Several sparse operands gone through together: unions and intersections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

from small import making

from .common import FINITE, Arrays, Program, csf, csr, fill, garbage, mask2, mask3, values

FEATURES = 5


def _csr_operand(rng: np.random.Generator, case: str, name: str, dtype: str, idtype: str) -> Any:
    """A dense array with zeros where nothing is stored, and `a`, `a_ptr`, `a_idx`, `a_nnz`."""
    mask = mask2(rng, case)
    indptr, indices = csr(mask, idtype)
    stored = values(rng, len(indices), dtype)
    dense = np.zeros(mask.shape)
    dense[mask] = stored
    arrays = {f"{name}_ptr": indptr, f"{name}_idx": indices, f"{name}_nnz": len(indices)}
    return dense, {name: stored, **arrays}


def _inputs(names: str, out: Callable[[int, int], Any], **more: Any) -> Any:
    """Inputs of a program of CSR matrices of one shape; `oracle_` are their dense arrays.

    out : the shape of the result `c`, of the rows and columns
    more : further arguments, by name the shape of the rows and columns
    """

    def inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
        args: Arrays = {}
        for name in names:
            dense, arrays = _csr_operand(rng, case, name, dtype, idtype)
            args |= arrays
        m, n = dense.shape
        args |= {name: fill(rng, case, shape(m, n), dtype) for name, shape in more.items()}
        return {**args, "c": garbage(out(m, n), dtype), "m": m, "n": n}

    return inputs


def dense_of(args: Arrays, name: str) -> np.ndarray:
    """The array of a CSR operand, in float64."""
    out = np.zeros((args["m"], args["n"]))
    rows = np.repeat(np.arange(args["m"]), np.diff(args[f"{name}_ptr"]))
    out[rows, args[f"{name}_idx"]] = args[name]
    return out


def stored_of(args: Arrays, name: str) -> np.ndarray:
    """Where a CSR operand stores something."""
    return dense_of({**args, name: np.ones(len(args[name]))}, name) != 0


# C = A + B where either stores something; the rest of C is left as it is.
make_add = making("add_csr", """
with T.sp_iter([I, T.union(J1, J2)], "SS", "add") as [i, j]:
    C[i, j] = A[i, j] + B[i, j]
""", """
J1 = T.sparse_variable(I, (n, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
J = T.dense_fixed(n)
""", first="a a_ptr a_idx b b_ptr b_idx", A="I J1", B="I J2", C="I J")  # fmt: skip


def add_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The sum, and garbage where nothing is stored."""
    stored = stored_of(args, "a") | stored_of(args, "b")
    return {"c": np.where(stored, dense_of(args, "a") + dense_of(args, "b"), args["c"])}


# C = (A * B) D, what both store times a dense operand.
make_sampled_product = making("intersect_spmm", """
with T.sp_iter([I, T.intersect(J1, J2), K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[i, j] * D[j, k]
""", """
J1 = T.sparse_variable(I, (n, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
J = T.dense_fixed(n)
K = T.dense_fixed(5)
""", first="a a_ptr a_idx b b_ptr b_idx", A="I J1", B="I J2", D="J K", C="I K")  # fmt: skip


def sampled_product_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sums over what both store; infinities elsewhere do not show."""
    both = stored_of(args, "a") & stored_of(args, "b")
    weights = dense_of(args, "a") * dense_of(args, "b")
    terms = np.where(both[..., None], weights[..., None] * args["d"].astype("float64"), 0.0)
    return {"c": terms.sum(axis=1)}


# c[i] = the largest of A + B + D in a row, over what any of them stores; 0 in an empty row.
make_sum_of_three = making("union_of_three", """
with T.sp_iter([I, T.union(J1, J2, J3)], "SR", "most") as [i, j]:
    with T.init():
        C[i] = 0.0
    C[i] = T.max(C[i], A[i, j] + B[i, j] + D[i, j])
""", """
J1 = T.sparse_variable(I, (n, a_nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
J3 = T.sparse_variable(I, (n, d_nnz), (d_ptr, d_idx))
""", first="a a_ptr a_idx b b_ptr b_idx d d_ptr d_idx", A="I J1", B="I J2",
    D="I J3", C="I")  # fmt: skip


def sum_of_three_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The largest sum of each row, at least 0."""
    total = sum(dense_of(args, name) for name in "abd")
    return {"c": np.maximum(total.max(axis=1, initial=0), 0)}


def make_dcsr(dtype: str, idtype: str) -> Any:
    """c[i] = sum of A + B in a row: of rows that are stored (DCSR), and of slots (ELL)."""
    Index = getattr(T, idtype)

    @T.prim_func
    def union_dcsr_ell(
        a: T.handle, row_ptr: T.handle, row_idx: T.handle, a_ptr: T.handle, a_idx: T.handle,
        b: T.handle, slots: T.handle, c: T.handle, m: Index, n: Index, rows: Index, a_nnz: Index,
        cols: Index,
    ) -> None:  # fmt: skip
        O = T.dense_fixed(1, idtype)
        I1 = T.sparse_variable(O, (m, rows), (row_ptr, row_idx), idtype)
        I2 = T.dense_fixed(m, idtype)
        J1 = T.sparse_variable(I1, (n, a_nnz), (a_ptr, a_idx), idtype)
        J2 = T.sparse_fixed(I2, (n, cols), slots, idtype)
        I = T.union(I1, I2)
        A = T.match_sparse_buffer(a, (O, I1, J1), dtype)
        B = T.match_sparse_buffer(b, (I2, J2), dtype)
        C = T.match_sparse_buffer(c, (I2,), dtype)
        with T.sp_iter([O, I, T.union(J1, J2)], "SSR", "sums") as [o, i, j]:
            with T.init():
                C[i] = 0.0
            C[i] = C[i] + (A[o, i, j] * 2.0 + B[i, j])

    return union_dcsr_ell


def dcsr_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A in DCSR, B in slots, with padding between them."""
    mask, other = mask2(rng, case), mask2(rng, case)
    m, n = mask.shape
    rows = np.flatnonzero(mask.any(axis=1))
    a_ptr, a_idx = csr(mask[rows], idtype)
    cols = max(1, int(other.sum(axis=1).max()) + 1)
    slots = np.full((m, cols), -1)
    for row, found in zip(slots, map(np.flatnonzero, other), strict=True):
        places = np.sort(rng.permutation(cols)[: len(found)])
        row[places] = found
    return {
        "a": values(rng, len(a_idx), dtype),
        "row_ptr": np.array([0, len(rows)], idtype),
        "row_idx": rows.astype(idtype),
        "a_ptr": a_ptr,
        "a_idx": a_idx,
        "b": fill(rng, "small", slots.size, dtype),
        "slots": slots.reshape(-1).astype(idtype),
        "c": garbage(m, dtype),
        "m": m,
        "n": n,
        "rows": len(rows),
        "a_nnz": len(a_idx),
        "cols": cols,
    }


def dcsr_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sums by row."""
    out = np.zeros(args["m"])
    rows = np.repeat(args["row_idx"], np.diff(args["a_ptr"]))
    np.add.at(out, rows, 2 * args["a"].astype("float64"))
    stored = args["slots"].reshape(args["m"], -1) >= 0
    return {
        "c": out + np.where(stored, args["b"].reshape(stored.shape).astype("float64"), 0).sum(1)
    }


# c[i, k] = sum over the fibers of a CSF tensor whose (i, j) a matrix stores, too.
make_fibers = making("intersect_fibers", """
with T.sp_iter([I, T.intersect(J, J2), K], "SRS", "fibers") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j, k] * B[i, j]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
J2 = T.sparse_variable(I, (n, b_nnz), (b_ptr, b_idx))
K_ = T.dense_fixed(p)
""", first="a j_ptr j_idx k_ptr k_idx b b_ptr b_idx m n p", A="I J K", B="I J2",
    C="I K_")  # fmt: skip


def fibers_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A CSF tensor and a CSR matrix over its first two axes."""
    mask = mask3(rng, case)
    j_ptr, j_idx, k_ptr, k_idx = csf(mask, idtype)
    _, matrix = _csr_operand(rng, case, "b", dtype, idtype)
    m, n, p = mask.shape
    arrays = {"j_ptr": j_ptr, "j_idx": j_idx, "k_ptr": k_ptr, "k_idx": k_idx}
    sizes = {"m": m, "n": n, "p": p, "nnz_j": len(j_idx), "nnz_k": len(k_idx)}
    a = values(rng, len(k_idx), dtype)
    return {"a": a, **arrays, **matrix, "c": garbage((m, p), dtype), **sizes}


def fibers_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of products."""
    parent = np.repeat(np.arange(args["nnz_j"]), np.diff(args["k_ptr"]))
    rows = np.repeat(np.arange(args["m"]), np.diff(args["j_ptr"]))[parent]
    weights = dense_of(args, "b")[rows, args["j_idx"][parent]]
    out = np.zeros((args["m"], args["p"]))
    np.add.at(out, (rows, args["k_idx"]), args["a"].astype("float64") * weights)
    return {"c": out}


# c[i, k] = sum of A[i, j] A[k, j] over what rows i and k share, of each element (i, k).
make_triangles = making("triangles", """
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
""", first="a a_ptr a_idx", A="I J2", C="I K")  # fmt: skip


def triangles_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A square matrix."""
    shape = mask2(rng, case).shape
    mask = mask2(rng, case, (max(shape), max(shape)))
    a_ptr, a_idx = csr(mask, idtype)
    a, c = values(rng, len(a_idx), dtype), garbage(len(a_idx), dtype)
    sizes = {"m": len(mask), "a_nnz": len(a_idx)}
    return {"a": a, "a_ptr": a_ptr, "a_idx": a_idx, "c": c, **sizes}


def triangles_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The product with the transposed matrix, where there are elements."""
    dense = dense_of({**args, "n": args["m"]}, "a")
    rows = np.repeat(np.arange(args["m"]), np.diff(args["a_ptr"]))
    return {"c": (dense @ dense.T)[rows, args["a_idx"]]}


# C = A B of two sparse matrices.
make_product = making("spgemm", """
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
""", first="a a_ptr a_idx b b_ptr b_idx m l n", A="I J", B="L K", C="I N")  # fmt: skip


def product_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A matrix, and one with as many rows as it has columns."""
    dense, a = _csr_operand(rng, case, "a", dtype, idtype)
    m, l = dense.shape
    mask = mask2(rng, case, (l, 7))
    b_ptr, b_idx = csr(mask, idtype)
    b = {"b": values(rng, len(b_idx), dtype), "b_ptr": b_ptr, "b_idx": b_idx, "b_nnz": len(b_idx)}
    return {**a, **b, "c": garbage((m, 7), dtype), "m": m, "l": l, "n": 7}


def product_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The product of the dense arrays."""
    left = dense_of({**args, "n": args["l"]}, "a")
    return {"c": left @ dense_of({**args, "m": args["l"]}, "b")}


def _square(m: int, n: int) -> tuple[int, int]:
    return m, n


PROGRAMS = (
    Program("add_csr", make_add, _inputs("ab", _square), add_oracle, ("c",)),
    Program(
        "intersect_spmm",
        make_sampled_product,
        _inputs("ab", lambda m, n: (m, FEATURES), d=lambda m, n: (n, FEATURES)),
        sampled_product_oracle,
        ("c",),
    ),
    Program(
        "union_of_three",
        make_sum_of_three,
        _inputs("abd", lambda m, n: m),
        sum_of_three_oracle,
        ("c",),
    ),
    Program("union_dcsr_ell", make_dcsr, dcsr_inputs, dcsr_oracle, ("c",)),
    Program("triangles", make_triangles, triangles_inputs, triangles_oracle, ("c",), cases=FINITE),
    Program("spgemm", make_product, product_inputs, product_oracle, ("c",), cases=FINITE),
    Program("intersect_fibers", make_fibers, fibers_inputs, fibers_oracle, ("c",), cases=FINITE),
)
