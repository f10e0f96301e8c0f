"""Readers of graph files, of which each process reads a part."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparsetir.data.column_names import weight_of
from sparsetir.data.datasets import SHIPPED
from sparsetir.data.graph_edges import EDGE_LISTS, edge_table, first_edge, two_lengths, uncommented
from sparsetir.data.matrix_files import read_header
from sparsetir.runtime.file_errors import GraphError, as_path, check_matrix, check_npz, reading

LISTS = f"an edge list ({', '.join(EDGE_LISTS)})"
KINDS = f"an .npz file of one matrix in CSR, CSC or coordinates, or {LISTS}"
# Elements of an array in memory at a time, while it is searched.
PIECE = 1 << 20


class Share(NamedTuple):
    """A part of the edges of a file.

    sources, targets : (E,) int64
    values : (E,) float32 or float64; None if all are one
    nodes : number of nodes of the whole graph if `told`, else of this part
    told : whether the file states the number of nodes
    """

    sources: np.ndarray
    targets: np.ndarray
    values: np.ndarray | None
    nodes: int
    told: bool


def read_share(source: str | Path, part: int, parts: int) -> Share:
    """Read part `part`, from 0, of `parts` equal parts of a file's edges; see DistGraph.from_file.

    Only the part takes memory, even of a compressed .npz file, which is unpacked up to the part's
    end. Raises GraphError that names the file.
    """
    text = str(as_path("DistGraph.from_file", "path", source))
    plain, transposed = (text[:-2], True) if text.endswith(":T") else (text, False)
    with reading(plain, GraphError):
        share = _read(plain, part, parts)
    if transposed:
        share = share._replace(sources=share.targets, targets=share.sources)
    return share


def _read(text: str, part: int, parts: int) -> Share:
    if text in SHIPPED:
        with resources.as_file(resources.files("sparsetir") / "data" / f"{text}.npz") as path:
            return _read_npz(path, "", part, parts)
    path, layer = Path(text), ""
    if not path.exists() and ":" in path.name:
        plain, _, layer = text.rpartition(":")
        path = Path(plain)
    if not path.is_file():
        raise GraphError(f"{text}: no such file; a graph in shares is {KINDS}")
    name = path.name.lower()
    if name.endswith(".npz"):
        return _read_npz(path, layer, part, parts)
    if name.endswith(EDGE_LISTS) and not layer:
        return _read_text(path, part, parts)
    raise GraphError(f"{text}: expected {KINDS}; got '{path.name}'")


def _bounds(count: int, part: int, parts: int) -> tuple[int, int]:
    return count * part // parts, count * (part + 1) // parts


# -- .npz -----------------------------------------------------------------------------------------


def _read_npz(path: Path, layer: str, part: int, parts: int) -> Share:
    check_npz(path)
    prefix = f"{layer}." if layer else ""
    with zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}

        def small(name: str) -> np.ndarray:
            with _Array(path, archive, prefix + name) as array:
                if array.count > 16:
                    raise GraphError(f"{path}: {name}: expected few numbers, got {array.count}")
                return array.read(0, array.count)

        def need(*wanted: str) -> None:
            missing = [prefix + name for name in wanted if prefix + name not in names]
            if missing:
                raise GraphError(f"{path}: expected {KINDS}; has no {', '.join(missing)}")

        kind = "csr"
        if prefix + "format" in names:
            stored = small("format").tolist()
            kind = stored[0] if len(stored) == 1 else stored
            kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else kind
        elif {prefix + "row", prefix + "col"} <= names:
            kind = "coo"
        if kind not in ("csr", "csc", "coo"):
            raise GraphError(f"{path}: expected {KINDS}; got format {kind!r}")
        lengths = ("row", "col") if kind == "coo" else ("indices", "indptr", "shape")
        need(*lengths)
        with _Array(path, archive, prefix + lengths[0]) as array:
            begin, end = _bounds(array.count, part, parts)
            check_matrix(path, (0, 0), end - begin)
            first, count = _ids(path, array, begin, end), array.count
        lines = 0
        if kind == "coo":
            with _Array(path, archive, prefix + "col") as array:
                _same_count(path, "col", array.count, count)
                second = _ids(path, array, begin, end)
        else:
            with _Array(path, archive, prefix + "indptr") as array:
                second, lines = _rows(path, array, begin, end, count), array.count - 1
        values = None
        name = weight_of(path, (n.removeprefix(prefix) for n in names if n.startswith(prefix)))
        if name is not None:
            with _Array(path, archive, prefix + name) as array:
                _same_count(path, name, array.count, count)
                values = _weights(path, array.read(begin, end))
        rows, columns = (second, first) if kind == "csr" else (first, second)
        has_shape = prefix + "shape" in names
        nodes = int(max(rows.max(initial=-1), columns.max(initial=-1))) + 1
        if has_shape:
            m, n = two_lengths(f"{path}: {prefix}shape", small("shape"))
            if m != n:
                raise GraphError(f"{path}: expected a square matrix, got {m} x {n}")
            if nodes > m:
                raise GraphError(f"{path}: expected ids less than {m}, got {nodes - 1}")
            if kind != "coo" and lines != m:
                raise GraphError(f"{path}: indptr: expected {m + 1} elements, got {lines + 1}")
            nodes = m
        check_matrix(path, (nodes, nodes), 0)
        return Share(columns, rows, values, nodes, has_shape)


class _Array:
    """An array of one dimension, or a number, in an .npz file, whose parts are read in order."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, name: str) -> None:
        self._path, self._name, self._stack = path, name, ExitStack()
        self._file = self._stack.enter_context(archive.open(name + ".npy"))
        shape, self.dtype = read_header(self._file)
        if len(shape) > 1 or self.dtype.hasobject:
            raise GraphError(
                f"{path}: {name}: expected numbers of one dimension, got {self.dtype} {shape}"
            )
        self.count = shape[0] if shape else 1
        self._start = self._file.tell()

    def __enter__(self) -> _Array:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, begin: int, end: int) -> np.ndarray:
        size = self.dtype.itemsize
        self._file.seek(self._start + begin * size)
        data = self._file.read((end - begin) * size)
        if len(data) != (end - begin) * size:
            raise GraphError(f"{self._path}: {self._name}: the file is damaged or cut off")
        return np.frombuffer(data, self.dtype)


