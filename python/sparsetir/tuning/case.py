"""The operators that are measured: their operands, exact results, bytes and operations.

spmm : C = A B, B (n, d), C (m, d); also the mean or maximum of what a sum would add up
sddmm : OUT[i, j] = X[i] . Y[j] where A has an element, X (m, d), Y (n, d), OUT (nnz,); values of A
    play no part, as in torch.sparse.sampled_addmm
spmv : y = A x

With heads, all dense arrays have them as a first dimension, and share the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse as sp
import tvm

from sparsetir.schedules.operators.operands import MOST_EXACT, Check, rounded
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.registry import OPERATORS

CACHE_LINE = 64
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Case:
    """One operator on one matrix.

    matrix : CSR, float32 values (float64 for the dtype float64), int32 indices
    operands : (B,), (X, Y) or (x,), of the type of the values, holding only values that the dtype
        has
    reduce, heads : as for `sparsetir.plan`
    """

    op: str
    matrix: Any
    feat: int
    dtype: str
    operands: tuple[np.ndarray, ...]
    reduce: str = "sum"
    heads: int | None = None

    @property
    def problem(self) -> Any:
        """What a kernel is compiled for."""
        return OPERATORS[self.op].compiled_for(self.dtype, self.reduce, self.heads is not None)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.matrix.nnz * self.feat * (self.heads or 1)

    @property
    def bytes(self) -> int:
        """Each array once: indices, values that are read, dense operands and the result."""
        a, each, operator = self.matrix, BYTES[self.dtype], OPERATORS[self.op]
        dense = sum(x.size for x in self.operands)
        out = prod(operator.shapes(a.shape, a.nnz, self.feat, self.heads)["out"])
        values = a.nnz if operator.reads_values else 0
        return a.indptr.nbytes + a.indices.nbytes + each * (dense + out + values)


def features(op: str, sizes: Sequence[int]) -> Sequence[int]:
    """The feature sizes to measure an operator at: those, or 1 where operands are vectors."""
    return [1] if OPERATORS[op].vectors else sizes


def make(
    op: str, matrix: Any, feat: int, dtype: str, reduce: str = "sum", heads: int | None = None
) -> Case:
    """Random operands; the matrix with its values rounded to the dtype."""
    (feat,) = features(op, [feat])
    case = Case(op, matrix, feat, dtype, (), reduce, heads)
    rng = np.random.default_rng(1)
    operands = OPERATORS[op].operands(case.problem, matrix.shape, case.feat, heads, rng)
    if dtype != "float32":
        data = rounded(matrix.data, dtype)
        matrix = sp.csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    return replace(case, matrix=matrix, operands=operands)


def save(case: Case, folder: Path) -> None:
    """For the processes of the peers."""
    a = case.matrix
    arrays = {"indptr": a.indptr, "indices": a.indices, "data": a.data}
    arrays |= {f"operand{i}": x for i, x in enumerate(case.operands)}
    for name, held in arrays.items():
        np.save(folder / f"{name}.npy", held)


def load(
    folder: Path, op: str, shape: tuple[int, int], feat: int, dtype: str, reduce: str = "sum",
    heads: int | None = None,
) -> Case:  # fmt: skip
    """What `save` wrote, in memory of this process."""

    def read(name: str) -> np.ndarray:
        return aligned(np.load(folder / f"{name}.npy"))

    data, indices, indptr = (read(n) for n in ("data", "indices", "indptr"))
    matrix = sp.csr_array((data, indices, indptr), shape=shape)
    operands = tuple(read(f"operand{i}") for i in range(len(OPERATORS[op].names)))
    return Case(op, matrix, feat, dtype, operands, reduce, heads)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a cache line, as memory of torch's does; NumPy's begins anywhere."""
    buffer = np.empty(array.nbytes + CACHE_LINE, "uint8")
    start = -buffer.ctypes.data % CACHE_LINE
    out = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def array(values: np.ndarray, dtype: str, device: Any = None) -> Any:
    """Values in a dtype on a device: an array of NumPy's on this CPU (None), else one of TVM's."""
    if device is None and dtype != "bfloat16":  # which NumPy's arrays cannot hand over
        return aligned(values.astype(dtype))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return tvm.runtime.tensor(np.ascontiguousarray(values.astype(kind)), device)


def numbers(result: Any) -> np.ndarray:
    """What :func:`array` made or a kernel wrote to it, in float32 or float64."""
    found = result if isinstance(result, np.ndarray) else result.numpy()
    return found if found.dtype == np.float64 else found.astype("float32")


def rows_of(matrix: Any) -> np.ndarray:
    """The row of each element, int32."""
    return np.repeat(np.arange(matrix.shape[0], dtype="int32"), np.diff(matrix.indptr))


class Reference(Check):
    """The exact result of a case in float64, and how far a result may be from it."""

    def __init__(self, case: Case, most_exact: int = MOST_EXACT) -> None:
        a = case.matrix
        pattern = CsrPattern(a.indptr, a.indices, a.shape)
        operator = OPERATORS[case.op]
        super().__init__(operator, case.problem, pattern, a.data, case.operands, most_exact)
