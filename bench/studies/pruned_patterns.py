"""Matrices of the study of panels: patterns of pruned layers by shape and share of zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.data.graphs import GraphError

SHAPES = ((512, 512), (2048, 512), (512, 2048))  # those of DLMC's transformer
SMALL = ((64, 96), (32, 64))
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def random_layers(quick: bool) -> dict[tuple[int, int], dict[float, Any]]:
    """Elements at random places, by shape and share of zeros."""
    sparsities = SPARSITIES[1:4:2] if quick else SPARSITIES
    return {
        shape: {s: _valued(_random(shape, 1 - s)) for s in sparsities}
        for shape in (SMALL if quick else SHAPES)
    }


def layers_of(folder: Path) -> dict[tuple[int, int], dict[float, Any]]:
    """The first layer of each shape and share of zeros in the files of a folder.

    Where a shape has no layer with 60 % zeros but one with 50 %, a fifth of its elements is left
    out at random. Raises GraphError for a folder without layers.
    """
    found: dict[tuple[int, int], dict[float, Any]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            for key in (k for k in arrays.files if k.endswith(".indptr")):
                layer = key.removesuffix(".indptr")
                m, n = (int(x) for x in arrays[f"{layer}.shape"])
                shape = m, n
                indptr, indices = arrays[key], arrays[f"{layer}.indices"]
                sparsity = round(1 - len(indices) / max(1, shape[0] * shape[1]), 2)
                if shape in SHAPES and sparsity in SPARSITIES:
                    ones = np.ones(len(indices), "float32")
                    matrix = sp.csr_array((ones, indices, indptr), shape)
                    found.setdefault(shape, {}).setdefault(sparsity, _valued(matrix))
    for by_sparsity in found.values():
        if 0.5 in by_sparsity and 0.6 not in by_sparsity:
            by_sparsity[0.6] = _thinned(by_sparsity[0.5], 0.8)
    if not found:
        raise GraphError(f"{folder}: expected npz files of layers of {SHAPES}")
    return {shape: dict(sorted(found[shape].items())) for shape in sorted(found)}


def _random(shape: tuple[int, int], density: float) -> Any:
    return sp.csr_array((np.random.default_rng(0).random(shape) < density).astype("float32"))


def _thinned(matrix: Any, share: float) -> Any:
    """A matrix with a share of its elements."""
    kept = matrix.tocoo()
    mine = np.random.default_rng(0).random(matrix.nnz) < share
    rows, columns = (c[mine] for c in kept.coords)
    return sp.csr_array((kept.data[mine], (rows, columns)), matrix.shape)


def _valued(matrix: Any) -> Any:
    """The pattern with int32 indices in order and values in -0.5 .. 0.5."""
    matrix.sort_indices()
    values = np.random.default_rng(1).random(matrix.nnz, dtype="float32") - np.float32(0.5)
    index = (matrix.indices.astype("int32"), matrix.indptr.astype("int32"))
    return sp.csr_array((values, *index), matrix.shape)
