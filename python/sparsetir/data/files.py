"""Readers of graphs and matrices from files, as scipy CSR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.lib.npyio import NpzFile

from sparsetir.data import graph_files
from sparsetir.data.column_names import weight_of
from sparsetir.data.datasets import SHIPPED
from sparsetir.data.graph_edges import EDGE_LISTS, WEIGHTS, from_edges, read_edges, two_lengths
from sparsetir.data.matrix_files import read_market, read_saved
from sparsetir.runtime.file_errors import (
    GraphError,
    as_path,
    check_matrix,
    check_npz,
    printable,
    reading,
)

KINDS = (
    f"{', '.join(SHIPPED)}, an .npz file (file.npz:layer for one of several matrices), .mtx[.gz], "
    "an edge list (.txt, .csv, .tsv, .el, also with .gz), a .pt file of torch.save, or a folder of "
    "PyG or DGL"
)
INTEGERS = "expected integers of one dimension"


def load_graph(source: str | Path) -> sp.csr_array:
    """Read a graph as CSR.

    Parameters
    ----------
    source : str or Path
        The name of a shipped graph ("cora") or a path; the suffix ":T" transposes. Paths of

        - .npz: arrays `shape`, `indptr`, `indices` and maybe `data`; files of
          `scipy.sparse.save_npz`; `row`, `col` and maybe `data`, `shape`; from several matrices,
          `<layer>.indptr` and so on, name one: `file.npz:layer`. `weight` and the like may replace
          `data`
        - .mtx, .mtx.gz: Matrix Market, coordinates
        - .txt, .csv, .tsv, .el, also with .gz: edge lists; ids are not renumbered, and start at 0.
          The matrix is square, for the largest id. Without names columns are row (target), column
          (source) and maybe weight. Names in the first line, or in a comment ("#", "%") above the
          edges, distinguish sources (`source`, `src`, `from`, ..) and targets (`target`, `dst`,
          `to`, ..), in any order, and `row` and `col`; weights are columns with names such as
          `weight`, `value` or `rating`. Others (`time`, `label`, `type`, `id`, ..) are ignored with
          a warning; unknown ones are refused
        - .pt: files of `torch.save` with an `edge_index`, a dict with one, PyG's `Data`, or a
          sparse tensor; torch is needed, and no code in the file is run. Weights are `edge_weight`
          and the like, or an `edge_attr` of one float per edge. Or a folder of PyG with
          `processed/data.pt`
        - .bin, .dgl, or a folder with `graph.dgl`: files of `dgl.save_graphs`; dgl is needed

    Returns
    -------
    (m, n) csr_array, float32 or float64
        Sorted int32 indices (int64 if they do not fit), without duplicates. Values are the
        weights of the file, or else ones: float32, or float64 if an .npz file or a sparse tensor
        has that. Those of equal edges are added; stored zeros are kept.

    Raises
    ------
    GraphError
        A ValueError with a readable message that names the file.
    TypeError, ValueError
        For a source that is not a path.

    Notes
    -----
    If a file distinguishes sources and targets, rows are targets and columns sources, so that
    A @ X aggregates the incoming edges of each node (like `SparseMatrix.from_edge_index`).

    A file may demand 256 MiB of memory, or 256 bytes per byte of its own: more is refused, as a
    short file may unpack to much or name a large id. A row or column takes 8 bytes, an edge 24.
    """
    text = str(as_path("load_graph", "source", source))
    plain, transposed = (text[:-2], True) if text.endswith(":T") else (text, False)
    with reading(plain, GraphError):
        matrix = _canonical(_read(plain))
        return _canonical(matrix.T) if transposed else matrix


def graph_name(source: str | Path) -> str:
    """A short name for display and file names: "cora", "cora:T", "weights:conv1".

    Parameters
    ----------
    source : str or Path
        The same as for :func:`load_graph`.

    Returns
    -------
    str
    """
    text = str(source)
    plain, transposed = (text[:-2], ":T") if text.endswith(":T") else (text, "")
    path, layer = _split_layer(plain)
    if path.is_dir():
        path = path.resolve()
        return printable(path.name + transposed)
    name = path.name.removesuffix(".gz")
    stem = name if name in SHIPPED else Path(name).stem
    return printable(stem + (f":{layer}" if layer else "") + transposed)


def layers(path: Path) -> list[str]:
    """The names of the matrices of an .npz file that holds several; none for one matrix.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    list of str
    """
    with reading(str(path), GraphError), np.load(path) as arrays:
        return _layers(arrays.files)


def _layers(names: list[str]) -> list[str]:
    return [n.removesuffix(".indptr") for n in names if n.endswith(".indptr")]


def _read(text: str) -> object:
    if text in SHIPPED:
        return SHIPPED[text]()
    path, layer = _split_layer(text)
    if not path.exists():
        raise GraphError(f"{text}: no such file; a graph is {KINDS}")
    if path.is_dir():
        path = graph_files.file_of(path)
    if not path.is_file():
        raise GraphError(f"{path}: expected a file or folder")
    if path.stat().st_size == 0:
        raise GraphError(f"{path}: the file is empty")
    name = path.name.lower()
    if name.endswith(".npz"):
        return _read_npz(path, layer)
    if layer:
        raise GraphError(f"{text}: only an .npz file holds several matrices")
    if name.endswith(graph_files.ENDINGS):
        return graph_files.read(path)
    if name.endswith((".mtx", ".mtx.gz")):
        matrix = read_market(path)
        check_matrix(path, matrix.shape, matrix.nnz)
        return matrix.astype("float32")
    if name.removesuffix(".gz").endswith(EDGE_LISTS):
        return read_edges(path)
    raise GraphError(f"{path}: expected {KINDS}; got the ending '{path.suffix}'")


def _split_layer(text: str) -> tuple[Path, str]:
    """A path, and the layer after a colon, unless a file has the whole name."""
    before, colon, layer = text.rpartition(":")
    if colon and before and not Path(text).exists() and "/" not in layer:
        return Path(before), layer
    return Path(text), ""


def _read_npz(path: Path, layer: str) -> object:
    check_npz(path)
    with np.load(path) as arrays:
        names = arrays.files
        if layer:
            several = _layers(names)
            if layer not in several:
                known = f"has {_some(several)}" if several else "has no arrays <layer>.indptr"
                raise GraphError(f"{path}: has no layer '{layer}': {known}")
            return _compressed(path, arrays, f"{layer}.")
        if "format" in names:
            saved = read_saved(path)
            check_matrix(path, saved.shape, saved.nnz)
            return saved
        if {"row", "col"} <= set(names):
            shape = arrays["shape"] if "shape" in names else None
            data = weight_of(path, names)
            weights = None if data is None else arrays[data]
            return from_edges(path, arrays["row"], arrays["col"], weights, shape)
        several = _layers(names)
        if several and "indptr" not in names:
            raise GraphError(
                f"{path}: holds {len(several)} matrices; name one, as {path.name}:{several[0]} "
                f"(it has {_some(several)})"
            )
        return _compressed(path, arrays, "")


def _compressed(path: Path, arrays: NpzFile, prefix: str) -> sp.csr_array:
    """Check `shape`, `indptr`, `indices` and maybe `data`, and make CSR."""
    missing = [n for n in ("shape", "indptr", "indices") if prefix + n not in arrays.files]
    if missing:
        raise GraphError(
            f"{path}: expected arrays shape, indptr, indices, or row, col; has no "
            f"{', '.join(prefix + n for n in missing)}, but {_some(arrays.files)}"
        )
    indptr, indices = arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"]
    for name, array in (("indptr", indptr), ("indices", indices)):  # SciPy would round them
        if array.ndim != 1 or array.dtype.kind not in "iu":
            got = f"{array.dtype} of shape {array.shape}"
            raise GraphError(f"{path}: {prefix}{name}: {INTEGERS}, got {got}")
    shape = two_lengths(f"{path}: {prefix}shape", arrays[f"{prefix}shape"])
    name = weight_of(path, (n.removeprefix(prefix) for n in arrays.files if n.startswith(prefix)))
    data = np.ones(len(indices), "float32") if name is None else arrays[prefix + name]
    check_matrix(path, shape, len(indices))
    if len(indptr) and indptr[-1] < len(indices):  # SciPy would leave the rest out
        got = f"{indptr[-1]} of {len(indices)} indices"
        raise GraphError(f"{path}: {prefix}indptr: expected to end with all indices, got {got}")
    return sp.csr_array((data, indices, indptr), shape=shape)


def _canonical(matrix: Any) -> sp.csr_array:
    """Sort rows, merge duplicates, and narrow indices to int32 where possible; refuse complex."""
    if matrix.dtype.kind not in "biuf":
        raise ValueError(f"expected real numbers, got {matrix.dtype}")
    kind = matrix.dtype.name if matrix.dtype.name in WEIGHTS else "float32"
    csr = sp.csr_array(matrix.astype(kind))  # also converts the byte order
    csr.check_format(full_check=True)
    csr.sum_duplicates()
    largest = max(*csr.shape, csr.nnz)
    idtype = "int32" if largest < 2**31 else "int64"
    arrays = csr.data, csr.indices.astype(idtype), csr.indptr.astype(idtype)
    return sp.csr_array(arrays, shape=csr.shape)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
