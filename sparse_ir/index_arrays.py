"""Integers and index arrays: their types, offsets of rows, and checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.sparse_ir.errors import StructureError

INT32 = 2**31 - 1  # the largest


def is_integer(value: Any) -> bool:
    """Whether a value is a Python or NumPy integer; a bool is not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def index_type(largest: int) -> type[np.integer]:
    """The smaller of int32 and int64 that holds integers up to `largest`."""
    return np.int32 if largest <= INT32 else np.int64


def starts(counts: np.ndarray, dtype: Any = np.int64) -> np.ndarray:
    """(rows + 1,) offsets of rows of these lengths, with the end of the last row."""
    out = np.zeros(len(counts) + 1, dtype)
    np.cumsum(counts, out=out[1:])
    return out


def stable_order(key: np.ndarray) -> np.ndarray:
    """A stable permutation that sorts nonnegative integers.

    Linear below 2^32, in at most two passes: NumPy sorts 16 bits in linear time.
    """
    largest = int(key.max(initial=0))
    if largest >= 1 << 32:
        return np.argsort(key, kind="stable")
    order = np.argsort((key & 0xFFFF).astype(np.uint16), kind="stable")
    if largest < 1 << 16:
        return order
    return order[np.argsort((key >> 16).astype(np.uint16)[order], kind="stable")]


def row_numbers(indptr: np.ndarray, dtype: Any = np.int64) -> np.ndarray:
    """(nnz,) the row of each element, for rows with these offsets."""
    return np.repeat(np.arange(len(indptr) - 1, dtype=dtype), np.diff(indptr))


def numbers_within(indptr: np.ndarray) -> np.ndarray:
    """(nnz,) the number of each element within its row."""
    return np.arange(indptr[-1]) - np.repeat(indptr[:-1], np.diff(indptr))


def check_range(where: str, values: np.ndarray, length: int, what: str = "coordinates") -> None:
    """Refuse, with StructureError, integers that are not in [0, length).

    where : the prefix of the message: the function and the argument or axis
    what : what the integers are
    """
    if len(values) and (values.min() < 0 or values.max() >= length):
        at = int(((values < 0) | (values >= length)).argmax())
        raise StructureError(
            f"{where}: expected {what} in [0, {length}), got {values[at]} at position {at}"
        )


def check_indptr(caller: str, indptr: np.ndarray, nnz: int, rows: int) -> None:
    """Refuse, with StructureError, an array that is not a valid `indptr` of rows of nnz elements.

    caller : the function whose argument `indptr` it is
    """
    if indptr.shape != (rows + 1,):
        raise StructureError(
            f"{caller}: argument 'indptr': expected shape ({rows + 1},), got {indptr.shape}"
        )
    if indptr[0] != 0 or indptr[-1] != nnz or (indptr[1:] < indptr[:-1]).any():
        raise StructureError(
            f"{caller}: argument 'indptr': expected to start at 0, never to decrease and to end at "
            f"{nnz}, got {indptr[0]} to {indptr[-1]}"
        )


def rows_increase(indptr: np.ndarray, indices: np.ndarray) -> bool:
    """Whether the indices of each row increase strictly."""
    begins = np.zeros(len(indices) + 1, bool)
    begins[indptr] = True
    return bool(((indices[1:] > indices[:-1]) | begins[1:-1]).all())


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values in order; NumPy's `unique` hashes, which is far slower than sorting."""
    values = np.sort(values)
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values
