"""Graphs in files of PyTorch Geometric and DGL, read by torch and by dgl."""

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

from sparsetir.data.graph_edges import from_edges
from sparsetir.extras import need
from sparsetir.runtime.arrays import to_host
from sparsetir.runtime.file_errors import ELEMENT_BYTES, GraphError, check_npz, need_room

ENDINGS = (".pt", ".bin", ".dgl")
IN_FOLDERS = ("processed/data.pt", "data.pt", "graph.dgl", "graph.bin", "graphs.bin")
# What a `Data` object names; it is read without PyG, as an object that has nothing but attributes.
PYG = ("data.Data", "data.DataEdgeAttr", "data.DataTensorAttr", "storage.GlobalStorage")


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
    """A matrix; rows are targets and columns sources."""
    return _read_torch(path) if path.suffix.lower() == ".pt" else _read_dgl(path)


def _read_torch(path: Path) -> sp.coo_array:
    """`edge_index`, and weights if there are some; GraphError for files with other objects."""
    need("load_graph", "torch", "torch", title="PyTorch")
    import torch

    if zipfile.is_zipfile(path):
        check_npz(path)
    plain: Any = [(_Plain, f"torch_geometric.data.{name}") for name in PYG]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(plain):
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise GraphError(f"{path}: is no file of torch.save, or is damaged") from error
        raise GraphError(
            f"{path}: expected tensors in lists and dicts, got {named[1]}, of which no code is "
            "run; torch.save({'edge_index': edge_index, 'num_nodes': n}, path) makes such a file"
        ) from error
    if isinstance(found, tuple) and len(found) > 1 and isinstance(found[1], dict):
        bounds = found[1].get("edge_index")
        if torch.is_tensor(bounds) and bounds.ndim == 1:  # where graphs of a data set begin
            if len(bounds) > 2:
                raise GraphError(f"{path}: holds {len(bounds) - 1} graphs, expected one")
            found = found[0]
    graphs = [{"edge_index": found}] if torch.is_tensor(found) else _with_edges(found)
    if len(graphs) > 1:
        raise GraphError(f"{path}: holds {len(graphs)} graphs, expected one")
    data = graphs[0] if graphs else {}
    edges = data.get("edge_index")
    if not torch.is_tensor(edges) or edges.ndim != 2 or len(edges) != 2:
        raise GraphError(f"{path}: holds no graph: nothing named edge_index of shape (2, E)")
    count = edges.shape[1]
    need_room(path, ELEMENT_BYTES * count, f"edge_index of shape {tuple(edges.shape)}")
    sources, targets = to_host("load_graph", "edge_index", edges)
    weights, attributes = data.get("edge_weight"), data.get("edge_attr")
    if weights is None and torch.is_tensor(attributes) and attributes.numel() == count:
        weights = attributes  # one number for each edge; features of edges are no weights
    if torch.is_tensor(weights):
        real = weights if weights.is_complex() else weights.float()
        weights = to_host("load_graph", "edge_weight", real).reshape(-1)
    return from_edges(path, targets, sources, weights, least=_nodes(data))


def _with_edges(found: object) -> list[dict[object, object]]:
    """The mappings, however deep, with edges in them; objects may refer to each other."""
    waiting, seen, graphs = [found], set[int](), list[dict[object, object]]()
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
        else:
            waiting += getattr(item, "__dict__", {}).values()
    return graphs


def _nodes(data: Mapping[Any, Any]) -> int:
    """How many nodes a graph tells of, or has features or labels for; 0 where it does not."""
    if data.get("num_nodes") is not None:
        return int(np.ravel(data["num_nodes"])[0])
    shapes = [getattr(data.get(name), "shape", ()) for name in ("x", "pos", "y", "train_mask")]
    return next((shape[0] for shape in shapes if shape), 0)


def _read_dgl(path: Path) -> sp.coo_array:
    """The one graph of a file of `dgl.save_graphs`."""
    try:
        dgl: Any = importlib.import_module("dgl")
    except ImportError as error:
        raise GraphError(f"{path}: to read binary files of DGL, install dgl") from error
    found, _ = dgl.load_graphs(str(path))
    if len(found) != 1 or not found[0].is_homogeneous:
        what = f"{len(found)} graphs" if len(found) != 1 else "several kinds of nodes or edges"
        raise GraphError(f"{path}: holds {what}, expected one graph of one kind of nodes and edges")
    (graph,) = found
    sources, targets = (ids.numpy() for ids in graph.edges())
    weights = next((graph.edata[k].numpy() for k in ("weight", "w") if k in graph.edata), None)
    nodes = graph.num_nodes()
    return from_edges(path, targets, sources, weights, (nodes, nodes))
