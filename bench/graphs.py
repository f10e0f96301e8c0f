"""Sparse matrices and tensors from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.data.graphs import GraphError, graph_name, load_graph, load_relations
from sparsetir.data.graphs import layers as layers_of
from sparsetir.formats import Pattern


def graphs(paths: list[Path]) -> dict[str, Any]:
    """Cora and the given graphs: float32 CSR with int32 sorted indices, by name."""
    return {graph_name(p): single(load_graph(p)) for p in ["cora", *paths]}


def single(matrix: Any) -> Any:
    """The matrix with float32 values."""
    return matrix.astype("float32")


def pattern_of(matrix: Any) -> Pattern:
    """The pattern of a matrix as `graphs` and `pruned` give it."""
    return Pattern.from_csr(matrix.indptr, matrix.indices, matrix.shape)


def values_of(matrix: Any) -> np.ndarray:
    """Its values; random ones where it only has a pattern, all ones."""
    if (matrix.data == 1).all():
        return np.random.default_rng(0).uniform(-1, 1, matrix.nnz).astype("float32")
    return matrix.data


def pruned(files: list[str], layers: int) -> dict[str, Any]:
    """Pruned weights from npz files that hold several: `<layer>.shape`, `.indptr`, `.indices`.

    files : a path, for `layers` of its layers, far from each other; or `path:layer` for that one
    """
    found = {}
    for text in files:
        path, _, wanted = text.partition(".npz:")
        path = Path(path if path.endswith(".npz") else f"{path}.npz")
        names = [wanted] if wanted else layers_of(path)
        if not names:
            raise GraphError(f"{path}: has no arrays <layer>.indptr")
        at = np.linspace(0, len(names) - 1, min(layers, len(names))).astype(int)
        for layer in [names[i] for i in at]:
            one = f"{path}:{layer}"
            found[graph_name(one)] = single(load_graph(one))
    return found


def relations(paths: list[Path]) -> dict[str, Pattern]:
    """Graphs with relations: patterns over (relation, destination, source)."""
    return {path.stem: load_relations(path).pattern for path in paths}
