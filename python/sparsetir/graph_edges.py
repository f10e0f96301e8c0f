"""Edges as a matrix, and edge lists in text files."""

from __future__ import annotations

import gzip
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

__all__ = [
    "DAMAGE",
    "EDGE_LISTS",
    "GraphError",
    "free_bytes",
    "from_edges",
    "need_room",
    "read_edges",
]

EDGE_LISTS = (".txt", ".csv", ".tsv", ".el")
COMMENTS = ("#", "%")
ENCODING = "utf-8-sig"
EXPECTED = "expected row, column and maybe weight"
MEMINFO = Path("/proc/meminfo")
# What readers raise for files that are damaged or cut off; zipfile raises RuntimeError where an
# entry seems to be encrypted or of another version.
DAMAGE = (EOFError, RuntimeError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
          gzip.BadGzipFile)  # fmt: skip


class GraphError(ValueError):
    """A file that is not the graph that was expected; the text names it and says why."""


def from_edges(who: str, rows: Any, columns: Any, weights: Any, shape: Any) -> sp.csr_array:
    """CSR of edges; those that are equal are added up.

    who : the file, for errors
    rows, columns : (E,) integers from 0
    weights : (E,) or None for float32 ones
    shape : two lengths; None for a square matrix up to the largest id
    """
    rows, columns = np.asarray(rows), np.asarray(columns)
    for name, ids in (("row", rows), ("column", columns)):
        if ids.ndim != 1 or len(ids) != len(rows):
            raise GraphError(f"{who}: {name} ids: expected shape {rows.shape}, got {ids.shape}")
        if ids.dtype.kind not in "iu":
            raise GraphError(f"{who}: {name} ids: expected integers, got {ids.dtype}")
        if len(ids) and ids.min() < 0:
            raise GraphError(f"{who}: {name} ids: expected 0 or more, got {ids.min()}")
    rows, columns = rows.astype("int64"), columns.astype("int64")
    if shape is None:
        shape = (1 + max(int(rows.max(initial=-1)), int(columns.max(initial=-1))),) * 2
    shape = tuple(int(n) for n in shape)
    if len(shape) != 2:
        raise GraphError(f"{who}: shape: expected two numbers, got {len(shape)}")
    for name, ids, length in (("row", rows, shape[0]), ("column", columns, shape[1])):
        if len(ids) and ids.max() >= length:
            raise GraphError(f"{who}: {name} ids: expected less than {length}, got {ids.max()}")
    weights = np.ones(len(rows), "float32") if weights is None else np.asarray(weights)
    if weights.shape != rows.shape:
        raise GraphError(f"{who}: weights: expected shape {rows.shape}, got {weights.shape}")
    if weights.dtype.kind not in "biuf":
        raise GraphError(f"{who}: weights: expected real numbers, got {weights.dtype}")
    need_room(who, 8 * shape[0])  # an id is soon larger than what memory holds
    if weights.dtype == np.float16:  # which scipy does not have
        weights = weights.astype("float32")
    return sp.csr_array(sp.coo_array((weights, (rows, columns)), shape=shape))


def read_edges(path: Path) -> sp.csr_array:
    """An edge list; see :func:`sparsetir.graphs.load_graph`."""
    begin, first = _first_edge(path)
    delimiter = next((d for d in (",", ";") if d in first), None)
    try:
        table = np.loadtxt(
            path, "float64", comments=COMMENTS, delimiter=delimiter, skiprows=begin - 1, ndmin=2,
            encoding=ENCODING,
        )  # fmt: skip
    except ValueError as error:
        raise _bad_line(path, begin, delimiter) or error from error
    if table.shape[1] not in (2, 3):
        raise GraphError(f"{path}: line {begin}: {EXPECTED}, got {first[:60]!r}")
    ids = table[:, :2]
    bad = np.flatnonzero((ids != np.floor(ids)).any(axis=1) | ~np.isfinite(ids).all(axis=1))
    if len(bad):
        raise GraphError(
            f"{path}: expected integers as ids, got {ids[bad[0]].tolist()} as edge {bad[0] + 1}"
        )
    weights = table[:, 2].astype("float32") if table.shape[1] == 3 else None
    rows, columns = ids.T.astype("int64")
    return from_edges(str(path), rows, columns, weights, None)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that say something, without comments, and their numbers from 1."""
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding=ENCODING, errors="replace") as file:
        for number, line in enumerate(file, 1):
            said = re.split("[#%]", line, maxsplit=1)[0].strip()
            if said:
                yield number, said


def _first_edge(path: Path) -> tuple[int, str]:
    """The first line of numbers; before it there may be one of names."""
    lines = _lines(path)
    number, line = next(lines, (0, ""))
    if line and not any(map(_is_number, _words(line))):
        number, line = next(lines, (0, ""))
    if not line:
        raise GraphError(f"{path}: {EXPECTED}; there are none")
    if not all(map(_is_number, _words(line))):
        raise GraphError(f"{path}: line {number}: {EXPECTED}, got {line[:60]!r}")
    return number, line


def _bad_line(path: Path, begin: int, delimiter: str | None) -> GraphError | None:
    """What is wrong with the first line that is not like the one at `begin`."""
    columns = None
    for number, line in _lines(path):
        if number < begin:
            continue
        words = line.split(delimiter)
        columns = columns or len(words)
        if len(words) != columns or not all(map(_is_number, words)):
            return GraphError(f"{path}: line {number}: {EXPECTED}, got {line[:60]!r}")
    return None


def _words(line: str) -> list[str]:
    return re.split(r"[\s,;]+", line)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def need_room(path: Any, size: int) -> None:
    """Raise where so many bytes are more than is free."""
    free = free_bytes()
    if free is not None and size > free:
        raise GraphError(f"{path}: needs {size / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB free")


def free_bytes() -> int | None:
    """Memory that is free; None where the system does not say."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
