"""Matrices of anything that entrances take, of other libraries too, told apart by what they have.

No library is imported for that.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from sparsetir.data import sources
from sparsetir.data.sources import Stored, is_sparse
from sparsetir.runtime.arrays import is_array
from sparsetir.runtime.refusals import wrong


def read_matrix(
    who: str, name: str, data: object, values: object = None, shape: object = None
) -> Stored:
    """Read anything that :func:`sparsetir.data.read_matrix.adopted` takes.

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
    who: str,
    name: str,
    edges: object,
    values: object = None,
    shape: object = None,
    flip: bool = False,
) -> Stored:
    """Read (2, E) edges, sources first.

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


def _of_edges(who: str, name: str, edges: Edges, values: object, shape: object) -> Stored:
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


EXPECTED = (
    "a sparse matrix of scipy or torch, a SparseMatrix, an edge_index (2, E) or a pair "
    "(edge_index, size), a pair (rows, columns), a graph of PyG or DGL, or the name of a file"
)


class Edges(NamedTuple):
    """Elements of a matrix with a row for each target and a column for each source.

    index : (2, E) integers, sources first; or a pair of (E,) arrays
    size : (sources, targets), one number for both, or None
    values : (E,), or None for ones
    square : whether without a size there are as many sources as targets
    """

    index: Any
    size: Any = None
    values: Any = None
    square: bool = True


class Compressed(NamedTuple):
    """CSR: (m + 1,) row pointers, (nnz,) columns in row order, and (nnz,) values or None."""

    rowptr: Any
    col: Any
    shape: tuple[int, int]
    values: Any = None


def adopted(who: str, name: str, data: Any) -> object:
    """Data of any library as Edges, Compressed, or a sparse matrix of scipy or torch.

    data : one of

        - a sparse matrix of scipy or torch
        - (2, E) integers of any library with DLPack, or a pair of them and a size; a pair of (E,)
          integers, rows and columns
        - a file or a name, as :func:`sparsetir.graphs.load_graph` takes it
        - `Data` of PyG, or one relation of its `HeteroData`, with its `edge_weight` if there is one
        - a graph of DGL with one relation, without weights; a `dgl.sparse.SparseMatrix`
        - a `torch_sparse.SparseTensor`

    who, name : function and argument, as errors name them

    Raises TypeError and ValueError for what is none of these.
    """
    if isinstance(data, str | os.PathLike):
        return _loaded(who, name, data)
    if hasattr(data, "sparse_size") and hasattr(data, "as_tensor"):  # torch_geometric.EdgeIndex
        size = tuple(data.sparse_size())
        return Edges(data.as_tensor(), None if None in size else size)
    if is_sparse(data):
        return data
    if is_array(data):
        return Edges(data)
    if isinstance(data, tuple | list):
        if len(data) == 2:
            return _pair(who, name, *data)
        raise TypeError(
            f"{who}: argument '{name}': expected {EXPECTED}; got {len(data)} values in a "
            f"{type(data).__name__}"
        )
    if hasattr(data, "edge_index"):  # torch_geometric.data.Data, or one of its EdgeStorages
        return _of_pyg(data)
    if hasattr(data, "edge_types") and hasattr(data, "edge_items"):
        kinds = ", ".join(map(str, data.edge_types))
        raise ValueError(f"{who}: argument '{name}': expected one relation, as data[{kinds}]")
    if hasattr(data, "sparse_sizes") and hasattr(data, "csr"):  # torch_sparse.SparseTensor
        rowptr, col, values = data.csr()
        m, n = data.sparse_sizes()
        return Compressed(rowptr, col, (int(m), int(n)), values)
    if hasattr(data, "coo") and hasattr(data, "val") and hasattr(data, "shape"):  # dgl.sparse's
        rows, columns = data.coo()
        m, n = data.shape
        return Edges((columns, rows), (int(n), int(m)), data.val)
    if hasattr(data, "canonical_etypes") and callable(getattr(data, "edges", None)):  # DGL's graphs
        return _of_dgl(who, name, data)
    raise TypeError(f"{who}: argument '{name}': expected {EXPECTED}; got {type(data).__name__}")


def _loaded(who: str, name: str, path: Any) -> object:
    from sparsetir.data.graphs import GraphError, load_graph

    try:
        return load_graph(path)
    except GraphError as error:
        raise GraphError(f"{who}: argument '{name}': {error}") from error


def _pair(who: str, name: str, first: Any, second: Any) -> Edges:
    """Edges with a size, or rows and columns."""
    kinds = f"{type(first).__name__} and {type(second).__name__}"
    if not is_array(first):
        try:
            first = np.asarray(first)
        except (ValueError, RuntimeError):  # rows of many lengths, nested tensors
            first = np.zeros(())
    dims = len(first.shape)
    if dims == 2:
        return Edges(first, second)
    if dims != 1 or (not is_array(second) and not isinstance(second, tuple | list)):
        raise TypeError(f"{who}: argument '{name}': expected {EXPECTED}; got a pair of {kinds}")
    return Edges((second, first), square=False)


def _of_pyg(data: Any) -> Edges:
    size = getattr(data, "num_nodes", None)
    if callable(getattr(data, "size", None)) and getattr(data, "_key", None) is not None:
        size = data.size()  # of an EdgeStorage: those of sources and of targets
    return Edges(data.edge_index, size, getattr(data, "edge_weight", None))


def _of_dgl(who: str, name: str, graph: Any) -> Edges:
    kinds = list(graph.canonical_etypes)
    if len(kinds) != 1:
        one = kinds[0] if kinds else "relation"
        raise wrong(who, name, f"a graph with one relation, as graph[{one!r}]", len(kinds))
    sources, targets = graph.edges(order="eid")
    return Edges((sources, targets), (int(graph.num_src_nodes()), int(graph.num_dst_nodes())))
