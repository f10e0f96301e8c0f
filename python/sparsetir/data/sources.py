"""Sources of sparse tensors: objects of scipy, torch and other libraries, arrays, files.

Kinds of objects are distinguished by their attributes, without importing a library.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse

from sparsetir.data.files import load_graph
from sparsetir.data.matrix_files import diagonals, read_market, read_saved
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import is_array, is_torch, to_host, type_name
from sparsetir.runtime.file_errors import GraphError, as_path, printable, reading
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.index_arrays import check_indptr, check_range, index_type, rows_increase

if TYPE_CHECKING:
    from torch import Tensor

VALUE_DTYPES = (
    "float16", "bfloat16", "float32", "float64", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip

# Types of values that NumPy itself has, in this machine's byte order.
NATIVE = {np.dtype(name) for name in VALUE_DTYPES if name != "bfloat16"}


class Stored(NamedTuple):
    """Canonical coordinates and their values.

    places : (given,) position of each original element; None if nothing moved
    """

    pattern: Pattern
    values: np.ndarray
    places: np.ndarray | None = None


def is_sparse(data: object) -> bool:
    """Whether data is a sparse object of scipy, PyData or torch."""
    if is_torch(data):
        return "sparse" in str(data.layout)
    return scipy.sparse.issparse(data) or _is_pydata(data)


def _is_pydata(data: object) -> bool:
    return hasattr(data, "fill_value") and hasattr(data, "asformat")


def read(caller: str, argument: str, data: object, values: object, shape: object) -> Stored:
    """Read a sparse object of scipy or torch, or coordinates, values and shape of any order."""
    if is_sparse(data):
        return _from_sparse(caller, argument, data, values, shape)
    if is_array(data):
        data = to_host(caller, argument, data)
        if data.ndim != 2:
            expected = "an (order, nnz) array or an array for each axis"
            raise wrong(caller, argument, expected, f"shape {data.shape}")
    elif not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise TypeError(
            f"{caller}: argument '{argument}': expected an array of coordinates for each axis, or "
            f"a sparse matrix or tensor of scipy or torch, got {type_name(data)}"
        )
    return from_coords(caller, argument, list(data), values, shape)


def from_coords(
    caller: str, argument: str, coords: Sequence[object], values: object, shape: object = None
) -> Stored:
    """Check and sort coordinates; values of duplicates are added."""
    if not len(coords):
        raise wrong(caller, argument, "at least one axis", "none")
    axes = [_integers(caller, argument, c, f" for axis {n}") for n, c in enumerate(coords)]
    if any(len(c) != len(axes[0]) for c in axes):
        raise wrong(caller, argument, "arrays of one length", f"lengths {[len(c) for c in axes]}")
    if shape is None:
        shape = tuple(int(c.max()) + 1 if len(c) else 0 for c in axes)
    shape = check_shape(caller, shape, len(axes))
    for axis, (c, length) in enumerate(zip(axes, shape, strict=True)):
        check_range(f"{caller}: argument '{argument}': axis {axis}", c, length, "integers")
    return ordered(axes, check_values(caller, values, len(axes[0])), shape)


def from_compressed(
    caller: str,
    indptr: object,
    indices: object,
    values: object,
    shape: object,
    by_columns: bool = False,
) -> Stored:
    """Read CSR or CSC; shares the memory of canonical CSR whose indices have the right type."""
    major, minor = (1, 0) if by_columns else (0, 1)
    indptr = _integers(caller, "indptr", indptr)
    indices = _integers(caller, "indices", indices)
    if shape is None:
        shape = (max(0, len(indptr) - 1), int(indices.max()) + 1 if len(indices) else 0)
    shape = check_shape(caller, shape, 2)
    check_indptr(caller, indptr, len(indices), shape[major])
    check_range(f"{caller}: argument 'indices'", indices, shape[minor], "integers")
    stored = check_values(caller, values, len(indices))
    idtype = index_type(max(*shape, len(indices)))
    indices = indices.astype(idtype, copy=False)
    if not by_columns and rows_increase(indptr, indices):
        indptr = indptr.astype(index_type(len(indices)), copy=False)
        return Stored(Pattern.from_csr(indptr, indices, shape, check=False), stored)
    lines = np.arange(shape[major], dtype=idtype).repeat(np.diff(indptr))
    return ordered([indices, lines] if by_columns else [lines, indices], stored, shape)


def from_dense(caller: str, array: object) -> Stored:
    """Take the nonzeros of an array, including NaN."""
    if is_sparse(array):
        raise wrong(caller, "array", "a dense array", type_name(array), TypeError)
    dense = to_host(caller, "array", array)
    if not dense.ndim:
        raise wrong(caller, "array", "at least one axis", "none")
    nonzeros = np.nonzero(dense)
    return from_coords(caller, "array", nonzeros, dense[nonzeros], dense.shape)


def read_file(caller: str, path: object) -> Stored:
    """Read a Matrix Market file, or a file of `scipy.sparse.save_npz`."""
    path = as_path(caller, "path", path)
    name = path.name.lower()
    if not name.endswith((".mtx", ".mtx.gz", ".npz")):
        raise wrong(caller, "path", "a name that ends in .mtx, .mtx.gz or .npz", f"'{path}'")
    shown = f"'{printable(str(path))}'"
    if not os.path.isfile(path):
        raise wrong(caller, "path", "a file", shown, FileNotFoundError)
    with reading(f"{caller}: argument 'path': {shown}", GraphError):
        matrix = read_saved(path) if name.endswith(".npz") else read_market(path)
    return _read_scipy(f"{caller}: {shown}", "path", matrix)


def check_shape(caller: str, shape: Any, order: int) -> tuple[int, ...]:
    """Convert a shape to a tuple; raise unless it is `order` lengths."""
    try:
        out = tuple(operator.index(n) for n in shape)
    except TypeError:
        out = None
    if out is None or len(out) != order or any(not 0 <= n < 2**63 for n in out):
        raise ValueError(
            f"{caller}: argument 'shape': expected {order} integers >= 0, got {shape!r}"
            + (" (2**63 and more are too large)" if out and max(out) >= 2**63 else "")
        )
    return out


def check_values(caller: str, values: object, count: int, features: bool = False) -> np.ndarray:
    """Check values (count,) and make them contiguous; float32 ones for None.

    features : whether there may be more dimensions
    """
    if values is None:
        return np.ones(count, np.float32)
    if type(values) is np.ndarray and values.dtype in NATIVE and values.shape == (count,):
        return np.ascontiguousarray(values)
    out = to_host(caller, "values", values)
    if out.dtype.name not in VALUE_DTYPES:
        raise wrong(caller, "values", f"one of {', '.join(VALUE_DTYPES)}", out.dtype, TypeError)
    if out.shape[:1] != (count,) or (out.ndim > 1 and not features):
        shape = f"({count}, ...)" if features else f"({count},)"
        raise wrong(caller, "values", f"shape {shape}", out.shape)
    if not out.dtype.isnative:
        out = out.astype(out.dtype.newbyteorder("="))
    return np.ascontiguousarray(out)


def distinct(coords: list[np.ndarray], shape: tuple[int, ...]) -> tuple[list, np.ndarray]:
    """Distinct coordinates in canonical order, and the position of each original one, (given,)."""
    count = len(coords[0])
    bits = count.bit_length()
    if math.prod(shape) << bits < 2**63:
        # Coordinate and position in one number: sorting these is faster than argsort, and stable.
        key = coords[0].astype(np.int64)
        for c, length in zip(coords[1:], shape[1:], strict=True):
            key *= length
            key += c
        key <<= bits
        key |= np.arange(count)
        key.sort()
        order = key & (2**bits - 1)
    else:
        order = np.lexsort(coords[::-1])
    ordered = [c[order] for c in coords]
    first = np.zeros(count, bool)
    first[:1] = True
    for c in ordered:
        first[1:] |= c[1:] != c[:-1]
    places = np.empty(count, index_type(count))
    places[order] = np.cumsum(first, dtype=places.dtype) - 1
    return ordered if first.all() else [c[first] for c in ordered], places


def summed(values: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Scatter values to their places, adding those at the same place in their original order.

    16-bit floating point is added in float32 and rounded once.
    """
    if len(values) == count:
        out = np.empty_like(values)
        out[places] = values
        return out
    half = values.dtype.name in ("float16", "bfloat16")
    wide = np.dtype(np.float32) if half else values.dtype
    out = np.full(
        (count, *values.shape[1:]), wide.type(-0.0)
    )  # adding -0.0 changes nothing, not even -0.0
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(out, places.astype(np.intp, copy=False), values.astype(wide, copy=False))
        return out.astype(values.dtype, copy=False)


