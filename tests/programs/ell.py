"""Formats with the same number of slots in each row: ELL (row maps, blocks, padding) and DIA."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

from small import making

from .common import FEATURES, Arrays, Program, fill, finite, garbage, mask2, scatter_sum, values

BLOCK = 2


def slots(mask: np.ndarray, idtype: str) -> np.ndarray:
    """(rows, longest row) columns of a pattern, padded with -1 (one slot wider than needed)."""
    width = int(mask.sum(axis=1).max(initial=0)) + 1
    out = np.full((mask.shape[0], width), -1, idtype)
    for row, line in zip(out, mask, strict=True):
        cols = np.nonzero(line)[0]
        row[: len(cols)] = cols
    return out


# C += A B for the rows that `rowmap` lists, each with `cols` slots; C is zeroed first.
make_spmm_ell = making("spmm_ell", """
with T.sp_iter([O, I, J, K], "SSRS", "spmm") as [o, i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[o, i, j] * B[j, k]
""", """
O = T.dense_fixed(1)
I = T.sparse_fixed(O, (m, rows), rowmap)
J = T.sparse_fixed(I, (n, cols), indices)
I_ = T.dense_fixed(m)
J_ = T.dense_fixed(n)
K
""", first="m n", A="O I J", B="J_ K", C="I_ K")  # fmt: skip


def ell_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_ell; padded slots hold NaN in `a`."""
    mask, feat = mask2(rng, case), FEATURES[case]
    rowmap = np.nonzero(mask.any(axis=1))[0].astype(idtype)
    indices = slots(mask[rowmap], idtype)
    a = values(rng, indices.size, dtype)
    a[indices.reshape(-1) < 0] = np.nan
    m, n = mask.shape
    return {
        "a": a,
        "b": fill(rng, case, (n, feat), dtype),
        "c": garbage((m, feat), dtype),
        "rowmap": rowmap,
        "indices": indices.reshape(-1),
        "m": m,
        "n": n,
        "rows": len(rowmap),
        "cols": indices.shape[1],
        "feat": feat,
    }


def ell_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Sum over the slots that are no padding."""
    stored = args["indices"] >= 0
    terms = args["a"].astype(np.float64)[:, None] * args["b"][args["indices"]]
    rows = np.repeat(args["rowmap"], args["cols"])
    return {"c": scatter_sum(args["c"].shape, rows[stored], terms[stored])}


# Y[i] = the largest stored value of row i, the smallest number where there is none.
make_row_max_ell = making("row_max_ell", """
with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
    with T.init():
        Y[i] = T.min_value(dtype)
    Y[i] = T.max(Y[i], A[i, j])
""", "J = T.sparse_fixed(I, (n, cols), indices)", A="I J", Y="I")  # fmt: skip


def row_max_ell_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of row_max_ell: stored values below -1, and 1 in the padded slots."""
    mask = mask2(rng, case)
    indices = slots(mask, idtype).reshape(-1)
    a = (values(rng, len(indices), dtype) - 2).astype(dtype)
    a[indices < 0] = 1
    m, n = mask.shape
    return {
        "a": a,
        "y": garbage(m, dtype),
        "indices": indices,
        "m": m,
        "n": n,
        "cols": len(indices) // m,
    }


def row_max_ell_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Maximum over the slots that are no padding."""
    lowest = float(np.finfo(args["a"].dtype).min)
    stored = np.where(args["indices"] >= 0, args["a"].astype(np.float64), lowest)
    return {"y": stored.reshape(args["m"], -1).max(axis=1)}


def make_spmm_dia(dtype: str, idtype: str) -> Any:
    """C = A B, A by diagonals: diagonal d holds A[i, i + off[d]] at column i + off[d]."""
    Index = getattr(T, idtype)

    @T.prim_func
    def spmm_dia(
        a: T.handle, b: T.handle, c: T.handle, offsets: T.handle,
        m: Index, n: Index, diagonals: Index, feat: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        D = T.dense_fixed(diagonals, idtype)
        J = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (D, J), dtype)
        OFF = T.match_sparse_buffer(offsets, (D,), idtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, D, K], "SRS", "spmm") as [i, d, k]:
            with T.init():
                C[i, k] = 0.0
            C[i, k] = C[i, k] + A[d, i + OFF[d]] * B[i + OFF[d], k]

    return spmm_dia


def dia_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of spmm_dia; offsets reach beyond the matrix on both sides."""
    m, n = mask2(rng, case).shape
    count = 0 if case == "empty" else 5
    offsets = rng.permutation(np.arange(-m, n + 1))[:count].astype(idtype)
    feat = FEATURES[case]
    return {
        "a": values(rng, (len(offsets), n), dtype),
        "b": fill(rng, case, (n, feat), dtype),
        "c": garbage((m, feat), dtype),
        "offsets": offsets,
        "m": m,
        "n": n,
        "diagonals": len(offsets),
        "feat": feat,
    }


def dia_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Each diagonal where it crosses the matrix."""
    d, j = np.indices((args["diagonals"], args["n"])).reshape(2, -1)
    i = j - args["offsets"][d]
    inside = (i >= 0) & (i < args["m"])
    terms = args["a"][d[inside], j[inside]].astype(np.float64)[:, None] * args["b"][j[inside]]
    return {"c": scatter_sum(args["c"].shape, i[inside], terms)}


PROGRAMS = [
    Program("spmm_dia", make_spmm_dia, dia_inputs, dia_oracle, ("c",)),
    Program("spmm_ell", make_spmm_ell, ell_inputs, ell_oracle, ("c",)),
    finite("row_max_ell", make_row_max_ell, row_max_ell_inputs, row_max_ell_oracle, ("y",)),
]
