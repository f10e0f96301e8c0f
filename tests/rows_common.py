"""Matrices and SpMM over positions, for the tests of how rows are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from csr_zoo import ZOO
from programs import PROGRAMS
from schedule_common import opened

__all__ = ["MATRICES", "check", "fused", "operands"]

FEAT = 5
# Rows over several blocks of 12, and empty ones where these end.
LENGTHS = {
    "at ends": [12, 0, 0, 12, 11, 0, 1, 0, 24, 0],
    "over blocks": [0, 50, 0, 0, 3, 31, 0],
    "one row": [40],
    "one row of one": [0, 0, 1],
}


def rows_of_lengths(lengths: list[int]) -> Any:
    indptr = np.cumsum([0, *lengths])
    columns = np.concatenate([np.arange(n) for n in lengths]).astype("int64")
    values = np.arange(1, indptr[-1] + 1, dtype="float32")
    return sp.csr_array((values, columns, indptr), shape=(len(lengths), max(lengths)))


MATRICES = {**ZOO, **{name: rows_of_lengths(lengths) for name, lengths in LENGTHS.items()}}


def operands(matrix: Any, idtype: str, feat: int = FEAT) -> dict[str, Any]:
    csr = sp.csr_array(matrix)
    csr.sort_indices()
    rng = np.random.default_rng(0)
    (m, n), b = csr.shape, rng.uniform(-1, 1, (csr.shape[1], feat)).astype("float32")
    return {
        "a": csr.data.astype("float32"), "b": b, "c": np.full((m, feat), np.nan, "float32"),
        "indptr": csr.indptr.astype(idtype), "indices": csr.indices.astype(idtype), "m": m, "n": n,
        "nnz": csr.nnz, "feat": feat,
    }  # fmt: skip


def check(run: Callable[[dict[str, Any]], Any], idtype: str) -> None:
    """The C that `run` computes, on all matrices."""
    for name, matrix in MATRICES.items():
        args = operands(matrix, idtype)
        want = sp.csr_array(matrix) @ args["b"].astype("float64")
        np.testing.assert_allclose(run(args), want, rtol=1e-4, atol=1e-4, err_msg=name)


def fused(rows: str, idtype: str = "int32", **options: Any) -> tuple[Any, Any, Any, Any]:
    """A schedule of SpMM over positions, its iteration, and its loops over positions and k."""
    sch, it, (i, j, k) = opened(PROGRAMS["spmm"].make("float32", idtype))
    return sch, it, sch.positions(sch.sparse_fuse(it, [i, j]), rows=rows, **options), k
