"""Programs that are written in parts are those that TVMScript says."""

import numpy as np
import pytest
import tvm_ffi
from tvm.script import sparse_tir as T

import sparsetir
from sparsetir.sparse_ir.script.writer import Writer, reduced


@T.prim_func
def scaled(
    a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int64,
    n: T.int64, nnz: T.int64,
):  # fmt: skip
    I = T.dense_fixed(m, "int64")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int64", unique=False)
    N = T.dense_fixed(n, "int64")
    A = T.match_sparse_buffer(a, (I, J), "float16")
    B = T.match_sparse_buffer(b, (N,), "float16")
    C = T.match_sparse_buffer(c, (I,), "float16")
    with T.sp_iter([I, J], "SR", "scaled") as [i, j]:
        with T.init():
            C[i] = T.float16(0)
        C[i] = T.Cast(
            "float16",
            T.Cast("float32", C[i]) + T.Cast("float32", A[i, j]) * T.Cast("float32", B[j]),
        )


def written(params, sets=True):
    write = Writer("scaled", "int64")
    write.dense(I="m")
    write.variable("J", "I", "n", "nnz", "indptr", "indices", unique=False)
    write.dense(N="n")
    write.buffer("a", "I J", "float16")
    write.buffer("b", ["N"], "float16")
    write.buffer("c", "I", "float16")
    elements = {"C": "I", "A": "I J", "B": "J"}
    write.products("scaled", "I J", "SR", elements, "float32", sets=sets)
    return write.program(params)


PARAMS = "a b c indptr indices m n nnz"


def test_a_written_program_is_that_of_tvmscript():
    assert tvm_ffi.structural_equal(written(PARAMS), scaled)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_reductions(reduce, dtype):
    """Results are NumPy's, which keep NaN, for rows with elements."""
    write = Writer("rows")
    write.dense(I="m")
    write.variable("J", "I", "nnz", "nnz", "indptr")
    write.buffer("a", "I J", dtype)
    write.buffer("out", "I", dtype)
    first = None if dtype == "float32" else "T.int32(0)"
    lines = reduced(reduce, "OUT[i]", "A[i, j] - one", dtype, dtype, first)
    write.visit("rows", "I J", "SR", lines)
    func = write.program("a out indptr m nnz", one=1)
    values = np.array([3, 5, 2, -4, -1, 7], dtype)
    if dtype == "float32":
        values[3] = np.nan
    arrays = {"a": values, "out": np.zeros(2, dtype), "indptr": np.array([0, 3, 6], "int32")}
    sparsetir.interpret(func, {**arrays, "m": 2, "nnz": 6})
    of = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduce]
    expected = of.reduceat(values - 1, [0, 3])
    if first is not None:  # which begins with 0
        expected = of(expected, 0)
    np.testing.assert_array_equal(arrays["out"], expected)
