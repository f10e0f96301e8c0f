"""Operators on matrices with operands, exact results, and files for the processes of peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.schedules.operators.operands import MOST_EXACT, Check, rounded
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.tuning.case import aligned


@dataclass(frozen=True)
class Case:
    """One operator on one matrix.

    matrix : CSR, float32 values (float64 for the dtype float64), int32 indices
    operands : (B,), (X, Y) or (x,), of the type of the values, with numbers that the dtype
        represents exactly
    reduce, heads : as for `sparsetir.plan`
    """

    op: str
    matrix: sp.csr_array
    feat: int
    dtype: str
    operands: tuple[np.ndarray, ...]
    reduce: str = "sum"
    heads: int | None = None

    @property
    def problem(self) -> Any:
        """The problem that a kernel is compiled for."""
        return OPERATORS[self.op].compiled_for(self.dtype, self.reduce, self.heads is not None)

    def check(self, most_exact: int = MOST_EXACT) -> Check:
        """The exact result in float64, and its tolerance."""
        a = self.matrix
        pattern, operator = CsrPattern(a.indptr, a.indices, a.shape), OPERATORS[self.op]
        return Check(operator, self.problem, pattern, a.data, self.operands, most_exact)


def make(
    op: str,
    matrix: sp.csr_array,
    feat: int,
    dtype: str,
    reduce: str = "sum",
    heads: int | None = None,
) -> Case:
    """Make a case with random operands, and the matrix's values rounded to the dtype."""
    feat = 1 if OPERATORS[op].vectors else feat
    case = Case(op, matrix, feat, dtype, (), reduce, heads)
    rng = np.random.default_rng(1)
    operands = OPERATORS[op].operands(case.problem, matrix.shape, case.feat, heads, rng)
    if dtype != "float32":
        data = rounded(matrix.data, dtype)
        matrix = sp.csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    return replace(case, matrix=matrix, operands=operands)


def save(case: Case, folder: Path) -> None:
    """Save a case for the processes of the peers."""
    a = case.matrix
    arrays = {"indptr": a.indptr, "indices": a.indices, "data": a.data}
    arrays |= {f"operand{i}": x for i, x in enumerate(case.operands)}
    for name, held in arrays.items():
        np.save(folder / f"{name}.npy", held)


def load(folder: Path, op: str, shape: tuple[int, int], feat: int, **more: Any) -> Case:
    """Load a case written by `save`.

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
