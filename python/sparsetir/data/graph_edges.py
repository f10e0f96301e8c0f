"""Edges as a matrix, and edge lists in text files."""

from __future__ import annotations

import codecs
import gzip
import io
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.runtime.file_errors import GraphError, check_matrix, check_unpacked

EDGE_LISTS = (".txt", ".csv", ".tsv", ".el")
COMMENTS = ("#", "%")
ENCODING = "utf-8-sig"
MOST_NODES = 2**60
WEIGHTS = ("float32", "float64")
EXACT = 2.0**53  # integers up to here are exact in float64
EXPECTED = "expected row, column and maybe weight"


def from_edges(
    path: Path,
    rows: object,
    columns: object,
    weights: object = None,
    shape: object = None,
    least: int = 0,
) -> sp.coo_array:
    """The matrix of edges, of which some may be equal.

    path : of the file, for errors and for what it may ask for
    rows, columns : (E,) integers from 0
    weights : (E,) or None for float32 ones
    shape : two lengths; None for a square matrix up to the largest id, of `least` rows or more
    """
    rows, columns = np.asarray(rows), np.asarray(columns)
    limits = (MOST_NODES,) * 2 if shape is None else two_lengths(f"{path}: shape", shape)
    for name, ids, limit in (("row", rows, limits[0]), ("column", columns, limits[1])):
        if ids.ndim != 1 or ids.shape != rows.shape:
            wanted = "one dimension" if ids.ndim != 1 else f"shape {rows.shape}"
            raise GraphError(f"{path}: {name} ids: expected {wanted}, got shape {ids.shape}")
        if ids.dtype.kind not in "iu":
            raise GraphError(f"{path}: {name} ids: expected integers, got {ids.dtype}")
        for bound in (int(ids.min()), int(ids.max())) if len(ids) else ():
            if not 0 <= bound < limit:
                most = limit if limit < MOST_NODES else "2**60"
                raise GraphError(
                    f"{path}: {name} ids: expected 0 or more, less than {most}, got {bound}"
                )
    rows, columns = rows.astype("int64"), columns.astype("int64")
    if shape is None:
        length = 1 + max(least - 1, int(rows.max(initial=-1)), int(columns.max(initial=-1)))
        limits = length, length
    weights = np.ones(len(rows), "float32") if weights is None else np.asarray(weights)
    if weights.shape != rows.shape:
        raise GraphError(f"{path}: weights: expected shape {rows.shape}, got {weights.shape}")
    if weights.dtype.kind not in "biuf":
        raise GraphError(f"{path}: weights: expected real numbers, got {weights.dtype}")
    weights = weights.astype(weights.dtype.name if weights.dtype.name in WEIGHTS else "float32")
    check_matrix(path, limits, len(rows))
    return sp.coo_array((weights, (rows, columns)), shape=limits)


def two_lengths(who: str, shape: object) -> tuple[int, int]:
    """The lengths of a matrix, from what a file says."""
    found = np.asarray(shape)
    sound = found.shape == (2,) and found.dtype.kind in "iu"
    if not sound or (found > MOST_NODES).any() or (found < 0).any():
        raise GraphError(f"{who}: expected two integers from 0 to 2**60, got {found.tolist()}")
    return int(found[0]), int(found[1])


def read_edges(path: Path) -> sp.coo_array:
    """An edge list; see :func:`sparsetir.graphs.load_graph`."""
    check_unpacked(path)
    begin, first = first_edge(path)

    def labelled() -> Iterator[tuple[str, str]]:
        return ((f"line {number}", line) for number, line in _lines(path) if number >= begin)

    with _opened(path) as file:
        rows, columns, weights = edge_table(path, file, begin, first, labelled)
    return from_edges(path, rows, columns, weights)


def edge_table(
    path: Path,
    source: Iterable[str],
    begin: int,
    first: str,
    labelled: Callable[[], Iterator[tuple[str, str]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows, columns and weights, if any, of an edge list or of lines of it.

    source : lines of text
    begin, first : number, from 1, and text of the first line in `source` that says something; the
        text may be of another line that is like it
    labelled : the lines that say something and where they are, to find one that is wrong
    """
    delimiter = next((d for d in (",", ";") if d in first), None)
    columns = len(first.split(delimiter))
    if columns not in (2, 3):
        label = next(labelled(), ("an edge", ""))[0]
        raise GraphError(f"{path}: {label}: {EXPECTED}, got {first[:60]!r}")
    try:
        table = np.loadtxt(
            source,
            "float64",
            comments=COMMENTS,
            delimiter=delimiter,
            skiprows=begin - 1,
            ndmin=2,
            encoding="utf-8",
        )
    except ValueError as error:
        raise _bad_line(path, labelled(), delimiter, columns) or error from error
    table = table if table.size else table.reshape(0, columns)
    if table.shape[1] != columns:
        wrong = _bad_line(path, labelled(), delimiter, columns)
        raise wrong or GraphError(f"{path}: {EXPECTED}, got {table.shape[1]} columns")
    ids = table[:, :2]
    bad = np.flatnonzero((ids != np.floor(ids)).any(axis=1) | ~np.isfinite(ids).all(axis=1))
    if len(bad):
        raise GraphError(
            f"{path}: expected integers as ids, got {ids[bad[0]].tolist()} as edge {bad[0] + 1}"
        )
    if (ids >= EXACT).any():  # they were rounded
        raise GraphError(f"{path}: expected ids below 2**53, got {int(ids.max())}")
    weights = table[:, 2].astype("float32") if columns == 3 else None
    rows, cols = ids.T.astype("int64")
    return rows, cols, weights


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that say something, without comments, and their numbers from 1."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            said = what_is_said(line)
            if said:
                yield number, said


def _opened(path: Path) -> io.TextIOWrapper:
    """Comments and names may be in encodings like Latin-1, in which numbers are the same."""
    file: Any = gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")
    wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    file.seek(0)
    return io.TextIOWrapper(file, "utf-16" if wide else ENCODING, errors="replace")


def what_is_said(line: str) -> str:
    """A line without its comment."""
    for mark in COMMENTS:
        if mark in line:
            line = line[: line.index(mark)]
    return line.strip()


def first_edge(path: Path) -> tuple[int, str]:
    """The first line of numbers; before it there may be one of names."""
    lines = _lines(path)
    number, line = next(lines, (0, ""))
    if line and not any(map(_is_number, _words(line))):
        if not _words(line)[0]:  # as pandas writes
            raise GraphError(f"{path}: line {number}: {EXPECTED}, got a column without a name")
        number, line = next(lines, (0, ""))
    if not line:
        raise GraphError(f"{path}: {EXPECTED}; there are none")
    if not all(map(_is_number, _words(line))):
        raise GraphError(f"{path}: line {number}: {EXPECTED}, got {line[:60]!r}")
    return number, line


def _bad_line(
    path: Path, labelled: Iterator[tuple[str, str]], delimiter: str | None, columns: int
) -> GraphError | None:
    """The error of the first line that is not like the first one."""
    for label, line in labelled:
        words = line.split(delimiter)
        if len(words) != columns or not all(map(_is_number, words)):
            return GraphError(f"{path}: {label}: {EXPECTED}, got {line[:60]!r}")
    return None


def _words(line: str) -> list[str]:
    return re.split(r"[\s,;]+", line)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
