"""Graphs from the data folders of PyTorch Geometric and DGL, which need not be installed."""

from __future__ import annotations

import csv
import importlib
import pickle
import re
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import numpy as np

from sparsetir.graph_edges import GraphError, from_edges

__all__ = ["read"]

# What files of tensors are made of; everything else in them becomes a `_Record`.
TENSORS = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"}
BUILTINS = {("collections", t.__name__): t for t in (OrderedDict, defaultdict)}
BUILTINS |= {
    (module, t.__name__): t
    for module in ("builtins", "__builtin__")
    for t in (list, dict, set, int)
}


def read(path: Path) -> Any:
    """A scipy sparse matrix; rows are targets and columns sources.

    path : a folder of PyG (with `processed/data.pt` or `raw/ind.*.graph`) or of DGL (with
        `meta.yaml` or a file of `dgl.save_graphs`), or such a file itself
    """
    if path.is_file():
        return _read_pyg(path) if path.suffix == ".pt" else _read_dgl(path)
    for folder in (path / "processed", path):
        if (folder / "data.pt").is_file():
            return _read_pyg(folder / "data.pt")
    for folder in (path / "raw", path):
        for file in sorted(folder.glob("ind.*.graph")):
            return _read_planetoid(file)
    if (path / "meta.yaml").is_file():
        return _read_csv_dataset(path)
    saved = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".dgl"))
    if saved:
        return _read_dgl(saved[0])
    raise GraphError(
        f"{path}: expected a folder of PyG (processed/data.pt, raw/ind.*.graph) or of DGL "
        "(meta.yaml, graph.dgl, graphs.bin), got one with none of these"
    )


class _Record:
    """An object of a class that is not loaded: what it was made of, so that it can be searched."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.parts: list[Any] = [*args, options]

    def __setstate__(self, state: Any) -> None:
        self.parts = [*getattr(self, "parts", []), state]


class _Unpickler(pickle.Unpickler):
    """Makes tensors, numbers and containers and runs no other code that a file may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        known = BUILTINS.get((module, name))
        if known is not None:
            return known
        if (module == "torch._utils" and name in TENSORS) or (
            module in ("torch", "torch.storage") and name.endswith("Storage")
        ):
            return getattr(importlib.import_module(module), name)
        return type(name, (_Record,), {})


def _read_pyg(path: Path) -> Any:
    """`edge_index` of a file of an InMemoryDataset or of a Data object, and its weights."""
    try:
        import torch
    except ImportError as error:
        raise GraphError(f"{path}: to read files of PyG, run `pip install torch`") from error
    plain: Any = SimpleNamespace(
        Unpickler=_Unpickler, load=pickle.load, __name__="sparsetir.graph_folders"
    )
    try:
        found = torch.load(path, map_location="cpu", weights_only=False, pickle_module=plain)
    except (RuntimeError, pickle.UnpicklingError, AttributeError) as error:
        raise GraphError(f"{path}: is no file of torch.save, or is damaged: {error}") from error
    slices = found[1] if isinstance(found, tuple) and len(found) > 1 else None
    if isinstance(slices, dict) and "edge_index" in slices and len(slices["edge_index"]) > 2:
        raise GraphError(f"{path}: holds {len(slices['edge_index']) - 1} graphs, expected one")
    data = _with_edges(found)
    if data is None:
        raise GraphError(f"{path}: holds no graph: nothing named edge_index of shape (2, E)")
    sources, targets = data["edge_index"].numpy()
    given = (data.get(name) for name in ("edge_weight", "edge_attr"))
    # One number for each edge; features of edges are no weights.
    numbers = [t.reshape(-1) for t in given if _is_tensor(t) and t.numel() == len(sources)]
    weights = numbers[0].float().numpy() if numbers else None
    nodes = _nodes(data, int(data["edge_index"].max()) + 1 if len(sources) else 0)
    return from_edges(str(path), targets, sources, weights, (nodes, nodes))


def _is_tensor(value: Any) -> TypeGuard[Any]:
    return hasattr(value, "numpy") and hasattr(value, "ndim")


def _with_edges(found: Any) -> dict[str, Any] | None:
    """The first mapping, however deep, with edges in it; objects may refer to each other."""
    waiting, seen = [found], set()
    while waiting:
        item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            edges = item.get("edge_index")
            if _is_tensor(edges) and edges.ndim == 2 and len(edges) == 2:
                return item
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, _Record):
            waiting += item.parts
    return None


