"""Cases of the tuner, as the processes of peers get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.tuning.case import Case, aligned


def save(case: Case, folder: Path) -> None:
    """Save a case for the processes of the peers."""
    a = case.matrix
    arrays = {"indptr": a.indptr, "indices": a.indices, "data": a.data}
    arrays |= {f"operand{i}": x for i, x in enumerate(case.operands)}
    for name, held in arrays.items():
        np.save(folder / f"{name}.npy", held)


def load(folder: Path, op: str, shape: tuple[int, int], feat: int, **more: Any) -> Case:
    """Load what `save` wrote.

    more : `dtype`, `reduce` and `heads` of the case
    """

    def read(name: str) -> np.ndarray:
        return aligned(np.load(folder / f"{name}.npy"))

    data, indices, indptr = (read(n) for n in ("data", "indices", "indptr"))
    matrix = sp.csr_array((data, indices, indptr), shape=shape)
    operands = tuple(read(f"operand{i}") for i in range(len(OPERATORS[op].names)))
    return Case(op, matrix, feat, operands=operands, **more)


def rows_of(matrix: Any) -> np.ndarray:
    """The row of each element, int32."""
    return np.repeat(np.arange(matrix.shape[0], dtype="int32"), np.diff(matrix.indptr))
