"""The coordinates that a matrix or tensor stores, without its values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array

from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.index_arrays import (
    INT32,
    check_indptr,
    check_range,
    index_type,
    rows_increase,
    starts,
)

LARGEST_BLOCK = 64


class Pattern:
    """Stored coordinates, each once and in lexicographic order, as in CSR or CSF.

    :class:`sparsetir.SparseTensor` accepts any order.

    Parameters
    ----------
    coords : sequence of (nnz,) ndarray, int32 or int64
        One per axis.
    shape : sequence of int
        Lengths of the axes.

    Attributes
    ----------
    coords : list of (nnz,) ndarray
        One per axis; rows of an unchecked :meth:`from_csr` are computed on demand.
    indptr : (shape[0] + 1,) ndarray
        The position of the first element of each coordinate of the first axis.
    checked : bool
        Whether the checks of :meth:`check_once` have been done.

    Raises
    ------
    ValueError
        For arrays of inconsistent shapes or types.
    StructureError
        For a coordinate that is out of range, out of order or stored twice; names the first.
    """

    checked = False

    def __init__(self, coords: Sequence[np.ndarray], shape: Sequence[int]) -> None:
        arrays = [np.asarray(c) for c in coords]
        self.shape: tuple[int, ...] = tuple(int(s) for s in shape)
        if len(arrays) != len(self.shape) or not arrays:
            raise ValueError(
                f"Pattern: argument 'coords': expected an array for each of the {len(self.shape)} "
                f"axes, got {len(arrays)}"
            )
        if any(c.ndim != 1 or len(c) != len(arrays[0]) for c in arrays):
            raise ValueError(
                "Pattern: argument 'coords': expected one-dimensional arrays of one length, got "
                f"shapes {[c.shape for c in arrays]}"
            )
        if len(arrays[0]) == 0:
            arrays = [c.astype(np.int32) for c in arrays]
        for axis, c in enumerate(arrays):
            if c.dtype.kind not in "iu":
                raise ValueError(
                    f"Pattern: argument 'coords': expected integers, got {c.dtype} for axis {axis}"
                )
        arrays = [c if c.dtype in (np.int32, np.int64) else c.astype(np.int64) for c in arrays]
        self.coords = arrays
        self._check()

    @classmethod
    def from_csr(
        cls, indptr: np.ndarray, indices: np.ndarray, shape: Sequence[int], check: bool = True
    ) -> Pattern:
        """Make a pattern of a matrix in CSR.

        Parameters
        ----------
        indptr : (m + 1,) ndarray
            The position of the first element of each row.
        indices : (nnz,) ndarray
            Columns.
        shape : sequence of int
            (m, n).
        check : bool
            False for arrays known to be in order.

        Returns
        -------
        Pattern
        """
        if check:
            check_indptr("Pattern", indptr, len(indices), int(shape[0]))
        out = cls.__new__(cls)
        out.shape = (*shape,)
        out.indptr, out.columns = indptr, indices
        if check:
            out = cls(out.coords, shape)
            out.indptr = indptr
        return out

    def __repr__(self) -> str:
        return f"<Pattern: shape {self.shape}, {self.nnz} elements>"

    @cached_property
    def coords(self) -> list[np.ndarray]:
        rows = np.arange(self.shape[0], dtype=self.columns.dtype)
        return [rows.repeat(np.diff(self.indptr)), self.columns]

    @cached_property
    def columns(self) -> np.ndarray:
        """Coordinates of the last axis; for a matrix in CSR its `indices`."""
        return self.coords[-1]

    @property
    def nnz(self) -> int:
        """Number of stored coordinates."""
        return len(self.columns)

    @property
    def order(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def indptr(self) -> np.ndarray:
        counts = np.bincount(self.coords[0], minlength=self.shape[0])
        return starts(counts, index_type(self.nnz))

    @cached_property
    def csr(self) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of a matrix in CSR, of one type."""
        return self.indptr.astype(self.columns.dtype, copy=False), self.columns

    @property
    def idtype(self) -> str:
        """The index type that holds all of its lengths and its nnz."""
        return index_type(max(*self.shape, self.nnz)).__name__

    @cached_property
    def full_block(self) -> int:
        """The size of the largest square blocks that make up a matrix, or 1.

        A power of two up to `LARGEST_BLOCK`. Rows of different lengths, which most patterns have,
        rule out blocks at once; elements are only inspected otherwise.
        """
        size = 1
        while 2 * size <= LARGEST_BLOCK and self._in_full_blocks(2 * size):
            size *= 2
        return size

    def _in_full_blocks(self, size: int) -> bool:
        if not self.nnz or any(length % size for length in self.shape):
            return False
        lengths = np.diff(self.indptr)
        if (lengths % size).any():
            return False
        by_block = lengths.reshape(-1, size)
        if (by_block != by_block[:, :1]).any():
            return False
        runs = self.coords[1].reshape(-1, size)
        if (runs[:, 0] % size).any() or (runs[:, -1] - runs[:, 0] != size - 1).any():
            return False
        # All rows of a block have the same runs, as many in sequence as rows.
        first = runs[:, 0]
        each = by_block[:, 0] // size
        begins = np.repeat(np.cumsum(each * size) - each * size, each * size)
        within = (np.arange(len(first)) - begins) % np.repeat(each, each * size)
        return bool((first == first[begins + within]).all())

    def take(self, positions: np.ndarray) -> Pattern:
        """A pattern of some of this one's elements.

        Parameters
        ----------
        positions : ndarray
            Positions of these elements, increasing.

        Returns
        -------
        Pattern
        """
        out = Pattern.__new__(Pattern)
        out.shape = self.shape
        out.coords = [c[positions] for c in self.coords]
        return out

    def check_range(self) -> None:
        """Refuse coordinates out of range, which an owner may have written to the arrays."""
        for axis, (c, length) in enumerate(zip(self.coords, self.shape, strict=True)):
            check_range(f"Pattern: axis {axis}", c, length)
        if "indptr" in self.__dict__:
            check_indptr("Pattern", self.indptr, self.nnz, self.shape[0])

    def check_once(self) -> None:
        """Refuse a matrix in CSR whose owner has written to its arrays before the first call."""
        if not self.checked:
            self.check_rows()
            self.checked = True

    def check_rows(self) -> None:
        """Refuse a matrix in CSR whose owner has written to its arrays."""
        check_indptr("Pattern", self.indptr, self.nnz, self.shape[0])
        check_range("Pattern: axis 1", self.columns, self.shape[1])
        if not rows_increase(self.indptr, self.columns):
            raise StructureError("Pattern: expected columns to increase in each row")

    def _check(self) -> None:
        self.check_range()
        later = np.zeros(max(0, self.nnz - 1), bool)
        same = np.ones(len(later), bool)
        for c in self.coords:
            later |= same & (c[1:] > c[:-1])
            same &= c[1:] == c[:-1]
        if not later.all():
            at = int(later.argmin()) + 1
            what = "stored twice" if same[at - 1] else "out of order"
            coordinate = tuple(int(c[at]) for c in self.coords)
            raise StructureError(f"Pattern: coordinate {coordinate} is {what} at position {at}")


def group(
    parent: np.ndarray, parents: int, coord: np.ndarray, length: int, where: str = "group"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct (parent, coordinate) pairs, in order.

    parent : (nnz,) integers in [0, parents)
    coord : (nnz,) integers in [0, length)
    where : prefix of the message of a refusal

    Raises StructureError if parents * length exceeds 2**62.

    Returns (parent of each pair, coordinate of each pair, (nnz,) index of each element's pair).
    Linear, except for elements in random order with more parents or coordinates than elements:
    these are sorted.
    """
    if parents * max(1, length) >= 2**62:
        raise StructureError(
            f"{where}: {parents} parents times {length} coordinates are too many to number"
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
    """A stable permutation that sorts the keys."""
    # NumPy's stable sort of such keys merges runs: linear if a few rows are interleaved.
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