def _nodes(data: dict[str, Any], least: int) -> int:
    """How many nodes there are: as told, as there are features or labels, or for the largest id."""
    told: Any = data.get("num_nodes")
    if _is_tensor(told):
        told = told.reshape(-1).tolist()
    if isinstance(told, list) and told:
        told = told[0]
    if isinstance(told, int):
        return max(told, least)
    sizes = [len(data[k]) for k in ("x", "pos", "y", "train_mask") if _is_tensor(data.get(k))]
    return max([least, *sizes[:1]])


def _read_planetoid(path: Path) -> Any:
    """`ind.<name>.graph`: a pickled dict, for each node its neighbours."""
    with path.open("rb") as file:
        try:
            found = _Unpickler(file, encoding="latin1").load()
        except (pickle.UnpicklingError, UnicodeDecodeError, AttributeError) as error:
            raise GraphError(f"{path}: is no pickled graph, or is damaged: {error}") from error
    if not isinstance(found, dict):
        raise GraphError(f"{path}: expected a dict of neighbours, got {type(found).__name__}")
    pairs = {(v, u) for u, near in found.items() for v in near}
    pairs |= {(u, v) for v, u in pairs}  # as PyG does: both directions, each edge once
    edges = np.array(sorted(pairs), "int64").reshape(-1, 2)
    nodes = max(len(found), int(edges.max(initial=-1)) + 1)
    return from_edges(str(path), edges[:, 0], edges[:, 1], None, (nodes, nodes))


def _read_csv_dataset(folder: Path) -> Any:
    """The format of `dgl.data.CSVDataset` with one kind of edges."""
    meta = (folder / "meta.yaml").read_text()
    sections = re.split(r"^(?=\w+:)", meta, flags=re.MULTILINE)
    named = {part.partition(":")[0]: re.findall(r"file_name:\s*['\"]?([^\s'\",}]+)", part)
             for part in sections}  # fmt: skip
    separator = re.search(r"^separator:\s*['\"](.)['\"]", meta, re.MULTILINE)
    delimiter = separator[1] if separator else ","
    edges = named.get("edge_data", [])
    if len(edges) != 1:
        raise GraphError(
            f"{folder / 'meta.yaml'}: expected one file of edges under edge_data, got "
            f"{', '.join(edges) or 'none'}; give that file itself as a graph"
        )
    columns = _columns(folder / edges[0], delimiter, ("src_id", "dst_id"), ("weight", "graph_id"))
    if len(set(columns.get("graph_id", [0]))) > 1:
        raise GraphError(f"{folder / edges[0]}: holds several graphs (graph_id), expected one")
    sources, targets = (_integers(folder / edges[0], columns[k]) for k in ("src_id", "dst_id"))
    weights = np.array(columns["weight"], "float32") if "weight" in columns else None
    nodes = 1 + max(int(sources.max(initial=-1)), int(targets.max(initial=-1)))
    for file in named.get("node_data", [])[:1]:
        ids = _integers(folder / file, _columns(folder / file, delimiter, ("node_id",))["node_id"])
        nodes = max(nodes, int(ids.max(initial=-1)) + 1)
    return from_edges(str(folder / edges[0]), targets, sources, weights, (nodes, nodes))


def _columns(
    path: Path, delimiter: str, needed: tuple[str, ...], more: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Columns of a CSV file by the names in its first line."""
    if not path.is_file():
        raise GraphError(f"{path}: no such file, though meta.yaml names it")
    with path.open(newline="") as file:
        lines = csv.DictReader(file, delimiter=delimiter)
        names = lines.fieldnames or []
        missing = [n for n in needed if n not in names]
        if missing:
            raise GraphError(f"{path}: has no column {', '.join(missing)}, but {', '.join(names)}")
        table = [[line[n] for n in names] for line in lines]
    at = {n: i for i, n in enumerate(names)}
    return {n: [row[at[n]] for row in table] for n in (*needed, *more) if n in at}


def _integers(path: Path, words: list[str]) -> np.ndarray:
    try:
        return np.array(words, "int64") if words else np.empty(0, "int64")
    except (ValueError, TypeError) as error:
        raise GraphError(f"{path}: expected integers as ids: {error}") from error


def _read_dgl(path: Path) -> Any:
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
    return from_edges(str(path), targets, sources, weights, (nodes, nodes))
