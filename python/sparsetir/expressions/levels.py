"""The arrays of a pattern in a storage, and values in their order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseTensor
from sparsetir.expressions.storage import COMPRESSED, DENSE, REPEATED, SLOTS
from sparsetir.formats import CSF, ELL
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import is_torch
from sparsetir.runtime.assembled import CsrArrays
from sparsetir.runtime.assembled_levels import CsfArrays


class Reordered:
    """A permutation of NumPy values that caches the last result.

    order : for each place the index of its value
    padded : whether empty places have the index after the last value
    changes : number of times that the values changed
    """

    def __init__(self, order: np.ndarray, padded: bool = False) -> None:
        self.order, self.padded, self.changes = order, padded, -1
        # A weak reference to the last values, and their permutation.
        self._last: tuple[Callable[[], np.ndarray | None], np.ndarray] | None = None

    def of(self, values: np.ndarray, steady: bool = False) -> np.ndarray:
        """Permute values; do not write to the result.

        steady : whether nobody writes to the values, which a SparseTensor guarantees for its own
        """
        last = self._last
        if last is None or not steady or last[0]() is not values:
            self.changes += 1
            complete = np.append(values, values.dtype.type(0)) if self.padded else values
            last = self._last = weakref.ref(values), complete.take(self.order)
        return last[1]


@dataclass(frozen=True)
class LevelArrays:
    """The arrays of a pattern in a storage.

    arrays : `indptr` and `indices` of each level, None if it has none
    lengths : for each level the number of elements, or of slots per parent
    take : for each place its element, or `padded` if it is empty; None for the same order
    padded : number of elements, if there are more places
    """

    arrays: tuple[tuple[np.ndarray | None, np.ndarray | None], ...]
    lengths: tuple[int, ...]
    take: np.ndarray | None = None
    padded: int | None = None

    @property
    def places(self) -> int:
        """The number of values, including padding."""
        last = self.arrays[-1][1]
        assert last is not None
        return len(last)

    def values(self, values: Any, steady: bool = False) -> Any:
        """Permute values from the pattern's order into this one; steady : see Reordered."""
        if self.take is None:
            return values
        if is_torch(values):
            import torch

            if self.padded is not None:
                values = torch.cat([values, values.new_zeros(1)])
            return values.index_select(0, torch.from_numpy(self.take))
        return self._reordered.of(values, steady)

    def restored(self, values: Any) -> Any:
        """Permute values from this order into the pattern's."""
        if self.take is None:
            return values
        if is_torch(values):
            import torch

            return values.index_select(0, torch.from_numpy(self._places))
        return values.take(self._places)

    @cached_property
    def _reordered(self) -> Reordered:
        assert self.take is not None
        return Reordered(self.take, self.padded is not None)

    @cached_property
    def _places(self) -> np.ndarray:
        """The place of each element."""
        assert self.take is not None
        used = np.flatnonzero(self.take < (len(self.take) if self.padded is None else self.padded))
        places = np.empty(len(used), np.int64)
        places[self.take[used]] = used
        return places


def coordinates(result: CsrArrays | CsfArrays, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The coordinates of an assembled result's elements, in an array for each dimension."""
    levels = result.levels if isinstance(result, CsfArrays) else [(result.indptr, result.indices)]
    out = [np.arange(shape[0])] if len(levels) < len(shape) else []
    for ptr, idx in levels:
        out = [*(c.repeat(np.diff(ptr)) for c in out), idx]
    return out


_kept: WeakKeyDictionary[Pattern, dict[object, LevelArrays]] = WeakKeyDictionary()


def level_arrays(pattern: Pattern, levels: str, order: tuple[int, ...], idtype: str) -> LevelArrays:
    """The arrays of a pattern in a storage, made once."""
    kept = _kept.setdefault(pattern, {})
    key = levels, order, idtype
    if key not in kept:
        kept[key] = _converted(pattern, levels, order, np.dtype(idtype))
    return kept[key]


def _converted(
    pattern: Pattern, levels: str, order: tuple[int, ...], idtype: np.dtype
) -> LevelArrays:
    nnz = pattern.nnz
    ends = np.array([0, nnz], idtype)
    if levels == COMPRESSED:
        return _typed(idtype, [(ends, pattern.coords[0])])
    if levels == REPEATED + SLOTS:
        return _typed(idtype, [(ends, pattern.coords[0]), (None, pattern.coords[1])], slots=1)
    natural = order == tuple(range(len(order)))
    if levels == DENSE + COMPRESSED and natural:
        return _typed(idtype, [(None, None), (pattern.indptr, pattern.columns)])
    tensor = SparseTensor.of_stored(Stored(pattern, np.ones(nnz, np.int8), None))
    if levels == DENSE + SLOTS:
        part = tensor.to(ELL()).parts[0]
        slots = part.indices["indices_jc_ell"]
        take = part.elements.astype(np.int64)
        typed = _typed(
            idtype,
            [(None, None), (None, slots.reshape(-1))],
            slots=part.shape[0] // max(1, pattern.shape[0]),
        )
        return LevelArrays(typed.arrays, typed.lengths, take, pattern.nnz)
    arrays: list[tuple[np.ndarray | None, np.ndarray | None]] = [(None, None)]
    take = None
    if natural and len(order) == 2:
        arrays.append((pattern.indptr, pattern.columns))
    else:
        part = tensor.to(CSF(order)).parts[0]
        by_kind = [
            [v for k, v in part.indices.items() if k.startswith(kind)]
            for kind in ("indptr_", "indices_")
        ]
        arrays += list(zip(*by_kind, strict=True))
        take = None if natural else part.elements.astype(np.int64)
    if levels[0] == COMPRESSED:  # drop empty roots
        ptr = np.asarray(arrays[1][0])
        rows = np.flatnonzero(np.diff(ptr))
        arrays[0] = np.array([0, len(rows)]), rows
        arrays[1] = np.append(ptr[rows], ptr[-1]), arrays[1][1]
    typed = _typed(idtype, arrays)
    return LevelArrays(typed.arrays, typed.lengths, take)


def _typed(idtype: np.dtype, arrays: Any, slots: int | None = None) -> LevelArrays:
    out = tuple(
        tuple(None if x is None else np.ascontiguousarray(x, idtype) for x in pair)
        for pair in arrays
    )
    lengths = [
        0 if idx is None else len(idx) if ptr is not None else int(slots or 0) for ptr, idx in out
    ]
    return LevelArrays(out, tuple(lengths))  # type: ignore[arg-type]