def ordered(coords: list[np.ndarray], values: np.ndarray, shape: tuple[int, ...]) -> Stored:
    """Sort coordinates, known to be in range, and add values of duplicates."""
    idtype = index_type(max(*shape, len(values)))
    coords = [c.astype(idtype, copy=False) for c in coords]
    try:
        return Stored(Pattern(coords, shape), values)
    except StructureError:  # out of order or stored twice
        unique, places = distinct(coords, shape)
        return Stored(Pattern(unique, shape), summed(values, places, len(unique[0])), places)


def _integers(caller: str, argument: str, array: object, where: str = "") -> np.ndarray:
    out = to_host(caller, argument, array)
    if out.ndim != 1:
        raise wrong(caller, argument, f"one dimension{where}", f"shape {out.shape}")
    if not len(out):
        return np.zeros(0, np.int32)
    if out.dtype.kind not in "iu":
        raise wrong(caller, argument, f"integers{where}", out.dtype, TypeError)
    return np.ascontiguousarray(out)


# -- sparse objects of scipy and torch ------------------------------------------------------------


def _from_sparse(caller: str, argument: str, data: Any, values: object, shape: Any) -> Stored:
    _none_beside(caller, values, f"{type_name(data)}, which has its own")
    have = tuple(int(n) for n in data.shape)
    if shape is not None and check_shape(caller, shape, len(have)) != have:
        raise wrong(caller, "shape", f"{have}, the shape of argument '{argument}'", tuple(shape))
    if _is_pydata(data):
        if data.fill_value != 0:
            raise wrong(caller, argument, "zeros where nothing is stored", data.fill_value)
        data = data.asformat("coo")
        return from_coords(caller, argument, [*data.coords], data.data, have)
    return (
        _read_torch(caller, argument, data)
        if is_torch(data)
        else _read_scipy(caller, argument, data)
    )


