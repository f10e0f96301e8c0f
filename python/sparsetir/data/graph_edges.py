"""Matrices from edges, and readers of edge lists in text files."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.data.column_names import roles_of, used_columns
from sparsetir.runtime.file_errors import GraphError, check_matrix, check_unpacked

EDGE_LISTS = (".txt", ".csv", ".tsv", ".el")
COMMENTS = ("#", "%")
ENCODING = "utf-8-sig"
MOST_NODES = 2**60
WEIGHTS = ("float32", "float64")
EXACT = 2.0**53  # integers up to here are exact in float64
EXPECTED = "expected row, column and maybe weight"


class Start(NamedTuple):
    """The first edge of a list, and the layout of its lines."""

    number: int  # the line's, from 1
    delimiter: str | None  # between columns; None for spaces
    used: tuple[int, ...]  # columns of row, column and maybe weight
    columns: int  # the number of columns

    def is_edge(self, line: str) -> bool:
        """Whether a line has the layout of the first one."""
        words = line.split(self.delimiter)
        return len(words) == self.columns and all(_is_number(words[n]) for n in self.used)


def from_edges(
    path: Path,
    rows: object,
    columns: object,
    weights: object = None,
    shape: object = None,
    least: int = 0,
) -> sp.coo_array:
    """The matrix of edges, possibly with duplicates.

    path : the file, for errors and limits on memory
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


def two_lengths(caller: str, shape: object) -> tuple[int, int]:
    """Check the shape that a file gives."""
    lengths = np.asarray(shape)
    sound = lengths.shape == (2,) and lengths.dtype.kind in "iu"
    if not sound or (lengths > MOST_NODES).any() or (lengths < 0).any():
        raise GraphError(f"{caller}: expected two integers from 0 to 2**60, got {lengths.tolist()}")
    return int(lengths[0]), int(lengths[1])


def read_edges(path: Path) -> sp.coo_array:
    """Read an edge list; see :func:`sparsetir.graphs.load_graph`."""
    check_unpacked(path)
    start = first_edge(path)

    def labelled() -> Iterator[tuple[str, str]]:
        lines = _lines(path)
        return ((f"line {number}", line) for number, line in lines if number >= start.number)

    with _opened(path) as file:
        rows, columns, weights = edge_table(path, file, start, start.number - 1, labelled)
    return from_edges(path, rows, columns, weights)


def edge_table(
    path: Path,
    source: Iterable[str],
    start: Start,
    skip: int,
    labelled: Callable[[], Iterator[tuple[str, str]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Read rows, columns and weights, if any, from an edge list or some of its lines.

    source : lines of text, of which the first `skip` are skipped
    start : the start of the list
    labelled : returns the nonempty lines with their positions, to find an invalid one
    """
    others: Any = dict.fromkeys({*range(start.columns)} - {*start.used}, lambda _: 0.0)
    try:
        table = np.loadtxt(
            source,
            "float64",
            comments=COMMENTS,
            delimiter=start.delimiter,
            converters=others or None,
            skiprows=skip,
            ndmin=2,
            encoding="utf-8",
        )
    except ValueError as error:
        raise _bad_line(path, labelled(), start) or error from error
    table = table if table.size else table.reshape(0, start.columns)
    if table.shape[1] != start.columns:
        wrong = _bad_line(path, labelled(), start)
        raise wrong or GraphError(f"{path}: {EXPECTED}, got {table.shape[1]} columns")
    ids = table[:, start.used[:2]]
    bad = np.flatnonzero((ids != np.floor(ids)).any(axis=1) | ~np.isfinite(ids).all(axis=1))
    if len(bad):
        raise GraphError(
            f"{path}: expected integers as ids, got {ids[bad[0]].tolist()} as edge {bad[0] + 1}"
        )
    if (ids >= EXACT).any():  # they were rounded
        raise GraphError(f"{path}: expected ids below 2**53, got {int(ids.max())}")
    weights = table[:, start.used[2]].astype("float32") if len(start.used) == 3 else None
    rows, cols = ids.T.astype("int64")
    return rows, cols, weights


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The nonempty lines, without comments, and their numbers from 1."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            text = uncommented(line)
            if text:
                yield number, text


def _opened(path: Path) -> io.TextIOWrapper:
    """Open a text file; comments and names may be in encodings that share ASCII digits."""
    file: Any = gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")
    wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    file.seek(0)
    return io.TextIOWrapper(file, "utf-16" if wide else ENCODING, errors="replace")


def uncommented(line: str) -> str:
    """A line without its comment."""
    for mark in COMMENTS:
        if mark in line:
            line = line[: line.index(mark)]
    return line.strip()


def first_edge(path: Path) -> Start:
    """Find the first line of numbers, possibly after a line of names."""
    lines = _lines(path)
    number, line = head = next(lines, (0, ""))
    named = bool(line) and not any(map(_is_number, _words(line)))
    if named:
        if not _words(line)[0]:  # as pandas writes
            raise GraphError(f"{path}: line {number}: {EXPECTED}, got a column without a name")
        number, line = next(lines, (0, ""))
    if not line:
        raise GraphError(f"{path}: {EXPECTED}; there are none")
    delimiter = next((d for d in (",", ";") if d in line), None)
    columns = len(line.split(delimiter))
    names = head[1].split(delimiter) if named else _commented(path, number, columns)
    start = Start(number, delimiter, used_columns(path, names, columns), columns)
    if not start.used or not start.is_edge(line):
        raise GraphError(f"{path}: line {number}: {EXPECTED}, got {line[:60]!r}")
    return start


def _commented(path: Path, number: int, columns: int) -> list[str]:
    """Names of columns in a comment above the first edge, as in SNAP's files, if all are known."""
    names = []
    with _opened(path) as file:
        for line in itertools.islice(file, number - 1):
            words = line.strip().lstrip("".join(COMMENTS)).replace(",", " ").split()
            roles = roles_of(words)
            if len(words) == columns and {"source", "target"} <= {*roles} and None not in roles:
                names = words
    return names


def _bad_line(path: Path, labelled: Iterator[tuple[str, str]], start: Start) -> GraphError | None:
    """The error for the first line with another layout, or None."""
    for label, line in labelled:
        if not start.is_edge(line):
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
