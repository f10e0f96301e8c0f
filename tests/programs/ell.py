"""Formats with the same number of slots in each row: ELL (row maps, blocks, padding) and DIA."""

from __future__ import annotations

import numpy as np

from .common import FINITE, Arrays, mask2, program, scatter_sum, values


def slots(mask: np.ndarray, idtype: str) -> np.ndarray:
    """(rows, longest row) columns of a pattern, padded with -1 (one slot wider than needed)."""
    width = int(mask.sum(axis=1).max(initial=0)) + 1
    out = np.full((mask.shape[0], width), -1, idtype)
    for row, line in zip(out, mask, strict=True):
        cols = np.nonzero(line)[0]
        row[: len(cols)] = cols
    return out


def _ell(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Padded slots hold NaN in `a`."""
    mask = mask2(rng, case)
    rowmap = np.nonzero(mask.any(axis=1))[0].astype(idtype)
    columns_of = slots(mask[rowmap], idtype)
    rows, cols, indices = *columns_of.shape, columns_of.reshape(-1)
    a = np.where(indices < 0, np.nan, values(rng, indices.size, dtype)).astype(dtype)
    sizes = {"m": mask.shape[0], "n": mask.shape[1], "rows": rows, "cols": cols}
    return {"a": a, "rowmap": rowmap, "indices": indices, **sizes}


def _ell_product(args: Arrays) -> np.ndarray:
    """Sum over the slots that are no padding."""
    stored = args["indices"] >= 0
    terms = args["a"][:, None] * args["b"][args["indices"]]
    rows = np.repeat(args["rowmap"], args["cols"])
    return scatter_sum(args["c"].shape, rows[stored], terms[stored])


def _all_rows(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Stored values below -1, and 1 in the padded slots."""
    mask = mask2(rng, case)
    indices = slots(mask, idtype).reshape(-1)
    a = np.where(indices < 0, 1, values(rng, len(indices), dtype) - 2).astype(dtype)
    m, n = mask.shape
    sizes = {"m": m, "n": n, "cols": len(indices) // m, "slots": len(indices)}
    return {"a": a, "indices": indices, **sizes}


def _largest(args: Arrays) -> np.ndarray:
    stored = np.where(args["indices"] >= 0, args["a"], float(np.finfo(args["dtype"]).min))
    return stored.reshape(args["m"], -1).max(axis=1)


def _distances(args: Arrays) -> np.ndarray:
    """Padded slots keep their previous values."""
    rows, stored = np.repeat(np.arange(args["m"]), args["cols"]), args["indices"] >= 0
    between = args["x"][rows] - args["y"][args["indices"]]
    return np.where(stored, (between**2).sum(axis=1), args["s"])


def _diagonals(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Offsets reach beyond the matrix on both sides."""
    m, n = mask2(rng, case).shape
    count = 0 if case == "empty" else 5
    offsets = rng.permutation(np.arange(-m, n + 1))[:count].astype(idtype)
    return {"offsets": offsets, "m": m, "n": n, "diagonals": len(offsets)}


def _diagonal_product(args: Arrays) -> np.ndarray:
    """Each diagonal where it crosses the matrix."""
    d, j = np.indices((args["diagonals"], args["n"])).reshape(2, -1)
    i = j - args["offsets"][d]
    inside = (i >= 0) & (i < args["m"])
    terms = args["a"][d[inside], j[inside]][:, None] * args["b"][j[inside]]
    return scatter_sum(args["c"].shape, i[inside], terms)


PROGRAMS = [
    # C = A B, A by diagonals: diagonal d holds A[i, i + offsets[d]] at column i + offsets[d].
    program("spmm_dia", """
with T.sp_iter([I, D, K], "SRS", "spmm") as [i, d, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[d, i + OFFSETS[d]] * B[i + OFFSETS[d], k]
""", """
I
D = T.dense_fixed(diagonals)
J = T.dense_fixed(n)
K
""", _diagonals, _diagonal_product, "a b c m n", A="D J", OFFSETS="D idtype", B="J K", C="I K",
        a="values diagonals n", b="fill n feat", c="out m feat"),
    # C += A B for the rows that `rowmap` lists, each with `cols` slots; C is zeroed first.
    program("spmm_ell", """
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
""", _ell, _ell_product, "m n", A="O I J", B="J_ K", C="I_ K", b="fill n feat", c="out m feat"),
    # Y[i] = the largest stored value of row i, the smallest number where there is none.
    program("row_max_ell", """
with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
    with T.init():
        Y[i] = T.min_value(dtype)
    Y[i] = T.max(Y[i], A[i, j])
""", "J = T.sparse_fixed(I, (n, cols), indices)", _all_rows, _largest, cases=FINITE,
        A="I J", Y="I", y="out m"),
    # S = squares of the distances to the neighbours of each point.
    program("distances_ell", """
with T.sp_iter([I, J, K], "SSR", "distances") as [i, j, k]:
    with T.init():
        S[i, j] = 0.0
    S[i, j] = S[i, j] + (X[i, k] - Y[j, k]) * (X[i, k] - Y[j, k])
""", "I\nJ = T.sparse_fixed(I, (n, cols), indices)\nN\nK", _all_rows, _distances, cases=FINITE,
        X="I K", Y="N K", S="I J", x="fill m feat", y="fill n feat", s="out slots"),
]  # fmt: skip