def _none_beside(caller: str, values: object, what: str) -> None:
    if values is not None:
        raise ValueError(f"{caller}: argument 'values': expected none for {what}")


def _read_scipy(caller: str, argument: str, data: Any) -> Stored:
    if data.ndim == 2 and data.format in ("csr", "csc", "bsr"):
        nnz = data.indptr[-1] if len(data.indptr) else 0  # the arrays may be longer
        arrays = data.indptr, data.indices[:nnz], data.data[:nnz]
        return _from_lines(caller, argument, data.format, arrays, data.shape)
    coo = diagonals(data) if data.format == "dia" else data.tocoo(copy=False)
    return from_coords(caller, argument, coo.coords, coo.data, coo.shape)


def _read_torch(caller: str, argument: str, data: Tensor) -> Stored:
    data, layout = data.detach().cpu(), str(data.layout).removeprefix("torch.sparse_")
    shape = tuple(int(n) for n in data.shape)
    indptr = indices = None
    if layout in ("csr", "bsr"):
        indptr, indices = data.crow_indices(), data.col_indices()
    elif layout in ("csc", "bsc"):
        indptr, indices = data.ccol_indices(), data.row_indices()
    elif layout != "coo":
        raise wrong(caller, argument, "a layout of torch", layout, TypeError)
    if data.dense_dim() or (indptr is not None and indptr.ndim != 1):
        raise ValueError(
            f"{caller}: argument '{argument}': expected a torch tensor without batch or dense "
            f"dimensions, got layout {layout}, shape {shape}, {data.dense_dim()} dense dimensions"
        )
    if indptr is None:  # indices() and values() want a coalesced tensor
        return from_coords(caller, argument, list(data._indices()), data._values(), shape)
    return _from_lines(caller, argument, layout, (indptr, indices, data.values()), shape)


