"""Sparse matrices from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

from sparsetir.datasets import load_cora


def graphs(paths: list[Path]) -> dict[str, Any]:
    """Cora and the given files: float32 CSR with int32 sorted indices, by name."""
    found = {"cora": load_cora()}
    for path in paths:
        found[path.stem] = _load(path)
    return {name: _plain(matrix) for name, matrix in found.items()}


def _load(path: Path) -> Any:
    """An npz file with `shape`, `indptr`, `indices` (and `data`, else ones), or an mtx file."""
    if path.suffix == ".mtx" or path.name.endswith(".mtx.gz"):
        return sp.csr_array(scipy.io.mmread(path))
    if path.suffix != ".npz":
        raise SystemExit(f"--graph: expected an npz or mtx file, got {path}")
    with np.load(path) as arrays:
        missing = {"shape", "indptr", "indices"} - set(arrays.files)
        if missing:
            raise SystemExit(f"--graph: {path} has no {', '.join(sorted(missing))}")
        indptr, indices = arrays["indptr"], arrays["indices"]
        data = arrays["data"] if "data" in arrays.files else np.ones(len(indices), "float32")
        shape = tuple(int(n) for n in arrays["shape"])
    return sp.csr_array((data, indices, indptr), shape=shape)


def _plain(matrix: Any) -> Any:
    matrix = matrix.astype("float32")
    matrix.sum_duplicates()
    matrix.indptr, matrix.indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    return matrix
