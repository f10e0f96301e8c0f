"""Data shipped with the package, for demonstrations and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

__all__ = ["SHIPPED", "NodeClassification", "load_cora", "load_cora_dataset"]


class NodeClassification(NamedTuple):
    """A node classification task on a graph of n nodes.

    Parameters
    ----------
    graph : (n, n) csr_array, float32
        A one for each edge from column to row.
    features : (n, d) csr_array, float32
        Features of each node.
    labels : (n,) ndarray, int64
        Classes, from 0.
    train, val, test : (n,) ndarray, bool
        Masks of the nodes for training, validation and test.
    """

    graph: csr_array
    features: csr_array
    labels: np.ndarray
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def load_cora() -> csr_array:
    """The Cora citation graph.

    Returns
    -------
    (2708, 2708) csr_array, float32
        10556 ones; sorted int32 indices.

    Notes
    -----
    For origin, licence and further contents of the file see `data/README.md` of this package.
    """
    arrays = _arrays_of_cora()
    return _ones(arrays["indptr"], arrays["indices"], arrays["shape"])


def load_cora_dataset() -> NodeClassification:
    """The Cora graph with bags of words, 7 classes, and the Planetoid split.

    Returns
    -------
    NodeClassification
        Features are (2708, 1433), zero or one; 140 nodes to train on, 500 to validate and 1000 to
        test on.

    Notes
    -----
    The literature divides features by the sums of their rows before training; this function does
    not.
    """
    arrays = _arrays_of_cora()
    words = arrays["feat_indices"].astype(np.int32)

    def mask(name: str) -> np.ndarray:
        out = np.zeros(len(arrays["labels"]), bool)
        out[arrays[name]] = True
        return out

    return NodeClassification(
        graph=_ones(arrays["indptr"], arrays["indices"], arrays["shape"]),
        features=_ones(arrays["feat_indptr"], words, arrays["feat_shape"]),
        labels=arrays["labels"].astype(np.int64),
        train=mask("train_idx"),
        val=mask("val_idx"),
        test=mask("test_idx"),
    )


def _arrays_of_cora() -> dict[str, np.ndarray]:
    file = resources.files("sparsetir") / "data" / "cora.npz"
    with resources.as_file(file) as path, np.load(path) as arrays:
        return dict(arrays)


def _ones(indptr: np.ndarray, indices: np.ndarray, shape: np.ndarray) -> csr_array:
    m, n = (int(size) for size in shape)
    return csr_array((np.ones(len(indices), np.float32), indices, indptr), shape=(m, n))


# Graphs that :func:`sparsetir.graphs.load_graph` knows by name.
SHIPPED: Mapping[str, Callable[[], csr_array]] = {"cora": load_cora}
