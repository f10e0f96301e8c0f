"""Sources of sparse tensors: objects of scipy and torch, arrays, files."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from sparsetir.data.matrix_files import read_market, read_saved
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import hidden, is_array, is_torch
from sparsetir.runtime.file_errors import GraphError, as_path, printable, reading
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.index_arrays import check_indptr, check_range, index_type

VALUE_DTYPES = (
    "float16", "bfloat16", "float32", "float64", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """Canonical coordinates and their values.

    places : (given,) where each element that was given went; None if nothing moved
    """

    pattern: Pattern
    values: np.ndarray
    places: np.ndarray | None = None


def is_sparse(data: Any) -> bool:
    """Whether it is scipy's, or a sparse tensor of torch."""
    return scipy.sparse.issparse(data) or (is_torch(data) and "sparse" in str(data.layout))


def read(who: str, argument: str, data: Any, values: Any, shape: Any) -> Stored:
    """Of a sparse object of scipy or torch, which brings values and shape, or of coordinates."""
    if is_sparse(data):
        if values is not None:
            raise ValueError(
                f"{who}: argument 'values': expected none beside {_name(data)}, which has its own"
            )
        have = tuple(int(n) for n in data.shape)
        if shape is not None and check_shape(who, shape, len(have)) != have:
            raise wrong(who, "shape", f"{have}, the shape of argument '{argument}'", tuple(shape))
        return (
            _read_torch(who, argument, data) if is_torch(data) else _read_scipy(who, argument, data)
        )
    if is_array(data):
        data = to_host(who, argument, data)
        if data.ndim != 2:
            expected = "an (order, nnz) array or an array for each axis"
            raise wrong(who, argument, expected, f"shape {data.shape}")
    elif not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise TypeError(
            f"{who}: argument '{argument}': expected an array of coordinates for each axis, or a "
            f"sparse matrix or tensor of scipy or torch, got {_name(data)}"
        )
    return from_coords(who, argument, list(data), values, shape)


def from_coords(
    who: str, argument: str, coords: Sequence[object], values: object, shape: object = None
) -> Stored:
    """Of coordinates in any order; values of those given more than once are added."""
    if not len(coords):
        raise ValueError(f"{who}: argument '{argument}': expected at least one axis, got none")
    given = [_integers(who, argument, c, f" for axis {n}") for n, c in enumerate(coords)]
    if any(len(c) != len(given[0]) for c in given):
        raise wrong(who, argument, "arrays of one length", f"lengths {[len(c) for c in given]}")
    if shape is None:
        shape = tuple(int(c.max()) + 1 if len(c) else 0 for c in given)
    shape = check_shape(who, shape, len(given))
    for axis, (c, length) in enumerate(zip(given, shape, strict=True)):
        check_range(f"{who}: argument '{argument}': axis {axis}", c, length, "integers")
    return _ordered(given, check_values(who, values, len(given[0])), shape)


def from_compressed(
    who: str,
    indptr: object,
    indices: object,
    values: object,
    shape: object,
    by_columns: bool = False,
) -> Stored:
    """Of CSR, or CSC; shares the memory of canonical CSR whose indices have the right type."""
    major, minor = (1, 0) if by_columns else (0, 1)
    indptr = _integers(who, "indptr", indptr)
    indices = _integers(who, "indices", indices)
    if shape is None:
        shape = (len(indptr) - 1, int(indices.max()) + 1 if len(indices) else 0)
    shape = check_shape(who, shape, 2)
    check_indptr(who, indptr, len(indices), shape[major])
    check_range(f"{who}: argument 'indices'", indices, shape[minor], "integers")
    stored = check_values(who, values, len(indices))
    idtype = index_type(max(*shape, len(indices)))
    indices = indices.astype(idtype, copy=False)
    if not by_columns and _in_order(indptr, indices):
        indptr = indptr.astype(index_type(len(indices)), copy=False)
        return Stored(Pattern.from_csr(indptr, indices, shape, check=False), stored)
    lines = np.arange(shape[major], dtype=idtype).repeat(np.diff(indptr))
    return _ordered([indices, lines] if by_columns else [lines, indices], stored, shape)


def from_dense(who: str, array: object) -> Stored:
    """Of the nonzeros of an array; NaN is one."""
    if is_sparse(array):
        raise TypeError(f"{who}: argument 'array': expected a dense array, got {_name(array)}")
    dense = to_host(who, "array", array)
    if not dense.ndim:
        raise ValueError(f"{who}: argument 'array': expected at least one axis, got none")
    at = np.nonzero(dense)
    return from_coords(who, "array", at, dense[at], dense.shape)