def _ids(path: Path, array: _Array, begin: int, end: int) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise GraphError(f"{path}: {array._name}: expected integers, got {array.dtype}")
    ids = array.read(begin, end).astype(np.int64)
    if len(ids) and ids.min() < 0:
        raise GraphError(f"{path}: {array._name}: expected 0 or more, got {ids.min()}")
    return ids


def _rows(path: Path, array: _Array, begin: int, end: int, count: int) -> np.ndarray:
    """The row of each element, (end - begin,), from row pointers, which are read in pieces."""
    rows = []
    last = None
    for start in range(0, array.count, PIECE):
        piece = _ids(path, array, start, min(start + PIECE, array.count))
        if last is None and piece[0] != 0:
            raise GraphError(f"{path}: indptr: expected to begin with 0, got {piece[0]}")
        bounds = piece if last is None else np.concatenate([[last], piece])
        lengths = np.diff(bounds)
        if (lengths < 0).any():
            raise GraphError(f"{path}: indptr: expected not to decrease")
        inside = np.diff(np.clip(bounds, begin, end))
        row = start if last is None else start - 1
        places = np.flatnonzero(inside)
        rows.append(np.repeat(row + places, inside[places]))
        last = int(piece[-1])
    if last != count:
        raise GraphError(f"{path}: indptr: expected to end with {count} elements, got {last}")
    return np.concatenate(rows).astype(np.int64)


def _weights(path: Path, data: np.ndarray) -> np.ndarray | None:
    """Weights in the types of `load_graph`; None if all are one."""
    if data.dtype.kind not in "biuf":
        raise GraphError(f"{path}: data: expected real numbers, got {data.dtype}")
    if (data == 1).all():
        return None
    return data.astype(np.float64 if data.dtype == np.float64 else np.float32)


def _same_count(path: Path, name: str, count_found: int, count: int) -> None:
    if count_found != count:
        raise GraphError(f"{path}: {name}: expected {count} elements, got {count_found}")


# -- edge lists -----------------------------------------------------------------------------------


def _read_text(path: Path, part: int, parts: int) -> Share:
    """Read the lines that begin in a part of the file's bytes."""
    first = first_edge(path)
    size = path.stat().st_size
    begin, end = _bounds(size, part, parts)
    with path.open("rb") as file:
        for _ in range(first.number - 1):  # comments and names before the first edge
            file.readline()
        begin = max(begin, file.tell())

    def lines() -> Iterator[tuple[int, str]]:
        with path.open("rb") as file:
            if begin:
                file.seek(begin - 1)
                file.readline()
            while (place := file.tell()) < end and (line := file.readline()):
                yield place, line.decode("utf-8", "replace").lstrip("\ufeff")

    def labelled() -> Iterator[tuple[str, str]]:
        labels = ((f"at byte {place}", uncommented(line)) for place, line in lines())
        return ((label, text) for label, text in labels if text)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*contained no data")
        rows, columns, weights = edge_table(path, (line for _, line in lines()), first, 0, labelled)
    for ids in (rows, columns):
        if len(ids) and ids.min() < 0:
            raise GraphError(f"{path}: expected ids of 0 or more, got {ids.min()}")
    nodes = int(max(rows.max(initial=-1), columns.max(initial=-1))) + 1
    check_matrix(path, (nodes, nodes), 0)
    return Share(columns, rows, weights, nodes, False)
