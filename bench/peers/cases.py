"""Cases of the tuner's as the processes of peers get them; what they move and compute at least."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.tuning.case import Case, aligned

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def features(op: str, sizes: Sequence[int]) -> Sequence[int]:
    """The feature sizes to measure an operator at: those, or 1 where operands are vectors."""
    return [1] if OPERATORS[op].vectors else sizes


def flops_of(case: Case) -> int:
    """Multiplications and additions."""
    return 2 * case.matrix.nnz * case.feat * (case.heads or 1)


def bytes_of(case: Case) -> int:
    """Each array once: indices, values that are read, dense operands and the result."""
    a, each, operator = case.matrix, BYTES[case.dtype], OPERATORS[case.op]
    dense = sum(x.size for x in case.operands)
    out = prod(operator.shapes(a.shape, a.nnz, case.feat, case.heads)["out"])
    values = a.nnz if operator.reads_values else 0
    return a.indptr.nbytes + a.indices.nbytes + each * (dense + out + values)


def save(case: Case, folder: Path) -> None:
    """For the processes of the peers."""
    a = case.matrix
    arrays = {"indptr": a.indptr, "indices": a.indices, "data": a.data}
    arrays |= {f"operand{i}": x for i, x in enumerate(case.operands)}
    for name, held in arrays.items():
        np.save(folder / f"{name}.npy", held)


def load(folder: Path, op: str, shape: tuple[int, int], feat: int, **more: Any) -> Case:
    """What `save` wrote, in memory of this process.

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
