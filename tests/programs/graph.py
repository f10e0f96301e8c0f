"""Graph learning: hypergraphs, relational products, attention."""

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
    finite,
    garbage,
    mask2,
    parents_of,
    scatter_sum,
    values,
)
from .matrix import csr_inputs

RELATIONS = 3


# Y[v] = sum over the hyperedges of v, and over the vertices w of each, of X[w].
make_hypergraph = making("hypergraph", """
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
""", X="V F", Y="V F")  # fmt: skip


def hypergraph_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of hypergraph."""
    mask, feat = mask2(rng, case), FEATURES[case]
    vertices, edges = mask.shape
    ve_ptr, ve_idx = csr(mask, idtype)
    ev_ptr, ev_idx = csr(mask.T, idtype)
    return {
        "x": fill(rng, case, (vertices, feat), dtype),
        "y": garbage((vertices, feat), dtype),
        "ve_ptr": ve_ptr,
        "ve_idx": ve_idx,
        "ev_ptr": ev_ptr,
        "ev_idx": ev_idx,
        "vertices": vertices,
        "edges": edges,
        "nnz": len(ve_idx),
        "feat": feat,
    }


def hypergraph_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Two sparse products, vertices to hyperedges and back."""
    x = args["x"].astype(np.float64)
    shape = (args["edges"], args["feat"])
    sums = scatter_sum(shape, parents_of(args["ev_ptr"]), x[args["ev_idx"]])
    return {"y": scatter_sum(x.shape, parents_of(args["ve_ptr"]), sums[args["ve_idx"]])}


