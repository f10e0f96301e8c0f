"""Operands whose rows are gathered often are read from the start of a cache line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from programs import PROGRAMS
from sparsetir.runtime.arrays import CACHE_LINE, aligned_rows

INDICES = np.zeros(40_000, "int32")


def beside_a_line(array: Any, offset: int = 16) -> Any:
    """A copy that begins so many bytes behind the start of a cache line."""
    raw = np.empty(array.nbytes + 2 * CACHE_LINE, np.uint8)
    begin = -raw.ctypes.data % CACHE_LINE + offset
    copy = raw[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("rows", [2000, 4000])
@pytest.mark.parametrize("feat", [16, 20, 64, 80])
@pytest.mark.parametrize("offset", [0, 16])
def test_what_is_copied(rows: int, feat: int, offset: int) -> None:
    array = beside_a_line(np.random.default_rng(0).random((rows, feat), "float32"), offset)
    result = aligned_rows(array, INDICES)
    pays = offset > 0 and rows * 12 <= len(INDICES) and feat in (16, 64)
    assert (result is not array) == pays
    np.testing.assert_array_equal(result, array)
    assert not pays or result.ctypes.data % CACHE_LINE == 0


def test_what_is_left() -> None:
    few = beside_a_line(np.zeros((100, 16), "float32"))
    strided = beside_a_line(np.zeros((2000, 32), "float32"))[:, ::2]
    for array in (few, strided, few.reshape(-1), 3.0):
        assert aligned_rows(array, INDICES) is array


@pytest.mark.parametrize("offset", [0, 16])
def test_operands_that_are_written_are_refused(offset: int) -> None:
    """A copy must not hide that the result shares memory with an operand."""
    A = sp.random_array((1500, 1500), density=0.02, format="csr", rng=0, dtype="float32")
    kernel = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
    b = beside_a_line(np.ones((1500, 32), "float32"), offset)
    with pytest.raises(ValueError, match="'c' is written and shares memory with 'b'"):
        kernel(A.data, b, b, A.indptr, A.indices, 1500, 1500, A.nnz, 32)
    np.testing.assert_array_equal(b, 1)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_results_are_the_same(kind: str) -> None:
    torch = pytest.importorskip("torch")
    A = sp.random_array((1500, 1500), density=0.02, format="csr", rng=0, dtype="float32")
    B, exact = np.random.default_rng(0).random((1500, 32), "float32"), None
    kernel = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
    names = [(kernel.signature.names[i], kernel.signature.names[j]) for i, j in kernel.gathered]
    assert names == [("b", "indices")]
    for offset in (0, 16):
        b, c = beside_a_line(B, offset), np.full((1500, 32), np.nan, "float32")
        arrays = {"a": A.data, "indptr": A.indptr, "indices": A.indices, "b": b, "c": c}
        if kind == "torch":
            arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
        kernel(**arrays, m=1500, n=1500, nnz=A.nnz, feat=32)
        exact = c if exact is None else exact
        np.testing.assert_array_equal(c, exact)
        np.testing.assert_allclose(c, A @ B, rtol=1e-5)
        C = sparsetir.einsum("C[i,k] = A[i,j] * B[j,k]", A=sparsetir.SparseMatrix(A), B=b)
        np.testing.assert_allclose(C, A @ B, rtol=1e-5)
