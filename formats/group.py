"""Grouping of elements by parent and coordinate, which index inference does on every level."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array

from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.index_arrays import INT32, index_type

__all__ = ["group"]


def group(
    parent: np.ndarray,
    parents: int,
    coord: np.ndarray,
    length: int,
    where: str = "group",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct (parent, coordinate) pairs, in that order.

    parent : (nnz,) integers in [0, parents)
    coord : (nnz,) integers in [0, length)
    where : what the message of a refusal begins with

    Raises StructureError where parents * length passes 2**62.

    Returns (parent of each pair, coordinate of each pair, (nnz,) number of each element's pair).
    Linear, but for elements in random order below more parents or coordinates than there are
    elements: these are sorted.
    """
    if parents * max(1, length) >= 2**62:
        raise StructureError(
            f"{where}: {parents} parents times {length} coordinates are too many to be told apart"
        )
    dtype = index_type(parents * max(1, length))
    key = parent.astype(dtype) * dtype(max(1, length)) + coord.astype(dtype, copy=False)
    order = None
    falls = int(np.count_nonzero(key[1:] < key[:-1]))
    if falls:
        order = _order(key, falls, parent, parents, coord, length)
    ordered = key if order is None else key[order]
    first = np.ones(len(key), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    pairs = ordered if first.all() else ordered[first]
    number = np.cumsum(first, dtype=index_type(len(key)))
    number -= 1
    if order is not None:
        place = np.empty_like(number)
        place[order] = number
        number = place
    row = pairs // dtype(max(1, length))
    return row, pairs - row * dtype(max(1, length)), number


def _order(
    key: np.ndarray, falls: int, parent: np.ndarray, parents: int, coord: np.ndarray, length: int
) -> np.ndarray:
    """A permutation that sorts the keys, stable."""
    # NumPy's stable sort of such keys merges runs: linear where a few rows are interleaved.
    few = 8 * falls <= len(key)
    if few or max(parents, length) > 4 * len(key) or len(key) > INT32:
        return np.argsort(key, kind="stable")
    order = _counting_order(coord, length)
    return order[_counting_order(parent[order], parents)]


def _counting_order(key: np.ndarray, length: int) -> np.ndarray:
    """A stable permutation that sorts keys in [0, length), in linear time: a transposition."""
    count = len(key)
    index = index_type(max(count, length))
    rows = np.arange(count + 1, dtype=index)
    matrix = csr_array(
        (np.ones(count, np.int8), key.astype(index, copy=False), rows), (count, length)
    )
    return matrix.tocsc().indices
