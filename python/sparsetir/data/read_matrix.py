"""Matrices of anything that entrances take, on the host."""

from __future__ import annotations

from typing import Any

from sparsetir.data import sources
from sparsetir.data.foreign import Compressed, Edges, adopted
from sparsetir.data.sources import Stored
from sparsetir.runtime.refusals import wrong


def read_matrix(who: str, name: str, data: Any, values: Any = None, shape: Any = None) -> Stored:
    """Of anything that :func:`sparsetir.data.foreign.adopted` takes.

    values, shape : of edges and of pairs; others have their own
    who, name : function and argument, as errors name them
    """
    found = adopted(who, name, data)
    if isinstance(found, Edges):
        return _of_edges(who, name, found, values, shape)
    if isinstance(found, Compressed):
        if values is not None:
            raise ValueError(
                f"{who}: argument 'values': expected none beside {type(data).__name__}, which has "
                "its own"
            )
        return sources.from_compressed(
            who, found.rowptr, found.col, found.values, found.shape if shape is None else shape
        )
    return sources.read(who, name, found, values, shape)


def read_edges(
    who: str, name: str, edges: Any, values: Any = None, shape: Any = None, flip: bool = False
) -> Stored:
    """Of (2, E) edges, sources first.

    shape : of the matrix; by default square, for the largest node
    flip : a row for each source, where it is one for each target
    """
    index = sources.to_host(who, name, edges)
    if index.ndim != 2 or len(index) != 2:
        expected = "a sparse matrix or an edge_index of shape (2, E)"
        raise wrong(who, name, expected, f"shape {index.shape}; see SparseMatrix.from_dense")
    if shape is None and index.dtype.kind in "iu":
        shape = (int(index.max()) + 1 if index.size else 0,) * 2
    coords = index if flip else index[::-1]
    return sources.from_coords(who, name, list(coords), values, shape)


def _of_edges(who: str, name: str, edges: Edges, values: Any, shape: Any) -> Stored:
    if values is None:
        values = edges.values
    elif edges.values is not None:
        raise ValueError(f"{who}: argument 'values': expected none beside a graph with weights")
    if shape is None and edges.size is not None:
        size = edges.size
        ends = tuple(size) if isinstance(size, tuple | list) else (size, size)
        shape = sources.check_shape(who, ends[::-1], 2)
    if isinstance(edges.index, tuple):
        columns, rows = edges.index
        return sources.from_coords(who, name, [rows, columns], values, shape)
    return read_edges(who, name, edges.index, values, shape)
