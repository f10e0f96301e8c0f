"""Operands of one call as tensors; scipy's keep their patterns while indices are unchanged."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from sparsetir.data.sources import NATIVE, Stored, is_sparse, summed
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.formats.pattern import Pattern

FORMATS = ("csr", "csc", "coo")  # formats whose patterns are kept
SMALL = 1 << 14  # indices up to which a copy takes less time than a call of a NumPy function


class _Copied(NamedTuple):
    """A sparse object of scipy, copies of its index arrays, and the pattern made from these."""

    source: weakref.ref[Any]
    indices: list[np.ndarray]
    pattern: Pattern
    places: np.ndarray | None


_copied: dict[int, _Copied] = {}  # by id


def adopt(caller: str, name: str, data: Any) -> SparseTensor:
    """Convert an operand of one call, whose pattern is then not checked again.

    data : anything that :class:`SparseMatrix` accepts, or a sparse object of any order
    caller, name : names of the function and argument, for errors
    """
    known = data if isinstance(data, SparseTensor) else known_tensor(data)
    if known is not None:
        return known
    sparse = is_sparse(data)
    kept = sparse and getattr(data, "format", None) in FORMATS
    try:
        source = data.copy() if kept else data
    except ValueError as error:  # scipy checks arrays that were replaced
        raise ValueError(f"{caller}: argument '{name}': {error}") from error
    matrix = not sparse or len(data.shape) == 2
    tensor = SparseMatrix.adopt(caller, name, source) if matrix else SparseTensor(source)
    tensor.pattern.checked = True
    if not kept:
        return tensor
    key = id(data)
    ref = weakref.ref(data, lambda _: _copied.pop(key, None))
    _copied[key] = _Copied(ref, _indices(source), tensor.pattern, tensor.places)
    known = known_tensor(data)
    return tensor if known is None else known  # None if only the copy has values of our types


def adopt_matrix(caller: str, name: str, data: Any) -> SparseMatrix:
    """:func:`adopt` for an operand that must be a matrix."""
    return SparseMatrix.adopt(caller, name, adopt(caller, name, data))


def known_tensor(data: Any) -> SparseTensor | None:
    """The result of :func:`adopt` for an object whose pattern is kept, else None."""
    stored = known_stored(data)
    if stored is None:
        return None
    kind = SparseMatrix if len(stored.pattern.shape) == 2 else SparseTensor
    return kind.of_stored(stored)


def known_stored(data: Any) -> Stored | None:
    """The pattern and values of an object whose pattern is kept, else None."""
    copied = _copied.get(id(data))
    if copied is None or copied.source() is not data or copied.pattern.shape != data.shape:
        return None
    _, indices, pattern, places = copied
    for x, y in zip(_indices(data), indices, strict=True):
        if not _equal(x, y):
            return None
    count, values = pattern.nnz, data.data
    values = values[:count] if places is None else summed(values[: len(places)], places, count)
    if values.dtype not in NATIVE or len(values) != count:
        return None
    return Stored(pattern, np.ascontiguousarray(values))


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether arrays of indices are equal; unequal types may count as a difference."""
    if len(x) != len(y):
        return False
    if len(x) <= SMALL:  # a fifth of the time of NumPy's comparison
        return x.dtype == y.dtype and x.tobytes() == y.tobytes()
    return bool((x == y).all())


def _indices(data: Any) -> list[np.ndarray]:
    """The index arrays of an object in one of `FORMATS`."""
    if data.format == "coo":
        return list(data.coords)
    return [data.indptr, data.indices[: data.indptr[-1]]]