def read_file(who: str, path: object) -> Stored:
    """Of a Matrix Market file, or a file of `scipy.sparse.save_npz`."""
    path = as_path(who, "path", path)
    name = path.name.lower()
    if not name.endswith((".mtx", ".mtx.gz", ".npz")):
        raise wrong(who, "path", "a name that ends in .mtx, .mtx.gz or .npz", f"'{path}'")
    shown = f"'{printable(str(path))}'"
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{who}: argument 'path': expected a file, got {shown}")
    with reading(f"{who}: argument 'path': {shown}", GraphError):
        found = read_saved(path) if name.endswith(".npz") else read_market(path)
    return _read_scipy(f"{who}: {shown}", "path", found)


def check_shape(who: str, shape: Any, order: int) -> tuple[int, ...]:
    """The shape as a tuple, refused if it is not `order` lengths."""
    try:
        out = tuple(operator.index(n) for n in shape)
    except TypeError:
        out = None
    if out is None or len(out) != order or any(not 0 <= n < 2**63 for n in out):
        raise ValueError(
            f"{who}: argument 'shape': expected {order} integers >= 0, got {shape!r}"
            + (" (2**63 and more are too large)" if out and max(out) >= 2**63 else "")
        )
    return out


def check_values(who: str, values: object, count: int, features: bool = False) -> np.ndarray:
    """(count,) values as an array in C order; float32 ones for None.

    features : whether there may be more dimensions
    """
    if values is None:
        return np.ones(count, np.float32)
    out = to_host(who, "values", values)
    if out.dtype.name not in VALUE_DTYPES:
        raise wrong(who, "values", f"one of {', '.join(VALUE_DTYPES)}", out.dtype, TypeError)
    if out.shape[:1] != (count,) or (out.ndim > 1 and not features):
        shape = f"({count}, ...)" if features else f"({count},)"
        raise ValueError(f"{who}: argument 'values': expected shape {shape}, got {out.shape}")
    if not out.dtype.isnative:
        out = out.astype(out.dtype.newbyteorder("="))
    return np.ascontiguousarray(out)


def to_host(who: str, argument: str, array: Any) -> np.ndarray:
    """An array of NumPy, torch, TVM or a list, as a NumPy array on the CPU; shared if it is one."""
    instead = hidden(array)
    if instead:
        raise TypeError(f"{who}: argument '{argument}': expected {instead}")
    if is_torch(array):
        if is_sparse(array):
            raise wrong(who, argument, "a dense array", "a sparse one", TypeError)
        try:
            array = array.detach().cpu()
            if str(array.dtype) == "torch.bfloat16":
                import torch

                return array.contiguous().view(torch.int16).numpy().view(np.dtype("bfloat16"))
            return array.numpy()
        except (NotImplementedError, RuntimeError, TypeError) as err:  # on meta, quantized
            raise TypeError(
                f"{who}: argument '{argument}': expected a tensor of plain numbers, got one of "
                f"{array.dtype} on {array.device}: {err}"
            ) from err
    if is_array(array) and not isinstance(array, np.ndarray):
        if hasattr(array, "numpy"):  # TVM's, which knows more types than DLPack
            return array.numpy()
        return np.from_dlpack(array)
    try:
        return np.asarray(array)
    except (ValueError, TypeError) as err:
        raise wrong(who, argument, "an array", f"{_name(array)}: {err}", TypeError) from err


