"""Sparse matrices and tensors from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

from sparsetir.datasets import load_cora
from sparsetir.formats import Pattern


def graphs(paths: list[Path]) -> dict[str, Any]:
    """Cora and the given files: float32 CSR with int32 sorted indices, by name."""
    return {"cora": _plain(load_cora()), **{path.stem: load_graph(path) for path in paths}}


def load_graph(path: Path) -> Any:
    """One file: float32 CSR with int32 sorted indices."""
    return _plain(_load(path))


def pattern_of(matrix: Any) -> Pattern:
    """The pattern of a matrix as `graphs` and `pruned` give it."""
    return Pattern.from_csr(matrix.indptr, matrix.indices, matrix.shape)


def values_of(matrix: Any) -> np.ndarray:
    """Its values; random ones where it only has a pattern, all ones."""
    if (matrix.data == 1).all():
        return np.random.default_rng(0).uniform(-1, 1, matrix.nnz).astype("float32")
    return matrix.data


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


def pruned(files: list[str], layers: int) -> dict[str, Any]:
    """Pruned weights from npz files that hold several: `<layer>.shape`, `.indptr`, `.indices`.

    files : a path, for `layers` of its layers, far from each other; or `path:layer` for that one
    """
    found = {}
    for text in files:
        path, _, wanted = text.partition(".npz:")
        path = Path(path if path.endswith(".npz") else f"{path}.npz")
        with np.load(path) as arrays:
            names = [n.removesuffix(".indptr") for n in arrays.files if n.endswith(".indptr")]
            if not names:
                raise SystemExit(f"--pruned: {path} has no arrays <layer>.indptr")
            if wanted and wanted not in names:
                raise SystemExit(f"--pruned: {path} has no layer {wanted}, but {', '.join(names)}")
            at = np.linspace(0, len(names) - 1, min(layers, len(names))).astype(int)
            for layer in [wanted] if wanted else [names[i] for i in at]:
                indptr, indices = arrays[f"{layer}.indptr"], arrays[f"{layer}.indices"]
                key = f"{layer}.data"
                data = arrays[key] if key in arrays.files else np.ones(len(indices), "float32")
                shape = tuple(int(n) for n in arrays[f"{layer}.shape"])
                matrix = sp.csr_array((data, indices, indptr), shape=shape)
                found[f"{path.stem}:{layer}"] = _plain(matrix)
    return found


def relations(paths: list[Path]) -> dict[str, Pattern]:
    """Graphs with relations: patterns over (relation, destination, source)."""
    found = {}
    for path in paths:
        with np.load(path) as arrays:
            missing = {"num_nodes", "src", "dst", "etype"} - set(arrays.files)
            if missing:
                raise SystemExit(f"--hetero: {path} has no {', '.join(sorted(missing))}")
            nodes = int(arrays["num_nodes"])
            edges = np.stack([arrays[k].astype("int32") for k in ("etype", "dst", "src")])
        edges = np.unique(edges, axis=1)
        found[path.stem] = Pattern(list(edges), (int(edges[0].max()) + 1, nodes, nodes))
    return found


def _plain(matrix: Any) -> Any:
    matrix = matrix.astype("float32")
    matrix.sum_duplicates()
    matrix.indptr, matrix.indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
    return matrix
