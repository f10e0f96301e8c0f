"""Graph learning: hypergraphs, relational products, attention."""

from __future__ import annotations

import numpy as np

from .common import (
    FINITE,
    Arrays,
    csr,
    csr_arrays,
    mask2,
    program,
    rows_of,
    scatter_sum,
    values,
)  # fmt: skip
from .matrix import csr_inputs


def _both_ways(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    mask = mask2(rng, case)
    args = csr_arrays(mask, idtype, "ve_ptr", "ve_idx", m="vertices", n="edges")
    return args | csr_arrays(mask.T, idtype, "ev_ptr", "ev_idx", m="edges", n="vertices")


def _two_hops(args: Arrays) -> np.ndarray:
    """Two sparse products, vertices to hyperedges and back."""
    shape = (args["edges"], args["feat"])
    sums = scatter_sum(shape, rows_of(args, "ev_ptr"), args["x"][args["ev_idx"]])
    return scatter_sum(args["x"].shape, rows_of(args, "ve_ptr"), sums[args["ve_idx"]])


def _edge_products(args: Arrays) -> np.ndarray:
    """A small product per edge."""
    terms = (args["w"][args["etype"]] * args["x"][args["indices"]][:, None, :]).sum(axis=2)
    return scatter_sum(args["y"].shape, rows_of(args), terms)


def _relations(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """A row is stored for several relations."""
    rows = mask2(rng, case)
    mask = (rng.random((3, *rows.shape)) < 0.5) & rows
    args = csr_arrays(mask[mask.any(axis=2)], idtype, "j_ptr", "j_idx", "nnz_j", n="n")
    i_ptr, i_idx = csr(mask.any(axis=2), idtype)
    args |= {"i_ptr": i_ptr, "i_idx": i_idx, "nnz_i": len(i_idx), "m": len(rows)}
    return {**args, "a": values(rng, args["nnz_j"], dtype)}


def _relation_sums(args: Arrays) -> np.ndarray:
    fiber = rows_of(args, "j_ptr")
    left = args["a"][:, None] * args["x"][args["j_idx"]]
    terms = (left[:, :, None] * args["w"][rows_of(args, "i_ptr")[fiber]]).sum(axis=1)
    return scatter_sum(args["y"].shape, args["i_idx"][fiber], terms)


def _large(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Values that overflow without a maximum."""
    args = csr_inputs(rng, case, dtype, idtype)
    return {**args, "a": (args["a"] * 1000).astype(dtype)}


def _softmax(scores: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Softmax of each row of stored elements."""
    out = np.zeros(len(scores))
    for start, stop in zip(indptr[:-1], indptr[1:], strict=True):
        if start < stop:
            powers = np.exp(scores[start:stop] - scores[start:stop].max())
            out[start:stop] = powers / powers.sum()
    return out


def _attention(args: Arrays) -> np.ndarray:
    rows, cols = rows_of(args), args["indices"]
    weights = _softmax((args["q"][rows] * args["k"][cols]).sum(axis=1) * 0.5, args["indptr"])
    return scatter_sum(args["out"].shape, rows, weights[:, None] * args["v"][cols])


SOFTMAX = """
with T.sp_iter([I], "S", "softmax") as [i]:
    with T.sp_iter([J], "R", "top") as [j]:
        with T.init():
            TOP[i] = T.min_value(dtype)
        TOP[i] = T.max(TOP[i], {0}[i, j])
    with T.sp_iter([J], "R", "total") as [j]:
        with T.init():
            TOTAL[i] = 0.0
        TOTAL[i] = TOTAL[i] + T.exp({0}[i, j] - TOP[i])
    with T.sp_iter([J], "S", "divide") as [j]:
        {1}[i, j] = T.exp({0}[i, j] - TOP[i]) / TOTAL[i]
"""
PROGRAMS = [
    # Y[v] = sum over the hyperedges of v, and over the vertices w of each, of X[w].
    program("hypergraph", """
with T.sp_iter([V, VE, T.attach(EV, VE), F], "SRRS", "two_hop") as [v, e, w, f]:
    with T.init():
        Y[v, f] = 0.0
    Y[v, f] = Y[v, f] + X[w, f]
""", """
V = T.dense_fixed(vertices)
VE = T.sparse_variable(V, (edges, nnz), (ve_ptr, ve_idx))
E = T.dense_fixed(edges)
EV = T.sparse_variable(E, (vertices, nnz), (ev_ptr, ev_idx))
F = T.dense_fixed(feat)
""", _both_ways, _two_hops, X="V F", Y="V F", x="fill vertices feat", y="out vertices feat"),
    # Y[i] = sum over j of W[ETYPE[i, j]] X[j], with the relation of each edge in a buffer.
    program("relational", """
with T.sp_iter([I, J, FO, FI], "SRSR", "relational") as [i, j, fo, fi]:
    with T.init():
        Y[i, fo] = 0.0
    Y[i, fo] = Y[i, fo] + W[ETYPE[i, j], fo, fi] * X[j, fi]
""", """
J_ = T.dense_fixed(n)
R = T.dense_fixed(relations)
FO = T.dense_fixed(feat)
FI = T.dense_fixed(feat_in)
""", csr_inputs, _edge_products, ETYPE="I J idtype", W="R FO FI", X="J_ FI", Y="I FO",
        etype="below relations nnz", w="values relations feat feat_in", x="fill n feat_in",
        y="out m feat"),
    # Y[i, l] = sum of A[r, i, j] * X[j, k] * W[r, k, l], A a tensor by relation.
    program("relational_csf", """
with T.sp_iter([R, I, J, K, L], "RSRRS", "relational") as [r, i, j, k, l]:
    with T.init():
        Y[i, l] = 0.0
    Y[i, l] = Y[i, l] + A[r, i, j] * X[j, k] * W[r, k, l]
""", """
R = T.dense_fixed(relations)
I = T.sparse_variable(R, (m, nnz_i), (i_ptr, i_idx))
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
I_ = T.dense_fixed(m)
J_ = T.dense_fixed(n)
K = T.dense_fixed(feat_in)
L = T.dense_fixed(feat)
""", _relations, _relation_sums, "relations m n", scatter=True,
        A="R I J", X="J_ K", W="R K L", Y="I_ L",
        x="fill n feat_in", w="values relations feat_in feat", y="out m feat"),
    # OUT[i] = softmax of the stored elements of row i, in three iterations inside one over I.
    program("row_softmax", """
TOP = T.alloc_sparse_buffer((I,), dtype)
TOTAL = T.alloc_sparse_buffer((I,), dtype)
""" + SOFTMAX.format("A", "OUT"), "", _large, lambda args: _softmax(args["a"], args["indptr"]),
        cases=FINITE, A="I J", OUT="I J", out="out nnz"),
    # OUT = softmax(0.5 Q K^T on the pattern) V: SDDMM, softmax and SpMM; only V has infinities.
    program("attention", """
S = T.alloc_sparse_buffer((I, J), dtype)
P = T.alloc_sparse_buffer((I, J), dtype)
TOP = T.alloc_sparse_buffer((I,), dtype)
TOTAL = T.alloc_sparse_buffer((I,), dtype)
with T.sp_iter([I, J, F], "SSR", "scores") as [i, j, f]:
    with T.init():
        S[i, j] = 0.0
    S[i, j] = S[i, j] + Q[i, f] * K[j, f] * T.cast(0.5, dtype)
""" + SOFTMAX.format("S", "P") + """
with T.sp_iter([I, J, F], "SRS", "product") as [i, j, f]:
    with T.init():
        OUT[i, f] = 0.0
    OUT[i, f] = OUT[i, f] + P[i, j] * V[j, f]
""", "J_ = T.dense_fixed(n)\nF = T.dense_fixed(feat)", csr_inputs, _attention,
        Q="I F", K="J_ F", V="J_ F", OUT="I F",
        q="values m feat", k="values n feat", v="fill n feat", out="out m feat"),
]  # fmt: skip
