"""Where tensors by (relation, row, column) store elements, as programs over relations take it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

__all__ = ["RelationPattern"]

WHO = "RelationPattern.of"


class _Csf(NamedTuple):
    row_ptr: np.ndarray
    rows: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    shape: tuple[int, int, int]
    order: np.ndarray


class RelationPattern(_Csf):
    """CSF by relation: of each its rows that are not empty, of each row its columns.

    row_ptr : (relations + 1,) int32 or int64, into the rows
    rows : (nnz_rows,) of the same dtype, increasing within a relation
    indptr : (nnz_rows + 1,) into the columns
    indices : (nnz,) columns, not decreasing within a row
    shape : (relations, m, n)
    order : (nnz,) int64, which of the triples each element is; their values are `values[order]`
    """

    @staticmethod
    def of(
        relation: Any, row: Any, column: Any, shape: tuple[int, int, int], idtype: str | None = None
    ) -> RelationPattern:
        """From (relation, row, column) triples in any order; those that are alike stay apart.

        relation, row, column : (nnz,) integers
        shape : (relations, m, n)
        idtype : "int32" or "int64"; by default int32 where that holds all sizes

        Raises ValueError for triples of different numbers or out of range, or an idtype that is too
        narrow.
        """
        names = ("relation", "row", "column")
        keys = [np.asarray(x) for x in (relation, row, column)]
        for name, key, size in zip(names, keys, shape, strict=True):
            if key.ndim != 1 or key.dtype.kind not in "iu" or len(key) != len(keys[0]):
                raise ValueError(
                    f"{WHO}: argument '{name}': expected ({len(keys[0])},) integers, got "
                    f"{key.dtype} of shape {key.shape}"
                )
            if len(key) and not 0 <= key.min() <= key.max() < size:
                raise ValueError(
                    f"{WHO}: argument '{name}': expected 0 to {size - 1}, got {key.min()} to "
                    f"{key.max()}"
                )
        largest = max(*shape, len(keys[0])) + 1
        dtype = np.dtype(idtype or ("int32" if largest < 2**31 else "int64"))
        if largest > np.iinfo(dtype).max:
            raise ValueError(
                f"{WHO}: argument 'idtype': expected a type that holds {largest}, got {dtype}"
            )
        relations, m, n = (int(size) for size in shape)
        if relations * m * n < 2**62:
            order = np.argsort(_joined(keys, (relations, m, n)), kind="stable")
        else:
            order = np.lexsort(keys[::-1])
        relation, row, column = (key[order] for key in keys)
        begins = np.ones(len(order), bool)
        begins[1:] = (row[1:] != row[:-1]) | (relation[1:] != relation[:-1])
        starts = np.flatnonzero(begins)
        of_rows = np.bincount(relation[starts], minlength=relations)
        return RelationPattern(
            np.append(0, np.cumsum(of_rows)).astype(dtype),
            row[starts].astype(dtype),
            np.append(starts, len(order)).astype(dtype),
            column.astype(dtype),
            (relations, m, n),
            order,
        )

    @property
    def nnz(self) -> int:
        """Number of elements."""
        return len(self.indices)

    @cached_property
    def counts(self) -> np.ndarray:
        """(nnz,) int64 elements in the row of each element: a mean is the sum of their inverses."""
        counts = np.diff(self.indptr).astype("int64")
        return np.repeat(counts, counts)

    def arguments(self) -> dict[str, Any]:
        """Index arrays and sizes, by the names of the parameters of operators."""
        relations, m, n = self.shape
        return {
            "row_ptr": self.row_ptr, "rows": self.rows, "indptr": self.indptr,
            "indices": self.indices, "relations": relations, "m": m, "n": n,
            "nnz_rows": len(self.rows), "nnz": self.nnz,
        }  # fmt: skip


def _joined(keys: list[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """(nnz,) int64 that are ordered as triples are."""
    relation, row, column = (key.astype("int64") for key in keys)
    return (relation * shape[1] + row) * shape[2] + column
