"""Matrices of the study of groups: generated ones, or files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.graphs import single
from bench.problems import weighted
from bench.studies.skew import random_rows
from sparsetir.data.graphs import GraphError, graph_name, load_graph

ENDINGS = (".npz", ".mtx", ".mtx.gz")


def generated(rows: int, mean: int) -> dict[str, Any]:
    """Square CSR matrices with about `mean * rows` elements, that differ in how rows are filled."""
    rng = np.random.default_rng(0)
    heavy = 1 + rng.pareto(1.5, rows)
    half = rng.permutation(rows) < rows // 2
    giant = np.full(rows, 0.75 * mean)
    giant[rows // 2] = 0.25 * mean * rows
    counts = {
        "even rows": np.full(rows, mean),
        "power law": mean * heavy / heavy.mean(),
        "half empty": np.where(half, 2 * mean, 0),
        "short rows": np.full(rows, max(1, mean // 4)),
        "one giant row": giant,
    }
    out = {name: random_rows(np.minimum(count, rows).astype("int64"), rows, rng)
           for name, count in counts.items()}  # fmt: skip
    return {**out, "band": _band(rows, mean, rng)}


def folder(path: Path) -> dict[str, Any]:
    """All files of a folder, by name; raises GraphError where there is none."""
    files = sorted(f for f in path.iterdir() if f.name.endswith(ENDINGS)) if path.is_dir() else []
    if not files:
        raise GraphError(f"{path}: expected a folder of {', '.join(ENDINGS)} files")
    return {graph_name(str(f)): weighted(single(load_graph(str(f)))) for f in files}


def _band(rows: int, mean: int, rng: np.random.Generator) -> Any:
    """Elements beside the diagonal."""
    first = np.clip(np.arange(rows) - mean // 2, 0, rows - mean)
    columns = (first[:, None] + np.arange(mean)).ravel().astype("int32")
    values = rng.uniform(-1, 1, len(columns)).astype("float32")
    indptr = np.arange(0, rows * mean + 1, mean, dtype="int32")
    return sp.csr_array((values, columns, indptr), (rows, rows))
