"""Patterns of scipy's matrices, kept while their index arrays are unchanged."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from sparsetir.data.sources import summed
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor


class _Copied(NamedTuple):
    """A scipy matrix, copies of its index arrays, and the tensor made from these."""

    source: weakref.ref[Any]
    indices: list[np.ndarray]
    tensor: SparseTensor


_copied: dict[int, _Copied] = {}  # by id


def known_pattern(operand: Any) -> SparseTensor | None:
    """The tensor of an earlier :func:`pattern_of` call, if the indices are those of that call.

    operand : any sparse object of scipy
    """
    copied = _copied.get(id(operand))
    if copied is None or copied.source() is not operand or copied.tensor.shape != operand.shape:
        return None
    for x, y in zip(_indices(operand), copied.indices, strict=True):
        if len(x) != len(y) or not (x == y).all():
            return None
    return copied.tensor


def pattern_of(who: str, name: str, operand: Any) -> SparseTensor:
    """A tensor with the pattern of an operand in CSR, CSC or COO, and any values.

    who, name : function and argument, as errors name them
    """
    known = known_pattern(operand)
    if known is not None:
        return known
    key, copy, is_matrix = id(operand), operand.copy(), len(operand.shape) == 2
    tensor = SparseMatrix.adopt(who, name, copy) if is_matrix else SparseTensor(copy)
    ref = weakref.ref(operand, lambda _: _copied.pop(key, None))
    _copied[key] = _Copied(ref, _indices(copy), tensor)
    return tensor


def values_of(operand: Any, tensor: SparseTensor) -> np.ndarray:
    """The operand's own values, in the order of the tensor with its pattern."""
    places, count = tensor.places, tensor.nnz
    values = operand.data[: count if places is None else len(places)]
    return values if places is None else summed(values, places, count)


def _indices(operand: Any) -> list[np.ndarray]:
    """The index arrays of a tensor in CSR, CSC or COO."""
    if operand.format == "coo":
        return list(operand.coords)
    return [operand.indptr, operand.indices[: operand.indptr[-1]]]
