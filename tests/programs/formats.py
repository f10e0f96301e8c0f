"""Sparse times dense matrix in other formats: CSC, COO, BSR, ELL, DCSR, DBSR."""

from __future__ import annotations

import numpy as np

from .common import Arrays, csr_arrays, mask2, product, program, rows_of, scatter_sum, values

BLOCK = 3


def _csc(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    arrays = csr_arrays(mask2(rng, case).T, idtype, m="n", n="m")
    return {**arrays, "a": values(rng, arrays["nnz"], dtype)}


def _coo(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Some coordinates come twice."""
    mask = mask2(rng, case)
    rows, cols = np.nonzero(mask)
    order = np.sort(np.concatenate([np.arange(len(rows)), np.arange(0, len(rows), 3)]))
    rows, cols = rows[order].astype(idtype), cols[order].astype(idtype)
    nnz, (m, n) = len(rows), mask.shape
    args = {"a": values(rng, nnz, dtype), "indptr": np.array([0, nnz], idtype), "rows": rows}
    return {**args, "cols": cols, "m": m, "n": n, "nnz": nnz}


def _shuffled(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args = _coo(rng, case, dtype, idtype)
    order = rng.permutation(args["nnz"])
    return {**args, "rows": args["rows"][order], "cols": args["cols"][order]}


def _blocks(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    arrays = csr_arrays(mask2(rng, case), idtype, nnz="nnzb", m="mb", n="nb")
    a = values(rng, (arrays["nnzb"], BLOCK, BLOCK), dtype)
    sizes = {"m": arrays["mb"] * BLOCK, "n": arrays["nb"] * BLOCK, "block": BLOCK}
    return {**arrays, **sizes, "a": a}


def _stored_blocks(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Without empty rows."""
    mask = mask2(rng, case)
    rows = np.nonzero(mask.any(axis=1))[0].astype(idtype)
    arrays = csr_arrays(mask[rows], idtype, nnz="nnzb", m="nnzr", n="nb")
    a = values(rng, (arrays["nnzb"], BLOCK, BLOCK), dtype)
    stored = {"row_ptr": np.array([0, len(rows)], idtype), "rows": rows, "mb": len(mask)}
    return {**arrays, **stored, "a": a, "block": BLOCK}


def _block_product(args: Arrays, rows: np.ndarray) -> np.ndarray:
    """A B from the stored blocks of A."""
    block = args["a"].shape[1]
    b = args["b"].reshape(-1, block, args["feat"])
    terms = (args["a"][:, :, :, None] * b[args["indices"]][:, None]).sum(axis=2)
    total = scatter_sum((args["mb"], block, args["feat"]), rows, terms)
    return total.reshape(args["c"].shape)


PROGRAMS = [
    # C = A B, A by columns: many columns write one row of C.
    program("spmm_csc", """
with T.sp_iter([J, I, K], "RSS", "spmm") as [j, i, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[j, i] * B[j, k]
""", """
J = T.dense_fixed(n)
I = T.sparse_variable(J, (m, nnz), (indptr, indices))
I_ = T.dense_fixed(m)
K
""", _csc, lambda args: product(args, args["indices"], rows_of(args)), "m", scatter=True,
        A="J I", B="J K", C="I_ K", b="fill n feat", c="out m feat"),
    # C = A B, A by coordinates sorted by row; duplicates add up.
    program("spmm_coo", """
with T.sp_iter([O, I, J, K], "SSRS", "spmm") as [o, i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[o, i, j] * B[j, k]
""", """
O = T.dense_fixed(1)
I = T.sparse_variable(O, (m, nnz), (indptr, rows), unique=False)
J = T.sparse_fixed(I, (n, 1), cols)
I_ = T.dense_fixed(m)
J_ = T.dense_fixed(n)
K
""", _coo, lambda args: product(args, args["rows"], args["cols"]), "m n", scatter=True,
        A="O I J", B="J_ K", C="I_ K", b="fill n feat", c="out m feat"),
    # C = A B, A by coordinates in any order, given as plain integer buffers.
    program("spmm_coo_scatter", """
with T.sp_iter([I, K], "SS", "zero") as [i, k]:
    C[i, k] = 0.0
with T.sp_iter([E, K], "SS", "scatter") as [e, k]:
    C[ROWS[e], k] = C[ROWS[e], k] + A[e] * B[COLS[e], k]
""", """
E = T.dense_fixed(nnz)
I
J = T.dense_fixed(n)
K
""", _shuffled, lambda args: product(args, args["rows"], args["cols"]), "a b c m n",
        gpu=False, scatter=True, A="E", B="J K", C="I K", ROWS="E idtype", COLS="E idtype",
        b="fill n feat", c="out m feat"),
    # C = A B, A in blocks; B and C are indexed by affine expressions.
    program("spmm_bsr", """
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
""", _blocks, lambda args: _block_product(args, rows_of(args)),
        A="IO JO II JI", B="J K", C="I K", b="fill n feat", c="out m feat"),
    # C = A B, A in blocks, empty rows of blocks left out; B and C in blocks too.
    program("spmm_dbsr", """
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
""", _stored_blocks, lambda args: _block_product(args, args["rows"][rows_of(args)]), "mb nb",
        A="O IO JO II JI", B="JO_ JI K", C="IO_ II K", b="fill nb block feat",
        c="out mb block feat"),
]  # fmt: skip
