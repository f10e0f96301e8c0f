"""Graphs from the data folders of PyTorch Geometric and DGL, which need not be installed.

No code in these files runs.
"""

from __future__ import annotations

import csv
import importlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.data.graph_edges import GraphError, from_edges
from sparsetir.data.plain_pickle import Made, PickleError, read_pickle
from sparsetir.data.tensor_files import StoredTensor, read_tensors
from sparsetir.extras import need
from sparsetir.runtime.file_errors import DAMAGE, first_line

MOST_YAML = 2**16


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
        for file in filter(Path.is_file, sorted(folder.glob("ind.*.graph"))):
            return _read_planetoid(file)
    if (path / "meta.yaml").is_file():
        return _read_csv_dataset(path)
    saved = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".dgl") and p.is_file())
    if saved:
        return _read_dgl(saved[0])
    raise GraphError(
        f"{path}: expected a folder of PyG (processed/data.pt, raw/ind.*.graph) or of DGL "
        "(meta.yaml, graph.dgl, graphs.bin), got one with none of these"
    )


def _read_pyg(path: Path) -> Any:
    """`edge_index` of a file of an InMemoryDataset or of a Data object, and its weights."""
    with _damage(path, "file of torch.save"):
        found = read_tensors(path)
        slices = found[1] if isinstance(found, tuple) and len(found) > 1 else None
        bounds = slices.get("edge_index") if isinstance(slices, dict) else None
        ends = _length(bounds)
        if ends > 2:
            raise GraphError(f"{path}: holds {ends - 1} graphs, expected one")
        data = _with_edges(found)
        if data is None:
            raise GraphError(f"{path}: holds no graph: nothing named edge_index of shape (2, E)")
        sources, targets = data["edge_index"].numpy()
        given = (data.get(name) for name in ("edge_weight", "edge_attr"))
        arrays = [value.numpy() for value in given if isinstance(value, StoredTensor)]
        nodes = _nodes(data)
    # One number for each edge; features of edges are no weights.
    numbers = [x.reshape(-1) for x in arrays if x.size == len(sources)]
    weights = numbers[0].astype("float32") if numbers else None
    return _square(path, targets, sources, weights, nodes)


@contextmanager
def _damage(path: Path, kind: str) -> Iterator[None]:
    """What shows that a file is none of a kind, as GraphError that says so."""
    try:
        yield
    except GraphError:
        raise
    except (PickleError, UnicodeDecodeError, *DAMAGE) as error:
        why = first_line(error)
        raise GraphError(f"{path}: is no {kind}, or is damaged: {why}") from error


def _length(value: Any) -> int:
    if isinstance(value, StoredTensor):
        value = value.numpy()
        return len(value) if value.ndim else 0
    return len(value) if isinstance(value, list | tuple) else 0


def _with_edges(found: Any) -> dict[Any, Any] | None:
    """The first mapping, however deep, with edges in it; objects may refer to each other."""
    waiting, seen = deque([found]), set()
    while waiting:
        item = waiting.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            edges = item.get("edge_index")
            if isinstance(edges, StoredTensor) and len(edges.shape) == 2 and edges.shape[0] == 2:
                return item
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, Made):
            waiting += item.parts
    return None


def _nodes(data: dict[Any, Any]) -> int:
    """How many nodes a graph tells of, or has features or labels for; 0 where it does not."""
    told: Any = data.get("num_nodes")
    if isinstance(told, StoredTensor):
        told = told.numpy().reshape(-1).tolist()
    if isinstance(told, list) and told:
        told = told[0]
    if isinstance(told, int):
        return max(told, 0)
    return next((_length(data[k]) for k in ("x", "pos", "y", "train_mask") if k in data), 0)


def _square(path: Path, rows: Any, columns: Any, weights: Any, nodes: int) -> Any:
    """A matrix of so many rows and columns, or of more if ids ask for them."""
    least = [int(ids.max()) + 1 for ids in (rows, columns) if ids.dtype.kind in "iu" and len(ids)]
    nodes = max(nodes, *least, 0)
    return from_edges(path, rows, columns, weights, (nodes, nodes))


def _read_planetoid(path: Path) -> Any:
    """`ind.<name>.graph`: a pickled dict, for each node its neighbours."""
    data = path.read_bytes()
    with _damage(path, "pickled graph"):
        found = read_pickle(BytesIO(data))
    if not isinstance(found, dict):
        raise GraphError(f"{path}: expected a dict of neighbours, got {type(found).__name__}")
    if not all(isinstance(near, list | tuple) for near in found.values()):
        raise GraphError(f"{path}: expected a list of neighbours of each node")
    if sum(map(len, found.values())) > len(data):  # one list under many names
        raise GraphError(f"{path}: expected fewer neighbours than the file has bytes")
    ids = [*found, *chain.from_iterable(found.values())]
    bad = next((i for i in ids if type(i) is not int or not 0 <= i < 2**63), None)
    if bad is not None:
        got = bad if isinstance(bad, int) else type(bad).__name__
        raise GraphError(f"{path}: expected integers from 0 to 2**63 as ids, got {got}")
    targets = np.array(ids[: len(found)], "int64").repeat([len(near) for near in found.values()])
    pairs = np.stack([targets, np.array(ids[len(found) :], "int64")], axis=1)
    edges = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)  # as PyG does: both ways
    return _square(path, edges[:, 0], edges[:, 1], None, len(found))


