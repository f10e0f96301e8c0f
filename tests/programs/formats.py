"""Sparse times dense matrix in other formats: CSC, COO, BSR, ELL, DCSR, DBSR."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

from small import making

from .common import (
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

BLOCK = 3


def _product(args: Arrays, rows: np.ndarray, cols: np.ndarray, a: np.ndarray) -> Any:
    """{"c": A B} from the stored elements of A."""
    terms = a.astype(np.float64)[:, None] * args["b"][cols]
    return {"c": scatter_sum(args["c"].shape, rows, terms)}


def _block_product(args: Arrays, rows: np.ndarray, cols: np.ndarray) -> Any:
    """{"c": A B} from the stored blocks of A."""
    block = args["a"].shape[1]
    b = args["b"].astype(np.float64).reshape(-1, block, args["feat"])
    terms = (args["a"].astype(np.float64)[:, :, :, None] * b[cols][:, None]).sum(axis=2)
    total = scatter_sum((args["mb"], block, args["feat"]), rows, terms)
    return {"c": total.reshape(args["c"].shape)}


# C = A B, A by columns: many columns write one row of C.
make_spmm_csc = making("spmm_csc", """
with T.sp_iter([J, I, K], "RSS", "spmm") as [j, i, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[j, i] * B[j, k]
""", """
J = T.dense_fixed(n)
I = T.sparse_variable(J, (m, nnz), (indptr, indices))
I_ = T.dense_fixed(m)
K
""", first="m", A="J I", B="J K", C="I_ K")  # fmt: skip


def _operands(
    rng: np.random.Generator, case: str, dtype: str, shape: tuple[int, int]
) -> dict[str, Any]:
    """`b`, `c`, `feat` for a sparse matrix of that shape."""
    feat = FEATURES[case]
    return {
        "b": fill(rng, case, (shape[1], feat), dtype),
        "c": garbage((shape[0], feat), dtype),
        "feat": feat,
    }


def csc_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_csc."""
    mask = mask2(rng, case)
    indptr, indices = csr(mask.T, idtype)
    return {
        **_operands(rng, case, dtype, mask.shape),
        "a": values(rng, len(indices), dtype),
        "indptr": indptr,
        "indices": indices,
        "m": mask.shape[0],
        "n": mask.shape[1],
        "nnz": len(indices),
    }


def csc_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum over the stored elements."""
    return _product(args, args["indices"], parents_of(args["indptr"]), args["a"])


def make_spmm_coo(dtype: str, idtype: str) -> Any:
    """C = A B, A by coordinates sorted by row; duplicates add up."""
    Index = getattr(T, idtype)

    @T.prim_func
    def spmm_coo(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, rows: T.handle,
        cols: T.handle, m: Index, n: Index, nnz: Index, feat: Index,
    ) -> None:  # fmt: skip
        O = T.dense_fixed(1, idtype)
        I = T.sparse_variable(O, (m, nnz), (indptr, rows), idtype, unique=False)
        J = T.sparse_fixed(I, (n, 1), cols, idtype)
        I_ = T.dense_fixed(m, idtype)
        J_ = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (O, I, J), dtype)
        B = T.match_sparse_buffer(b, (J_, K), dtype)
        C = T.match_sparse_buffer(c, (I_, K), dtype)
        with T.sp_iter([O, I, J, K], "SSRS", "spmm") as [o, i, j, k]:
            with T.init():
                C[i, k] = 0.0
            C[i, k] = C[i, k] + A[o, i, j] * B[j, k]

    return spmm_coo


def make_spmm_coo_scatter(dtype: str, idtype: str) -> Any:
    """C = A B, A by coordinates in any order, given as plain integer buffers."""
    Index = getattr(T, idtype)

    @T.prim_func
    def spmm_coo_scatter(
        a: T.handle, b: T.handle, c: T.handle, rows: T.handle, cols: T.handle,
        m: Index, n: Index, nnz: Index, feat: Index,
    ) -> None:  # fmt: skip
        E = T.dense_fixed(nnz, idtype)
        I = T.dense_fixed(m, idtype)
        J = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (E,), dtype)
        ROW = T.match_sparse_buffer(rows, (E,), idtype)
        COL = T.match_sparse_buffer(cols, (E,), idtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, K], "SS", "zero") as [i, k]:
            C[i, k] = 0.0
        with T.sp_iter([E, K], "SS", "scatter") as [e, k]:
            C[ROW[e], k] = C[ROW[e], k] + A[e] * B[COL[e], k]

    return spmm_coo_scatter


def coo_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_coo; some coordinates come twice."""
    mask = mask2(rng, case)
    rows, cols = np.nonzero(mask)
    order = np.sort(np.concatenate([np.arange(len(rows)), np.arange(0, len(rows), 3)]))
    rows, cols = rows[order].astype(idtype), cols[order].astype(idtype)
    return {
        **_operands(rng, case, dtype, mask.shape),
        "a": values(rng, len(rows), dtype),
        "indptr": np.array([0, len(rows)], idtype),
        "rows": rows,
        "cols": cols,
        "m": mask.shape[0],
        "n": mask.shape[1],
        "nnz": len(rows),
    }


def coo_scatter_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_coo_scatter, shuffled."""
    args = coo_inputs(rng, case, dtype, idtype)
    del args["indptr"]
    order = rng.permutation(args["nnz"])
    return {**args, "rows": args["rows"][order], "cols": args["cols"][order]}


def coo_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum over the stored elements."""
    return _product(args, args["rows"], args["cols"], args["a"])


# C = A B, A in blocks; B and C are indexed by affine expressions.
make_spmm_bsr = making("spmm_bsr", """
with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm") as [io, jo, ii, ji, k]:
    with T.init():
        C[io * block + ii, k] = 0.0
    C[io * block + ii, k] = (
        C[io * block + ii, k] + A[io, jo, ii, ji] * B[jo * block + ji, k]
    )
""", """
IO = T.dense_fixed(mb)
JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
II = T.dense_fixed(block)
JI = T.dense_fixed(block)
I = T.dense_fixed(mb * block)
J = T.dense_fixed(nb * block)
K
""", A="IO JO II JI", B="J K", C="I K")  # fmt: skip


def bsr_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_bsr."""
    mask = mask2(rng, case)
    indptr, indices = csr(mask, idtype)
    mb, nb = mask.shape
    return {
        **_operands(rng, case, dtype, (mb * BLOCK, nb * BLOCK)),
        "a": values(rng, (len(indices), BLOCK, BLOCK), dtype),
        "indptr": indptr,
        "indices": indices,
        "mb": mb,
        "nb": nb,
        "nnzb": len(indices),
        "block": BLOCK,
    }


def bsr_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of block products."""
    return _block_product(args, parents_of(args["indptr"]), args["indices"])


# C = A B, A in blocks, empty rows of blocks left out; B and C in blocks too.
make_spmm_dbsr = making("spmm_dbsr", """
with T.sp_iter([O, IO, JO, II, JI, K], "SSRSRS", "spmm") as [o, io, jo, ii, ji, k]:
    with T.init():
        C[io, ii, k] = 0.0
    C[io, ii, k] = C[io, ii, k] + A[o, io, jo, ii, ji] * B[jo, ji, k]
""", """
O = T.dense_fixed(1)
IO = T.sparse_variable(O, (mb, nnzr), (row_ptr, rows))
JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
II = T.dense_fixed(3)
JI = T.dense_fixed(3)
IO_ = T.dense_fixed(mb)
JO_ = T.dense_fixed(nb)
K
""", first="mb nb", A="O IO JO II JI", B="JO_ JI K", C="IO_ II K")  # fmt: skip


def _stored_rows(mask: np.ndarray, idtype: str) -> Arrays:
    """`row_ptr`, `rows`, `nnzr`, `indptr`, `indices` with empty rows left out."""
    rows = np.nonzero(mask.any(axis=1))[0].astype(idtype)
    indptr, indices = csr(mask[rows], idtype)
    return {
        "row_ptr": np.array([0, len(rows)], idtype),
        "rows": rows,
        "nnzr": len(rows),
        "indptr": indptr,
        "indices": indices,
    }


def dbsr_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_dbsr."""
    mask, feat = mask2(rng, case), FEATURES[case]
    (mb, nb), nnzb = mask.shape, int(mask.sum())
    return {
        **_stored_rows(mask, idtype),
        "a": values(rng, (nnzb, BLOCK, BLOCK), dtype),
        "b": fill(rng, case, (nb, BLOCK, feat), dtype),
        "c": garbage((mb, BLOCK, feat), dtype),
        "mb": mb,
        "nb": nb,
        "nnzb": nnzb,
        "feat": feat,
    }


def dbsr_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum of block products."""
    return _block_product(args, args["rows"][parents_of(args["indptr"])], args["indices"])


PROGRAMS = [
    Program("spmm_csc", make_spmm_csc, csc_inputs, csc_oracle, ("c",), scatter=True),
    Program("spmm_coo", make_spmm_coo, coo_inputs, coo_oracle, ("c",), scatter=True),
    Program(
        "spmm_coo_scatter",
        make_spmm_coo_scatter,
        coo_scatter_inputs,
        coo_oracle,
        ("c",),
        gpu=False,
        scatter=True,
    ),
    Program("spmm_bsr", make_spmm_bsr, bsr_inputs, bsr_oracle, ("c",)),
    Program("spmm_dbsr", make_spmm_dbsr, dbsr_inputs, dbsr_oracle, ("c",)),
]
