"""Partitions of stored coordinates among rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsetir.sparse_ir.errors import StructureError


def check_partition(coords: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> None:
    """Refuse parts that do not take each stored coordinate exactly once.

    Parameters
    ----------
    coords : sequence of (nnz,) integer ndarray
        One per axis.
    parts : sequence of ndarray
        The elements of each rule: a (nnz,) boolean mask, or an array of positions.

    Raises
    ------
    StructureError
        For a coordinate that no part takes, or several (or one twice); names the first.
    ValueError
        For a part that is neither a mask nor positions.
    """
    arrays = [np.asarray(c) for c in coords]
    if not arrays or any(a.ndim != 1 or len(a) != len(arrays[0]) for a in arrays):
        raise ValueError(
            "check_partition: argument 'coords': expected one-dimensional arrays of one length, "
            f"got shapes {[a.shape for a in arrays]}"
        )
    count = len(arrays[0])
    taken = np.zeros(count, np.int64)
    for number, part in enumerate(parts):
        taken += _times_taken(np.asarray(part), number, count)
    wrong = taken != 1
    if not wrong.any():
        return
    at = int(wrong.argmax())
    coordinate = tuple(int(a[at]) for a in arrays)
    if taken[at] == 0:
        raise StructureError(f"check_partition: no part takes coordinate {coordinate}")
    takers = [
        n
        for n, part in enumerate(parts)
        for _ in range(int(_times_taken(np.asarray(part), n, count)[at]))
    ]
    raise StructureError(
        f"check_partition: coordinate {coordinate} is taken {taken[at]} times, by the parts "
        f"{takers}"
    )


def _times_taken(part: np.ndarray, number: int, count: int) -> np.ndarray:
    if part.dtype == bool:
        if part.shape != (count,):
            raise ValueError(
                f"check_partition: part {number}: expected a mask of shape ({count},), got "
                f"{part.shape}"
            )
        return part
    if part.size and part.dtype.kind not in "iu" or part.ndim != 1:
        raise ValueError(
            f"check_partition: part {number}: expected a boolean mask or an array of positions, "
            f"got {part.dtype} of shape {part.shape}"
        )
    if part.size and (part.min() < 0 or part.max() >= count):
        raise ValueError(
            f"check_partition: part {number}: expected positions in [0, {count}), got "
            f"{part.min() if part.min() < 0 else part.max()}"
        )
    return np.bincount(part.astype(np.int64), minlength=count)