def distinct(coords: list[np.ndarray], shape: tuple[int, ...]) -> tuple[list, np.ndarray]:
    """The coordinates in canonical order, each once, and (given,) where each of them went."""
    count = len(coords[0])
    bits = count.bit_length()
    if math.prod(shape) << bits < 2**63:
        # Coordinate and position in one number: to sort these is faster than argsort, and stable.
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
    """Values at their places, those at the same place added in the order they are given in.

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


def _ordered(coords: list[np.ndarray], values: np.ndarray, shape: tuple[int, ...]) -> Stored:
    """Of coordinates that are in range."""
    idtype = index_type(max(*shape, len(values)))
    coords = [c.astype(idtype, copy=False) for c in coords]
    try:
        return Stored(Pattern(coords, shape), values)
    except StructureError:  # out of order or stored twice
        found, places = distinct(coords, shape)
        return Stored(Pattern(found, shape), summed(values, places, len(found[0])), places)


def _integers(who: str, argument: str, array: object, where: str = "") -> np.ndarray:
    out = to_host(who, argument, array)
    if out.ndim != 1:
        raise wrong(who, argument, f"one dimension{where}", f"shape {out.shape}")
    if not len(out):
        return np.zeros(0, np.int32)
    if out.dtype.kind not in "iu":
        raise TypeError(f"{who}: argument '{argument}': expected integers{where}, got {out.dtype}")
    return np.ascontiguousarray(out)


def _in_order(indptr: np.ndarray, indices: np.ndarray) -> bool:
    """Whether the indices of each row increase strictly."""
    later = indices[1:] > indices[:-1]
    starts = indptr[(indptr > 0) & (indptr < len(indices))]
    later[starts - 1] = True
    return bool(later.all())


def _read_scipy(who: str, argument: str, data: Any) -> Stored:
    if data.ndim == 2 and data.format in ("csr", "csc", "bsr"):
        nnz = data.indptr[-1] if len(data.indptr) else 0  # there may be room behind
        indptr, indices, values = data.indptr, data.indices[:nnz], data.data[:nnz]
        if data.format == "bsr":
            return _from_blocks(who, argument, indptr, indices, values, data.shape, False)
        return from_compressed(who, indptr, indices, values, data.shape, data.format == "csc")
    found = diagonals(data) if data.format == "dia" else data.tocoo(copy=False)
    return from_coords(who, argument, found.coords, found.data, found.shape)


def diagonals(data: Any) -> scipy.sparse.coo_array:
    """Coordinates of a matrix in DIA; its `tocoo` would drop zeros that are stored."""
    columns = np.arange(min(data.data.shape[1], data.shape[1]))
    rows = columns - data.offsets[:, None].astype(np.int64)
    inside = (rows >= 0) & (rows < data.shape[0])
    coords = rows[inside], np.broadcast_to(columns, inside.shape)[inside]
    return scipy.sparse.coo_array((data.data[:, : len(columns)][inside], coords), shape=data.shape)


def _read_torch(who: str, argument: str, data: Any) -> Stored:
    data, layout = data.detach().cpu(), str(data.layout).removeprefix("torch.sparse_")
    shape = tuple(int(n) for n in data.shape)
    indptr = indices = None
    if layout in ("csr", "bsr"):
        indptr, indices = data.crow_indices(), data.col_indices()
    elif layout in ("csc", "bsc"):
        indptr, indices = data.ccol_indices(), data.row_indices()
    elif layout != "coo":
        raise TypeError(f"{who}: argument '{argument}': expected a layout of torch, got {layout}")
    if data.dense_dim() or (indptr is not None and indptr.ndim != 1):
        raise ValueError(
            f"{who}: argument '{argument}': expected a torch tensor without batch or dense "
            f"dimensions, got layout {layout}, shape {shape}, {data.dense_dim()} dense dimensions"
        )
    if indptr is None:  # indices() and values() want a coalesced tensor
        return from_coords(who, argument, list(data._indices()), data._values(), shape)
    if layout in ("bsr", "bsc"):
        return _from_blocks(who, argument, indptr, indices, data.values(), shape, layout == "bsc")
    return from_compressed(who, indptr, indices, data.values(), shape, layout == "csc")


def _from_blocks(
    who: str, argument: str, indptr: Any, indices: Any, values: Any, shape: Any, by_columns: bool
) -> Stored:
    """Of BSR or BSC; values are (blocks, rows, columns), and zeros in blocks are stored."""
    indptr, indices = _integers(who, "indptr", indptr), _integers(who, "indices", indices)
    values = to_host(who, "values", values)
    size = values.shape[1:]
    check_indptr(who, indptr, len(indices), shape[by_columns] // size[by_columns])
    lines = np.arange(len(indptr) - 1).repeat(np.diff(indptr))
    rows, cols = (indices, lines) if by_columns else (lines, indices)
    rows = rows.astype(np.int64)[:, None, None] * size[0] + np.arange(size[0])[:, None]
    cols = cols.astype(np.int64)[:, None, None] * size[1] + np.arange(size[1])
    coords = [np.broadcast_to(c, values.shape).reshape(-1) for c in (rows, cols)]
    return from_coords(who, argument, coords, values.reshape(-1), shape)


def _name(value: object) -> str:
    return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"
