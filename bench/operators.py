"""The operators that are measured: their operands, exact results, bytes and operations.

spmm : C = A B, B (n, d), C (m, d)
sddmm : OUT[i, j] = X[i] . Y[j] where A has an element, X (m, d), Y (n, d), OUT (nnz,); values of A
    play no part, as in torch.sparse.sampled_addmm
spmv : y = A x
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.bench.names import DTYPES

# Largest error of an element in units of the sum of the absolute values that it is made of:
# some roundings of a result, and for float32 of a long sum.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# Above so many multiplications results are checked by a projection instead of one by one.
MOST_EXACT = 2**31
CHUNK = 2**22  # elements of X[rows] * Y[columns] that are made at a time
CACHE_LINE = 64


@dataclass(frozen=True)
class Case:
    """One operator on one matrix.

    matrix : CSR, float32 values, int32 indices
    operands : (B,), (X, Y) or (x,), in float32, holding only values that the dtype has
    """

    op: str
    matrix: Any
    feat: int
    dtype: str
    operands: tuple[np.ndarray, ...]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.matrix.nnz * self.feat

    @property
    def bytes(self) -> int:
        """Each array once: indices, values that are read, dense operands and the result."""
        a, each = self.matrix, DTYPES[self.dtype]
        dense = sum(x.size for x in self.operands)
        out = a.shape[0] * self.feat if self.op != "sddmm" else a.nnz
        values = a.nnz if self.op != "sddmm" else 0
        return a.indptr.nbytes + a.indices.nbytes + each * (dense + out + values)


def make(op: str, matrix: Any, feat: int, dtype: str) -> Case:
    """Random operands; the matrix with its values rounded to the dtype."""
    m, n = matrix.shape
    shapes = {"spmm": [(n, feat)], "sddmm": [(m, feat), (n, feat)], "spmv": [(n,)]}[op]
    rng = np.random.default_rng(1)
    operands = [rounded(rng.random(s, "float32") * 2 - 1, dtype) for s in shapes]
    if dtype != "float32":
        data = rounded(matrix.data, dtype)
        matrix = sp.csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    return Case(op, matrix, 1 if op == "spmv" else feat, dtype, tuple(operands))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers that the dtype has too, near the given ones."""
    if dtype == "bfloat16":  # cut to its 16 bits
        return (values.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    return values.astype(dtype).astype("float32")


def save(case: Case, folder: Path) -> None:
    """For the processes of the peers."""
    a = case.matrix
    arrays = {"indptr": a.indptr, "indices": a.indices, "data": a.data}
    arrays |= {f"operand{i}": x for i, x in enumerate(case.operands)}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def load(folder: Path, op: str, shape: tuple[int, int], feat: int, dtype: str) -> Case:
    """What `save` wrote, in memory of this process."""

    def read(name: str) -> np.ndarray:
        return aligned(np.load(folder / f"{name}.npy"))

    data, indices, indptr = (read(n) for n in ("data", "indices", "indptr"))
    matrix = sp.csr_array((data, indices, indptr), shape=shape)
    count = 2 if op == "sddmm" else 1
    operands = tuple(read(f"operand{i}") for i in range(count))
    return Case(op, matrix, feat, dtype, operands)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a cache line, as memory of torch's does; NumPy's begins anywhere."""
    buffer = np.empty(array.nbytes + CACHE_LINE, "uint8")
    start = -buffer.ctypes.data % CACHE_LINE
    out = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def rows_of(matrix: Any) -> np.ndarray:
    """The row of each element, int32."""
    return np.repeat(np.arange(matrix.shape[0], dtype="int32"), np.diff(matrix.indptr))


def gathered(
    rows: np.ndarray, columns: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """out[k] = x[rows[k]] . y[columns[k]], some rows at a time; in the dtype of x."""
    step = max(1, CHUNK // max(1, x.shape[1]))
    for start in range(0, len(rows), step):
        at = slice(start, start + step)
        out[at] = np.einsum("ij,ij->i", x[rows[at]], y[columns[at]])
    return out


class Reference:
    """The exact result in float64, and how far a result may be from it."""

    def __init__(self, case: Case, most_exact: int = MOST_EXACT) -> None:
        self.case = case
        self.tolerance = TOLERANCES[case.dtype]
        a = case.matrix.astype("float64")
        dense = case.operands
        # Many features: all of them together in one random direction. A sum of values with random
        # signs hides no error, and the bound is the sum of the bounds.
        self.direction = None
        if case.op == "spmm" and case.flops // 2 > most_exact:
            self.direction = np.random.default_rng(2).choice([-1.0, 1.0], case.feat)
        if case.op == "sddmm":
            rows, out = rows_of(a), (np.empty(a.nnz), np.empty(a.nnz, "float32"))
            x, y = (v.astype("float64") for v in dense)
            self.exact = gathered(rows, a.indices, x, y, out[0])
            self.scale = gathered(rows, a.indices, *(np.abs(v) for v in dense), out[1])
        elif self.direction is None:
            self.exact, self.scale = a @ dense[0].astype("float64"), abs(a) @ np.abs(dense[0])
        else:
            self.exact = a @ (dense[0] @ self.direction)
            self.scale = abs(a) @ np.abs(dense[0]).sum(axis=1, dtype="float64")

    def error(self, result: np.ndarray) -> str | None:
        """What is wrong with a result (float32), or None."""
        wanted = self.exact.shape if self.direction is None else (len(self.exact), self.case.feat)
        if result.shape != wanted:
            return f"expected shape {wanted}, got {result.shape}"
        if self.direction is not None:
            result = result @ self.direction
        right = np.abs(result - self.exact) <= self.tolerance * (self.scale + 0.1)
        if right.all():
            return None
        at = [int(n) for n in np.unravel_index(int(right.argmin()), right.shape)]
        text = f"{result[tuple(at)]:.6g}, not {self.exact[tuple(at)]:.6g}"
        return f"{(~right).sum()} of {right.size} wrong, the first at {at}: {text}"
