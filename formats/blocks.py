"""Blocks of a matrix that hold an element, and the slots of elements in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.pattern import Pattern
from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.index_arrays import distinct, index_type

CELLS = 1 << 17  # the most blocks of a table, which then takes 512 KiB and stays in cache
# Rows and columns of the blocks that are searched for.
SEARCHED = ((2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (1, 8), (8, 1))
FEW = 1000  # the least number of runs for which a table pays


@dataclass(frozen=True)
class Blocks:
    """The blocks of `rows` by `cols` that hold an element, by rows of blocks, then columns.

    grid : rows and columns of blocks, including empty ones
    bounds : (rows of blocks + 1,) offsets of the elements of each row of blocks
    indptr : (rows of blocks + 1,) offsets of its blocks
    indices : (blocks,) their columns of blocks, increasing in each row
    places : (nnz,) the slot of each element, with the slots of a block contiguous, row by row
    """

    grid: tuple[int, int]
    bounds: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    places: np.ndarray


def block_places(pattern: Pattern, rows: int, cols: int) -> int:
    """The number of slots of the blocks of `rows` by `cols` that hold an element."""
    i, j = pattern.coords
    across = -(-pattern.shape[1] // cols)
    return len(distinct((i // rows).astype(np.int64) * across + j // cols)) * rows * cols


def find_blocks(pattern: Pattern, rows: int, cols: int) -> Blocks:
    """The blocks of a matrix.

    The elements of a row in one block are a run. Runs get the number of their block, and an
    element's slot is an offset of its run plus its column. Linear in the elements and rows
    unless blocks are rare; then runs are sorted.
    """
    (m, n), nnz = pattern.shape, pattern.nnz
    high, wide = -(-m // rows), -(-n // cols)
    if high * wide >= 2**62:
        raise StructureError(f"{high} by {wide} blocks are too many to number")
    dtype = np.dtype(index_type(max(high * wide, (nnz + 1) * rows * cols + n)))
    indptr, columns = pattern.indptr, pattern.coords[1].astype(dtype, copy=False)
    lengths, row = np.diff(indptr), np.arange(m, dtype=dtype)
    column = columns // dtype.type(cols)
    key = np.repeat(row // rows * dtype.type(wide), lengths)
    key += column
    column *= dtype.type(cols)
    bounds = np.append(indptr[:-1:rows], indptr[-1:])

    first = _first(key)
    first[indptr[:-1][lengths > 0]] = True
    start = None
    if 2 * np.count_nonzero(first) < nnz:
        start = np.flatnonzero(first)
        key, column = key[start], column[start]
    ends = bounds if start is None else np.searchsorted(start, bounds)
    del first
    if high * wide // CELLS * FEW <= len(key):
        blocks, place = _by_table(key, ends, wide)
    else:
        blocks, place = _by_sorting(key)
    place *= dtype.type(rows * cols)
    place -= column
    if start is not None:
        place = np.repeat(place, np.diff(start, append=nnz))
    place += np.repeat(row % rows * dtype.type(cols), lengths)
    place += columns
    begins = np.arange(high + 1, dtype=dtype) * dtype.type(wide)
    offsets = np.searchsorted(blocks, begins)
    blocks -= np.repeat(begins[:-1], np.diff(offsets))
    return Blocks((high, wide), bounds, offsets, blocks, place.astype(np.intp, copy=False))


def _by_table(key: np.ndarray, ends: np.ndarray, wide: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys, increasing, and the index of each key among them.

    key : (runs,) row of blocks * wide + column of blocks, by rows of blocks
    ends : (rows of blocks + 1,) offsets of the keys of each row of blocks
    """
    high = len(ends) - 1
    step = max(1, CELLS // max(1, wide))
    number = np.empty(min(step, high) * wide, key.dtype)
    out, parts, total = np.empty_like(key), [key[:0]], 0
    for top in range(0, high, step):
        here = slice(ends[top], ends[min(top + step, high)])
        at = key[here] - key.dtype.type(top * wide)
        if len(number) <= 4 * len(at):
            there = np.zeros(len(number), bool)
            there[at] = True
            blocks = np.flatnonzero(there)
        else:
            ordered = np.sort(at)
            blocks = ordered[_first(ordered)]
        number[blocks] = np.arange(total, total + len(blocks), dtype=key.dtype)
        out[here] = number[at]
        parts.append(blocks.astype(key.dtype, copy=False) + key.dtype.type(top * wide))
        total += len(blocks)
    return np.concatenate(parts), out


def _by_sorting(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result of :func:`_by_table`, for keys in any order."""
    order = np.argsort(key, kind="stable")
    ordered = key.take(order)
    first = _first(ordered)
    number = np.cumsum(first, dtype=key.dtype)
    number -= 1
    out = np.empty_like(key)
    out[order] = number
    return ordered[first], out


def _first(key: np.ndarray) -> np.ndarray:
    """Whether a key differs from the one before it."""
    out = np.ones(len(key), bool)
    np.not_equal(key[1:], key[:-1], out=out[1:])
    return out
