"""Readers of graph files of PyTorch Geometric and DGL, by torch and dgl."""

from __future__ import annotations

import importlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.data.column_names import weight_of
from sparsetir.data.graph_edges import from_edges
from sparsetir.extras import need
from sparsetir.runtime.arrays import is_torch, to_host
from sparsetir.runtime.file_errors import ELEMENT_BYTES, GraphError, check_npz, check_size

ENDINGS = (".pt", ".bin", ".dgl")
IN_FOLDERS = ("processed/data.pt", "data.pt", "graph.dgl", "graph.bin", "graphs.bin")
# Classes in files of `Data`, which are read without PyG, as objects with attributes only.
PYG = ("data.Data", "data.DataEdgeAttr", "data.DataTensorAttr", "storage.GlobalStorage")
NOTHING = "nothing named edge_index of shape (2, E), and no sparse matrix"


class _Plain:
    pass


def file_of(folder: Path) -> Path:
    """The file of a graph in a folder of a data set."""
    for name in IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise GraphError(
        f"{folder}: expected a folder of PyG or DGL, with {', '.join(IN_FOLDERS)}; got one with "
        "none of these"
    )


def read(path: Path) -> sp.coo_array:
    """Read a matrix; rows are targets and columns sources."""
    return _read_torch(path) if path.suffix.lower() == ".pt" else _read_dgl(path)


def _read_torch(path: Path) -> sp.coo_array:
    """Read `edge_index` and weights, or a sparse tensor; GraphError for other objects."""
    need("load_graph", "torch", "torch", title="PyTorch")
    import torch

    if zipfile.is_zipfile(path):
        check_npz(path)
    plain: Any = [(_Plain, f"torch_geometric.data.{name}") for name in PYG]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(plain):
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise GraphError(f"{path}: is not a file of torch.save, or is damaged") from error
        raise GraphError(
            f"{path}: expected tensors in lists and dicts, got {named[1]}, of which no code is "
            "run; torch.save({'edge_index': edge_index, 'num_nodes': n}, path) makes such a file"
        ) from error
    if isinstance(loaded, tuple) and len(loaded) > 1 and isinstance(loaded[1], dict):
        bounds = loaded[1].get("edge_index")
        if torch.is_tensor(bounds) and bounds.ndim == 1:  # where graphs of a data set begin
            if len(bounds) > 2:
                raise GraphError(f"{path}: holds {len(bounds) - 1} graphs, expected one")
            loaded = loaded[0]
    dense = torch.is_tensor(loaded) and loaded.layout is torch.strided
    graphs = [{"edge_index": loaded}] if dense else _with_edges(loaded)
    if len(graphs) > 1:
        raise GraphError(f"{path}: holds {len(graphs)} graphs, expected one")
    data = graphs[0] if graphs else {}
    if not isinstance(data, dict):
        return _from_sparse(path, data)
    edges = data.get("edge_index")
    if not torch.is_tensor(edges) or edges.ndim != 2 or len(edges) != 2:
        raise GraphError(f"{path}: holds no graph: {NOTHING}")
    count = edges.shape[1]
    check_size(path, ELEMENT_BYTES * count, f"edge_index of shape {tuple(edges.shape)}")
    sources, targets = to_host("load_graph", "edge_index", edges)
    weights = data.get("edge_weight")
    if weights is None:
        each = {k: x for k, x in data.items() if torch.is_tensor(x) and x.numel() == count}
        name = weight_of(path, (k for k in each if isinstance(k, str)))
        attributes = each.get("edge_attr")  # floats; integers are kinds of edges
        is_weight = attributes is not None and attributes.is_floating_point()
        weights = each[name] if name else attributes if is_weight else None
    if torch.is_tensor(weights):
        real = weights if weights.is_complex() else weights.float()
        weights = to_host("load_graph", "edge_weight", real).reshape(-1)
    return from_edges(path, targets, sources, weights, least=_nodes(data))


def _from_sparse(path: Path, matrix: Any) -> sp.coo_array:
    """The matrix of a sparse tensor with unchecked indices."""
    matrix, shape = matrix.detach(), tuple(matrix.shape)
    layout = str(matrix.layout).removeprefix("torch.sparse_")
    if len(shape) != 2 or matrix.dense_dim():
        raise GraphError(f"{path}: expected a sparse matrix, got {layout} of shape {shape}")
    flipped = layout in ("csc", "bsc")
    if layout == "coo":
        parts = *matrix._indices().unbind(), matrix._values()
    else:
        names = ("ccol_indices", "row_indices") if flipped else ("crow_indices", "col_indices")
        parts = *(getattr(matrix, name)() for name in names), matrix.values()
    check_size(path, ELEMENT_BYTES * max(x.numel() for x in parts), f"a tensor of shape {shape}")
    *lines, values = parts
    values = values if values.is_complex() or values.element_size() == 8 else values.float()
    rows, columns, data = (to_host("load_graph", "a tensor", x) for x in (*lines, values))
    if layout != "coo":
        kind: Any = sp.csr_array if data.ndim == 1 else sp.bsr_array
        data = data.swapaxes(1, 2) if flipped and data.ndim > 1 else data
        out = kind((data, columns, rows), shape=shape[::-1] if flipped else shape)
        out.check_format(full_check=True)
        out = out.tocoo()
        (rows, columns), data = out.coords[::-1] if flipped else out.coords, out.data
    return from_edges(path, rows, columns, data, shape)


def _with_edges(loaded: object) -> list[Any]:
    """Collect mappings with edges, at any depth, or else sparse tensors.

    Objects may refer to each other.
    """
    waiting, seen, graphs, matrices = [loaded], set[int](), list[Any](), list[Any]()
    for item in waiting:
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            if "edge_index" in item:
                graphs.append(item)
            else:
                waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif is_torch(item) and "sparse" in str(item.layout):
            matrices.append(item)
        else:
            waiting += getattr(item, "__dict__", {}).values()
    return graphs or matrices


def _nodes(data: Mapping[Any, Any]) -> int:
    """The number of nodes that a graph states, or has features or labels for; else 0."""
    if data.get("num_nodes") is not None:
        return int(np.ravel(data["num_nodes"])[0])
    shapes = [getattr(data.get(name), "shape", ()) for name in ("x", "pos", "y", "train_mask")]
    return next((shape[0] for shape in shapes if shape), 0)


def _read_dgl(path: Path) -> sp.coo_array:
    """Read the single graph of a file of `dgl.save_graphs`."""
    try:
        dgl: Any = importlib.import_module("dgl")
    except ImportError as error:
        raise GraphError(f"{path}: to read binary files of DGL, install dgl") from error
    graphs, _ = dgl.load_graphs(str(path))
    if len(graphs) != 1 or not graphs[0].is_homogeneous:
        what = f"{len(graphs)} graphs" if len(graphs) != 1 else "several kinds of nodes or edges"
        raise GraphError(f"{path}: holds {what}, expected one graph of one kind of nodes and edges")
    (graph,) = graphs
    sources, targets = (ids.numpy() for ids in graph.edges())
    name = weight_of(path, (k for k, x in graph.edata.items() if x.ndim == 1))
    weights = None if name is None else graph.edata[name].numpy()
    nodes = graph.num_nodes()
    return from_edges(path, targets, sources, weights, (nodes, nodes))