def make_relational(dtype: str, idtype: str) -> Any:
    """Y[i] = sum over j of W[E[i, j]] X[j], with the relation E of each edge in a buffer."""
    Index = getattr(T, idtype)

    @T.prim_func
    def relational(
        etype: T.handle, w: T.handle, x: T.handle, y: T.handle, indptr: T.handle,
        indices: T.handle, m: Index, n: Index, nnz: Index, relations: Index, feat: Index,
        feat_in: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_ = T.dense_fixed(n, idtype)
        R = T.dense_fixed(relations, idtype)
        FO = T.dense_fixed(feat, idtype)
        FI = T.dense_fixed(feat_in, idtype)
        E = T.match_sparse_buffer(etype, (I, J), idtype)
        W = T.match_sparse_buffer(w, (R, FO, FI), dtype)
        X = T.match_sparse_buffer(x, (J_, FI), dtype)
        Y = T.match_sparse_buffer(y, (I, FO), dtype)
        with T.sp_iter([I, J, FO, FI], "SRSR", "relational") as [i, j, fo, fi]:
            with T.init():
                Y[i, fo] = 0.0
            Y[i, fo] = Y[i, fo] + W[E[i, j], fo, fi] * X[j, fi]

    return relational


def relational_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of relational."""
    args, feat, feat_in = csr_inputs(rng, case, dtype, idtype), FEATURES[case], 3
    del args["a"]
    return {
        **args,
        "etype": rng.integers(0, RELATIONS, args["nnz"]).astype(idtype),
        "w": values(rng, (RELATIONS, feat, feat_in), dtype),
        "x": fill(rng, case, (args["n"], feat_in), dtype),
        "y": garbage((args["m"], feat), dtype),
        "relations": RELATIONS,
        "feat": feat,
        "feat_in": feat_in,
    }


def relational_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """One small product per edge."""
    w, x = args["w"].astype(np.float64), args["x"].astype(np.float64)
    terms = (w[args["etype"]] * x[args["indices"]][:, None, :]).sum(axis=2)
    return {"y": scatter_sum(args["y"].shape, parents_of(args["indptr"]), terms)}


# Y[i, l] = sum of A[r, i, j] * X[j, k] * W[r, k, l], A a tensor by relation.
make_relational_csf = making("relational_csf", """
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
""", first="relations m n", A="R I J", X="J_ K", W="R K L", Y="I_ L")  # fmt: skip


def relational_csf_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of relational_csf; a row is stored for several relations."""
    rows, feat, feat_in = mask2(rng, case), FEATURES[case], 3
    m, n = rows.shape
    mask = (rng.random((RELATIONS, m, n)) < 0.5) & rows
    i_ptr, i_idx = csr(mask.any(axis=2), idtype)
    j_ptr, j_idx = csr(mask[mask.any(axis=2)], idtype)
    return {
        "a": values(rng, len(j_idx), dtype),
        "x": fill(rng, case, (n, feat_in), dtype),
        "w": values(rng, (RELATIONS, feat_in, feat), dtype),
        "y": garbage((m, feat), dtype),
        "i_ptr": i_ptr,
        "i_idx": i_idx,
        "j_ptr": j_ptr,
        "j_idx": j_idx,
        "relations": RELATIONS,
        "m": m,
        "n": n,
        "nnz_i": len(i_idx),
        "nnz_j": len(j_idx),
        "feat_in": feat_in,
        "feat": feat,
    }


def relational_csf_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum over the stored elements."""
    fiber = parents_of(args["j_ptr"])
    relation, rows = parents_of(args["i_ptr"])[fiber], args["i_idx"][fiber]
    a, x, w = (args[name].astype(np.float64) for name in "axw")
    left = a[:, None] * x[args["j_idx"]]
    terms = (left[:, :, None] * w[relation]).sum(axis=1)
    return {"y": scatter_sum(args["y"].shape, rows, terms)}


# OUT[i] = softmax of the stored elements of row i, in three iterations inside one over I.
make_row_softmax = making("row_softmax", """
TOP = T.alloc_sparse_buffer((I,), dtype)
TOTAL = T.alloc_sparse_buffer((I,), dtype)
with T.sp_iter([I], "S", "softmax") as [i]:
    with T.sp_iter([J], "R", "top") as [j]:
        with T.init():
            TOP[i] = T.min_value(dtype)
        TOP[i] = T.max(TOP[i], A[i, j])
    with T.sp_iter([J], "R", "total") as [j]:
        with T.init():
            TOTAL[i] = 0.0
        TOTAL[i] = TOTAL[i] + T.exp(A[i, j] - TOP[i])
    with T.sp_iter([J], "S", "divide") as [j]:
        OUT[i, j] = T.exp(A[i, j] - TOP[i]) / TOTAL[i]
""", A="I J", OUT="I J")  # fmt: skip


def row_softmax_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of row_softmax; the values are large enough to overflow without a maximum."""
    args = csr_inputs(rng, case, dtype, idtype)
    args["a"] = (args["a"] * 1000).astype(dtype)
    return {**args, "out": garbage(args["nnz"], dtype)}


def _softmax(scores: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Softmax of each row of stored elements, in float64."""
    out = np.zeros(len(scores))
    for start, stop in zip(indptr[:-1], indptr[1:], strict=True):
        if start < stop:
            powers = np.exp(scores[start:stop] - scores[start:stop].max())
            out[start:stop] = powers / powers.sum()
    return out


def row_softmax_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Softmax of each row."""
    return {"out": _softmax(args["a"].astype(np.float64), args["indptr"])}


def make_attention(dtype: str, idtype: str) -> Any:
    """O = softmax(scale * Q K^T on the pattern) V: SDDMM, softmax and SpMM in one function."""
    Index = getattr(T, idtype)

    @T.prim_func
    def attention(
        q: T.handle, k: T.handle, v: T.handle, out: T.handle, indptr: T.handle,
        indices: T.handle, m: Index, n: Index, nnz: Index, feat: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_ = T.dense_fixed(n, idtype)
        F = T.dense_fixed(feat, idtype)
        Q = T.match_sparse_buffer(q, (I, F), dtype)
        K = T.match_sparse_buffer(k, (J_, F), dtype)
        V = T.match_sparse_buffer(v, (J_, F), dtype)
        OUT = T.match_sparse_buffer(out, (I, F), dtype)
        S = T.alloc_sparse_buffer((I, J), dtype)
        P = T.alloc_sparse_buffer((I, J), dtype)
        TOP = T.alloc_sparse_buffer((I,), dtype)
        TOTAL = T.alloc_sparse_buffer((I,), dtype)
        with T.sp_iter([I, J, F], "SSR", "scores") as [i, j, f]:
            with T.init():
                S[i, j] = 0.0
            S[i, j] = S[i, j] + Q[i, f] * K[j, f] * T.cast(0.5, dtype)
        with T.sp_iter([I], "S", "softmax") as [i]:
            with T.sp_iter([J], "R", "top") as [j]:
                with T.init():
                    TOP[i] = T.min_value(dtype)
                TOP[i] = T.max(TOP[i], S[i, j])
            with T.sp_iter([J], "R", "total") as [j]:
                with T.init():
                    TOTAL[i] = 0.0
                TOTAL[i] = TOTAL[i] + T.exp(S[i, j] - TOP[i])
            with T.sp_iter([J], "S", "divide") as [j]:
                P[i, j] = T.exp(S[i, j] - TOP[i]) / TOTAL[i]
        with T.sp_iter([I, J, F], "SRS", "product") as [i, j, f]:
            with T.init():
                OUT[i, f] = 0.0
            OUT[i, f] = OUT[i, f] + P[i, j] * V[j, f]

    return attention


def attention_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of attention; only V may be non-finite."""
    args, feat = csr_inputs(rng, case, dtype, idtype), FEATURES[case]
    del args["a"]
    return {
        **args,
        "q": values(rng, (args["m"], feat), dtype),
        "k": values(rng, (args["n"], feat), dtype),
        "v": fill(rng, case, (args["n"], feat), dtype),
        "out": garbage((args["m"], feat), dtype),
        "feat": feat,
    }


def attention_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The three steps on arrays."""
    q, k, v = (args[name].astype(np.float64) for name in "qkv")
    rows, cols = parents_of(args["indptr"]), args["indices"]
    weights = _softmax((q[rows] * k[cols]).sum(axis=1) * 0.5, args["indptr"])
    return {"out": scatter_sum(args["out"].shape, rows, weights[:, None] * v[cols])}


PROGRAMS = [
    Program("hypergraph", make_hypergraph, hypergraph_inputs, hypergraph_oracle, ("y",)),
    Program("relational", make_relational, relational_inputs, relational_oracle, ("y",)),
    Program(
        "relational_csf",
        make_relational_csf,
        relational_csf_inputs,
        relational_csf_oracle,
        ("y",),
        scatter=True,
    ),
    finite("row_softmax", make_row_softmax, row_softmax_inputs, row_softmax_oracle, ("out",)),
    Program("attention", make_attention, attention_inputs, attention_oracle, ("out",)),
]
