"""The init of a reduction at coordinates that a row stores several times."""

import numpy as np
import pytest

import sparsetir
from sparsetir.sparse_ir.script.parser import from_source

PROGRAM = """
@T.prim_func
def sums(a: T.handle, out: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32,
         nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), unique=False)
    K = T.dense_fixed(5)
    P = T.dense_fixed(2)
    A = T.match_sparse_buffer(a, (I, J, K), "float32")
    OUT = T.match_sparse_buffer(out, (I, J, P), "float32")
    with T.sp_iter([{axes}], "{kinds}", "sums") as [{names}]:
        with T.init():
            OUT[i, j, {at}] = T.float32(0)
        OUT[i, j, {at}] = OUT[i, j, {at}] + A[i, j, k]
"""


@pytest.mark.parametrize("at", ["0", "1", "i % 2"])
@pytest.mark.parametrize(
    ("axes", "kinds", "names"),
    [("I, J, K", "SSR", "i, j, k"), ("T.fuse(I, J), K", "SSR", "i, j, k"),
     ("I, K, J", "SRS", "i, k, j")],
)  # fmt: skip
def test_each_of_them_is_initialised(axes, kinds, names, at):
    program = from_source(PROGRAM.format(axes=axes, kinds=kinds, names=names, at=at))
    indptr = np.array([0, 4, 4, 7], np.int32)
    indices = np.array([1, 1, 3, 1, 2, 0, 2], np.int32)
    given = {"a": np.random.default_rng(0).random((7, 5), np.float32), "indptr": indptr}
    given |= {"indices": indices, "m": 3, "n": 4, "nnz": 7}
    expected, out = (np.full((7, 2), np.nan, np.float32) for _ in range(2))
    sparsetir.interpret(program, given | {"out": expected})
    rows = np.repeat(np.arange(3), np.diff(indptr))
    where = rows % 2 if at == "i % 2" else np.full(7, int(at))
    np.testing.assert_allclose(expected[np.arange(7), where], given["a"].sum(1), rtol=1e-6)
    assert np.isnan(expected[np.arange(7), 1 - where]).all()
    for scheduled in (program, sparsetir.Schedule(program)):
        out[:] = np.nan
        sparsetir.build(scheduled)(**given, out=out)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