def _read_csv_dataset(folder: Path) -> Any:
    """The format of `dgl.data.CSVDataset` with one kind of edges."""
    meta = _read_yaml(folder / "meta.yaml")
    separator = meta.get("separator", ",")
    delimiter = separator if isinstance(separator, str) and len(separator) == 1 else ","
    edges, nodes_of = (_file_names(meta.get(name)) for name in ("edge_data", "node_data"))
    if len(edges) != 1:
        raise GraphError(
            f"{folder / 'meta.yaml'}: expected one file of edges under edge_data, got "
            f"{', '.join(edges) or 'none'}; give that file itself as a graph"
        )
    for name in (*edges, *nodes_of):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise GraphError(f"{folder / 'meta.yaml'}: expected files of its folder, got '{name}'")
    columns = _columns(folder / edges[0], delimiter, ("src_id", "dst_id"), ("weight", "graph_id"))
    if len(set(columns.get("graph_id", [0]))) > 1:
        raise GraphError(f"{folder / edges[0]}: holds several graphs (graph_id), expected one")
    sources, targets = (_integers(folder / edges[0], columns[k]) for k in ("src_id", "dst_id"))
    try:
        weights = np.array(columns["weight"], "float32") if "weight" in columns else None
    except ValueError as error:
        raise GraphError(f"{folder / edges[0]}: expected numbers as weights: {error}") from error
    nodes = 1 + max(int(sources.max(initial=-1)), int(targets.max(initial=-1)))
    for file in nodes_of[:1]:
        ids = _integers(folder / file, _columns(folder / file, delimiter, ("node_id",))["node_id"])
        nodes = max(nodes, int(ids.max(initial=-1)) + 1)
    return from_edges(folder / edges[0], targets, sources, weights, (nodes, nodes))


def _read_yaml(path: Path) -> dict[str, Any]:
    """What stands in a file of YAML, which has names and what they mean."""
    need("load_graph", "yaml", "graphs", title="PyYAML")
    import yaml

    size = path.stat().st_size
    if size > MOST_YAML:  # it is read slowly
        raise GraphError(f"{path}: expected at most {MOST_YAML:,} bytes, got {size:,}")
    try:
        # Which makes texts, lists and dicts, and does not copy what "<<" merges: nested, these grow
        # with a power of what they say.
        found = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"{path}: holds no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise GraphError(f"{path}: expected names with values, got {type(found).__name__}")
    return found


def _file_names(entries: Any) -> list[str]:
    """Of the files in a list of what a dataset has."""
    listed = entries if isinstance(entries, list) else []
    named = [entry.get("file_name") for entry in listed if isinstance(entry, dict)]
    return [name for name in named if isinstance(name, str)]


def _columns(
    path: Path, delimiter: str, needed: tuple[str, ...], more: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Columns of a CSV file by the names in its first line."""
    if not path.is_file():
        raise GraphError(f"{path}: no such file, though meta.yaml names it")
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = csv.DictReader(file, delimiter=delimiter)
        try:
            names = lines.fieldnames or []
            missing = [n for n in needed if n not in names]
            if missing:
                there = ", ".join(names)[:200]
                raise GraphError(f"{path}: has no column {', '.join(missing)}, but {there}")
            table = [[line[n] for n in names] for line in lines]
        except csv.Error as error:
            raise GraphError(f"{path}: line {lines.line_num}: {error}") from error
    if any(None in row for row in table):
        raise GraphError(f"{path}: expected {len(names)} values in each line, got fewer")
    at = {n: i for i, n in enumerate(names)}
    return {n: [row[at[n]] for row in table] for n in (*needed, *more) if n in at}


def _integers(path: Path, words: list[str]) -> np.ndarray:
    try:
        return np.array(words, "int64") if words else np.empty(0, "int64")
    except OverflowError as error:
        raise GraphError(f"{path}: expected ids below 2**63, got a larger one") from error
    except (ValueError, TypeError) as error:
        raise GraphError(f"{path}: expected integers as ids: {error}") from error


def _read_dgl(path: Path) -> Any:
    """The one graph of a file of `dgl.save_graphs`."""
    try:
        dgl: Any = importlib.import_module("dgl")
    except ImportError as error:
        raise GraphError(f"{path}: to read binary files of DGL, install dgl") from error
    try:
        found, _ = dgl.load_graphs(str(path))
    except Exception as error:  # of dgl, which need not be there
        raise GraphError(f"{path}: dgl cannot read it: {first_line(error)}") from error
    if len(found) != 1 or not found[0].is_homogeneous:
        what = f"{len(found)} graphs" if len(found) != 1 else "several kinds of nodes or edges"
        raise GraphError(f"{path}: holds {what}, expected one graph of one kind of nodes and edges")
    (graph,) = found
    sources, targets = (ids.numpy() for ids in graph.edges())
    weights = next((graph.edata[k].numpy() for k in ("weight", "w") if k in graph.edata), None)
    nodes = graph.num_nodes()
    return from_edges(path, targets, sources, weights, (nodes, nodes))
