"""Readers of graphs from files, for users, the command line and the benchmarks.

>>> from sparsetir.data.graphs import load_graph
>>> load_graph("cora").shape
(2708, 2708)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparsetir.data.files import INTEGERS, KINDS, graph_name, layers, load_graph
from sparsetir.data.sparse_tensor import SparseTensor
from sparsetir.runtime.file_errors import GraphError, as_path, check_matrix, check_npz, reading

__all__ = ["KINDS", "GraphError", "graph_name", "layers", "load_graph", "load_relations"]

OF_RELATIONS = ("num_nodes", "src", "dst", "etype")


def load_relations(source: str | Path) -> SparseTensor:
    """Read a graph whose edges have relations, as a tensor by (relation, target, source).

    Parameters
    ----------
    source : str or Path
        An .npz file with `num_nodes`, a number, and `src`, `dst` and `etype`, (E,) integers.

    Returns
    -------
    SparseTensor
        Float32 values are the multiplicities of edges.

    Raises
    ------
    GraphError
        As from :func:`load_graph`.
    """
    path = as_path("load_relations", "source", source)
    with reading(str(path), GraphError):
        if not path.is_file():
            raise GraphError(
                f"{path}: no such file; a graph with relations is an .npz file of "
                f"{', '.join(OF_RELATIONS)}"
            )
        check_npz(path)
        with np.load(path) as arrays:
            missing = sorted({*OF_RELATIONS} - {*arrays.files})
            if missing:
                raise GraphError(f"{path}: has no {', '.join(missing)}")
            told, *coords = (arrays[name] for name in ("num_nodes", "etype", "dst", "src"))
        if told.size != 1 or told.dtype.kind not in "iu":
            raise GraphError(f"{path}: num_nodes: expected an integer, got {told.tolist()}")
        for name, ids in zip(("etype", "dst", "src"), coords, strict=True):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                got = f"{ids.dtype} of shape {ids.shape}"
                raise GraphError(f"{path}: {name}: {INTEGERS}, got {got}")
        nodes, relations = int(told.item()), 1 + int(coords[0].max(initial=-1))
        check_matrix(path, (relations, nodes, nodes), len(coords[0]))
        return SparseTensor(coords, None, (relations, nodes, nodes))
