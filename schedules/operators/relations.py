"""Patterns of tensors by (relation, row, column), as programs over relations take them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sparsetir.formats import ConvertedFormat, Pattern
from sparsetir.schedules.operators.problems import Stored

NAME = "RelationPattern.of"


class _Csf(NamedTuple):
    row_ptr: np.ndarray
    rows: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    shape: tuple[int, int, int]
    order: np.ndarray


class RelationPattern(_Csf):
    """CSF by relation: the nonempty rows of each relation, and the columns of each row.

    row_ptr : (relations + 1,) int32 or int64, into the rows
    rows : (nnz_rows,) of the same dtype, increasing within a relation
    indptr : (nnz_rows + 1,) into the columns
    indices : (nnz,) columns, not decreasing within a row
    shape : (relations, m, n)
    order : (nnz,) of that dtype, the triple of each element; its value is `values[order]`
    """

    @staticmethod
    def of(
        relation: Any, row: Any, column: Any, shape: tuple[int, int, int], idtype: str | None = None
    ) -> RelationPattern:
        """Make a pattern from (relation, row, column) triples in any order, keeping equal ones.

        relation, row, column : (nnz,) integers
        shape : (relations, m, n)
        idtype : "int32" or "int64"; by default int32 if it holds all sizes

        Raises ValueError for arrays of different lengths, triples out of range, or an idtype that
        is too narrow.
        """
        names = ("relation", "row", "column")
        keys = [np.asarray(x) for x in (relation, row, column)]
        for name, key, size in zip(names, keys, shape, strict=True):
            if key.ndim != 1 or key.dtype.kind not in "iu" or len(key) != len(keys[0]):
                raise ValueError(
                    f"{NAME}: argument '{name}': expected ({len(keys[0])},) integers, got "
                    f"{key.dtype} of shape {key.shape}"
                )
            if len(key) and not 0 <= key.min() <= key.max() < size:
                raise ValueError(
                    f"{NAME}: argument '{name}': expected 0 to {size - 1}, got {key.min()} to "
                    f"{key.max()}"
                )
        largest = max(*shape, len(keys[0])) + 1
        dtype = np.dtype(idtype or ("int32" if largest < 2**31 else "int64"))
        if largest > np.iinfo(dtype).max:
            raise ValueError(
                f"{NAME}: argument 'idtype': expected a type that holds {largest}, got {dtype}"
            )
        relations, m, n = (int(size) for size in shape)
        order = _order(keys, (relations, m, n))
        relation, row, column = (key.astype(dtype, copy=False)[order] for key in keys)
        begins = np.ones(len(order), bool)
        begins[1:] = (row[1:] != row[:-1]) | (relation[1:] != relation[:-1])
        starts = np.flatnonzero(begins)
        of_rows = np.bincount(relation[starts], minlength=relations)
        return RelationPattern(
            np.append(0, np.cumsum(of_rows)).astype(dtype),
            row[starts],
            np.append(starts, len(order)).astype(dtype),
            column,
            (relations, m, n),
            order.astype(dtype),
        )

    @staticmethod
    def of_pattern(
        pattern: RelationPattern | Pattern, idtype: str | None = None
    ) -> RelationPattern:
        """The pattern itself, or that of relations by rows by columns; idtype : as for `of`."""
        if isinstance(pattern, RelationPattern):
            return pattern
        (relation, row, column), (relations, m, n) = pattern.coords, pattern.shape
        return RelationPattern.of(relation, row, column, (relations, m, n), idtype)

    @property
    def nnz(self) -> int:
        """Number of elements."""
        return len(self.indices)

    @cached_property
    def coordinates(self) -> Pattern:
        """Relation, row and column of each element, in order; some may be repeated."""
        dtype = self.rows.dtype
        of_row = np.repeat(np.arange(self.shape[0], dtype=dtype), np.diff(self.row_ptr))
        counts = np.diff(self.indptr)
        pattern = Pattern.__new__(Pattern)  # skips its check that coordinates are unique
        pattern.shape = self.shape
        pattern.coords = [np.repeat(of_row, counts), np.repeat(self.rows, counts), self.indices]
        return pattern

    def transposed(self) -> RelationPattern:
        """Rows and columns exchanged, for the same triples."""
        (relations, m, n), (relation, row, column) = self.shape, self.coordinates.coords
        turned = RelationPattern.of(relation, column, row, (relations, n, m), str(self.rows.dtype))
        return turned._replace(order=self.order[turned.order])

    def stored_in(self, converted: ConvertedFormat) -> Any:
        """A format of :attr:`coordinates` that takes values in the order of the triples."""

        def in_order(**stored: Any) -> Mapping[str, Any]:
            return converted.values(**{name: x[self.order] for name, x in stored.items()})

        return Stored(in_order, False, lambda: converted.padding)

    @cached_property
    def counts(self) -> np.ndarray:
        """(nnz,) int64 length of each element's row: a mean is weighted by the inverses."""
        counts = np.diff(self.indptr).astype("int64")
        return np.repeat(counts, counts)

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the triples were in order, so that values are taken unchanged."""
        return bool(np.all(self.order[1:] > self.order[:-1]))

    def values(self, /, **stored: Any) -> dict[str, Any]:
        """Values of the triples in the order of the elements: the parameter `a` for buffer `A`."""
        kept = self.keeps_order
        return {n.lower(): array if kept else array[self.order] for n, array in stored.items()}

    def arguments(self) -> dict[str, Any]:
        """Index arrays and sizes, by operators' parameter names."""
        relations, m, n = self.shape
        return {
            "row_ptr": self.row_ptr, "rows": self.rows, "indptr": self.indptr,
            "indices": self.indices, "relations": relations, "m": m, "n": n,
            "nnz_rows": len(self.rows), "nnz": self.nnz,
        }  # fmt: skip


def _order(keys: list[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """(nnz,) int64, a stable order of the triples."""
    nnz, places = len(keys[0]), shape[0] * shape[1] * shape[2]
    if places * nnz >= 2**63:
        return np.lexsort(keys[::-1])
    joined = keys[0].astype("int64")  # updated in place: there may be many
    for key, size in zip(keys[1:], shape[1:], strict=True):
        joined *= size
        np.add(joined, key, out=joined, casting="unsafe")
    joined *= nnz
    joined += np.arange(nnz)
    joined.sort()  # plain numbers, several times as fast as an argsort
    joined %= max(1, nnz)
    return joined