def _from_lines(
    caller: str,
    argument: str,
    kind: str,
    arrays: tuple[object, object, object],
    shape: tuple[int, ...],
) -> Stored:
    """Read CSR, CSC, BSR or BSC; of the latter two all elements of blocks are stored.

    arrays : pointers of (block) rows or columns; the other coordinates; values, for blocks
        (blocks, rows, columns)
    """
    by_columns = kind in ("csc", "bsc")
    if kind in ("csr", "csc"):
        return from_compressed(caller, *arrays, shape, by_columns)
    indptr, indices = (
        _integers(caller, "indptr", arrays[0]),
        _integers(caller, "indices", arrays[1]),
    )
    values = to_host(caller, "values", arrays[2])
    size = values.shape[1:]
    check_indptr(caller, indptr, len(indices), shape[by_columns] // size[by_columns])
    lines = np.arange(len(indptr) - 1).repeat(np.diff(indptr))
    rows, cols = (indices, lines) if by_columns else (lines, indices)
    rows = rows.astype(np.int64)[:, None, None] * size[0] + np.arange(size[0])[:, None]
    cols = cols.astype(np.int64)[:, None, None] * size[1] + np.arange(size[1])
    coords = [np.broadcast_to(c, values.shape).reshape(-1) for c in (rows, cols)]
    return from_coords(caller, argument, coords, values.reshape(-1), shape)


# -- matrices of any library ----------------------------------------------------------------------


def read_matrix(
    caller: str, name: str, data: object, values: object = None, shape: object = None
) -> Stored:
    """Read anything that :func:`adopted` takes.

    values, shape : for edges and pairs only; others have their own
    caller, name : names of the function and argument, for errors
    """
    source = adopted(caller, name, data)
    if isinstance(source, Edges):
        return _from_edges(caller, name, source, values, shape)
    if isinstance(source, Compressed):
        _none_beside(caller, values, f"{type_name(data)}, which has its own")
        return from_compressed(
            caller,
            source.rowptr,
            source.col,
            source.values,
            source.shape if shape is None else shape,
        )
    return _from_sparse(caller, name, source, values, shape)


def read_edges(
    caller: str,
    name: str,
    edges: object,
    values: object = None,
    shape: object = None,
    flip: bool = False,
) -> Stored:
    """Read (2, E) edges, sources first.

    shape : shape of the matrix; by default square, for the largest node
    flip : make a row for each source, rather than for each target
    """
    index = to_host(caller, name, edges)
    if index.ndim != 2 or len(index) != 2:
        expected = "a sparse matrix or an edge_index of shape (2, E)"
        raise wrong(caller, name, expected, f"shape {index.shape}; see SparseMatrix.from_dense")
    if shape is None and index.dtype.kind in "iu":
        shape = (int(index.max()) + 1 if index.size else 0,) * 2
    coords = index if flip else index[::-1]
    return from_coords(caller, name, list(coords), values, shape)


def _from_edges(caller: str, name: str, edges: Edges, values: object, shape: object) -> Stored:
    if edges.values is not None:
        _none_beside(caller, values, "a graph with weights")
        values = edges.values
    if shape is None and edges.size is not None:
        size = edges.size
        ends = tuple(size) if isinstance(size, tuple | list) else (size, size)
        shape = check_shape(caller, ends[::-1], 2)
    if isinstance(edges.index, tuple):
        columns, rows = edges.index
        return from_coords(caller, name, [rows, columns], values, shape)
    return read_edges(caller, name, edges.index, values, shape)


EXPECTED = (
    "a sparse matrix of scipy or torch, a SparseMatrix, an edge_index (2, E) or a pair "
    "(edge_index, size), a pair (rows, columns), a graph of PyG or DGL, or the name of a file"
)


class Edges(NamedTuple):
    """Elements of a matrix with a row for each target and a column for each source.

    index : (2, E) integers, sources first; or a pair of (E,) arrays
    size : (sources, targets), one number for both, or None
    values : (E,), or None for ones
    square : whether there are as many sources as targets, if there is no size
    """

    index: Any
    size: object = None
    values: Any = None
    square: bool = True


class Compressed(NamedTuple):
    """CSR: (m + 1,) row pointers, (nnz,) columns in row order, and (nnz,) values or None."""

    rowptr: Any
    col: Any
    shape: tuple[int, int]
    values: Any = None


def adopted(caller: str, name: str, data: Any) -> object:
    """Convert data of any library to Edges, Compressed, or a sparse matrix of scipy or torch.

    data : one of

        - a sparse matrix of scipy or torch
        - (2, E) integers of any library with DLPack, or a pair of them and a size; a pair of (E,)
          integers, rows and columns
        - a file or a name, as for :func:`sparsetir.graphs.load_graph`
        - `Data` of PyG, or one relation of its `HeteroData`, with its `edge_weight` if there is one
        - a graph of DGL with one relation, without weights; a `dgl.sparse.SparseMatrix`
        - a `torch_sparse.SparseTensor`

    caller, name : names of the function and argument, for errors

    Raises TypeError and ValueError for other data.
    """
    if isinstance(data, str | os.PathLike):
        return _loaded(caller, name, data)
    if hasattr(data, "sparse_size") and hasattr(data, "as_tensor"):  # torch_geometric.EdgeIndex
        size = tuple(data.sparse_size())
        return Edges(data.as_tensor(), None if None in size else size)
    if is_sparse(data):
        return data
    if is_array(data):
        return Edges(data)
    if isinstance(data, tuple | list):
        if len(data) == 2:
            return _pair(caller, name, *data)
        raise TypeError(
            f"{caller}: argument '{name}': expected {EXPECTED}; got {len(data)} values in a "
            f"{type(data).__name__}; SparseMatrix.from_csr takes (indptr, indices, values)"
        )
    if hasattr(data, "edge_index"):  # torch_geometric.data.Data, or one of its EdgeStorages
        return _from_pyg(caller, name, data)
    if hasattr(data, "edge_types") and hasattr(data, "edge_items"):
        kinds = ", ".join(map(str, data.edge_types))
        raise ValueError(f"{caller}: argument '{name}': expected one relation, as data[{kinds}]")
    if hasattr(data, "sparse_sizes") and hasattr(data, "csr"):  # torch_sparse.SparseTensor
        rowptr, col, values = data.csr()
        m, n = data.sparse_sizes()
        return Compressed(rowptr, col, (int(m), int(n)), values)
    if hasattr(data, "coo") and hasattr(data, "val") and hasattr(data, "shape"):  # dgl.sparse's
        rows, columns = data.coo()
        m, n = data.shape
        return Edges((columns, rows), (int(n), int(m)), data.val)
    if hasattr(data, "canonical_etypes") and callable(getattr(data, "edges", None)):  # DGL's graphs
        return _from_dgl(caller, name, data)
    raise TypeError(f"{caller}: argument '{name}': expected {EXPECTED}; got {type(data).__name__}")


def _loaded(caller: str, name: str, path: Any) -> scipy.sparse.csr_array:
    try:
        return load_graph(path)
    except GraphError as error:
        raise GraphError(f"{caller}: argument '{name}': {error}") from error


def _pair(caller: str, name: str, first: Any, second: object) -> Edges:
    """Edges from a pair: edges with a size, or rows and columns."""
    kinds = f"{type(first).__name__} and {type(second).__name__}"
    ends = second if isinstance(second, tuple) else ()
    if len(ends) == 2 and all(is_array(x) and len(x.shape) == 1 for x in ends):
        got = "SciPy's (values, (rows, columns)): SparseMatrix((rows, columns), shape, values)"
        raise wrong(caller, name, "a pair (rows, columns)", got, TypeError)
    if not is_array(first):
        try:
            first = np.asarray(first)
        except (ValueError, RuntimeError):  # rows of many lengths, nested tensors
            first = np.zeros(())
    dims = len(first.shape)
    if dims == 2:
        return Edges(first, second)
    if dims != 1 or (not is_array(second) and not isinstance(second, tuple | list)):
        raise TypeError(f"{caller}: argument '{name}': expected {EXPECTED}; got a pair of {kinds}")
    return Edges((second, first), square=False)


def _from_pyg(caller: str, name: str, data: Any) -> Edges:
    if data.edge_index is None:
        got = f"a {type(data).__name__} without an edge_index"
        raise TypeError(f"{caller}: argument '{name}': expected {EXPECTED}; got {got}")
    size = getattr(data, "num_nodes", None)
    if callable(getattr(data, "size", None)) and getattr(data, "_key", None) is not None:
        size = data.size()  # an EdgeStorage's: (sources, targets)
    return Edges(data.edge_index, size, getattr(data, "edge_weight", None))


def _from_dgl(caller: str, name: str, graph: Any) -> Edges:
    kinds = list(graph.canonical_etypes)
    if len(kinds) != 1:
        one = kinds[0] if kinds else "relation"
        raise wrong(caller, name, f"a graph with one relation, as graph[{one!r}]", len(kinds))
    sources, targets = graph.edges(order="eid")
    return Edges((sources, targets), (int(graph.num_src_nodes()), int(graph.num_dst_nodes())))
