"""Rows of a block that are summed up together by the default schedule of CPUs."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from pairs import by_default, by_turns
from small import small
from sparsetir.formats import BSR
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.decomposed import Decomposed

AXES = """
IO = T.dense_fixed(mb)
JO = T.sparse_variable(IO, (nb, nnz), (indptr, indices))
II = T.dense_fixed({rows})
JI = T.dense_fixed({cols})
K = T.dense_fixed(feat)
NO = T.dense_fixed(nb)
"""
PLAIN = """
with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "f") as [io, jo, ii, ji, k]:
    with T.init():
        C[io, ii, k] = T.cast(0, "{dtype}")
    C[io, ii, k] = C[io, ii, k] + A[io, jo, ii, ji] * B[jo, ji, k]
"""
ROWS_FIRST = PLAIN.replace("[IO, JO, II, JI, K]", "[IO, II, JO, JI, K]").replace(
    '"SRSRS", "f") as [io, jo, ii', '"SSRRS", "f") as [io, ii, jo'
)
SOME = PLAIN.replace("    C[io, ii, k] = C", "    if D[io, ii] > 0:\n        C[io, ii, k] = C")
BODIES = {"plain": PLAIN, "rows first": ROWS_FIRST, "some rows": SOME}


def blocks(rows: int, cols: int, dtype: str) -> dict[str, Any]:
    """Four rows of blocks, the third of which is empty, and the last is full."""
    rng = np.random.default_rng(rows * 100 + cols)
    mask = rng.random((4, 5)) < 0.4
    mask[2], mask[3] = False, True
    pattern = sp.csr_array(mask)
    a = rng.integers(-3, 4, (pattern.nnz, rows, cols)).astype(dtype)
    d = rng.integers(0, 2, (4, rows)).astype("int32")
    indices = {"indptr": pattern.indptr.astype("int32"), "indices": pattern.indices.astype("int32")}
    return {"a": a, "d": d, **indices}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    by_turns([(4, 4, "float32"), (8, 16, "float64"), (7, 1, "int64"), (3, 5, "float32")], 2),
)  # fmt: skip
@pytest.mark.default("4-4-float32-plain")
def test_rows_of_blocks(body: str, rows: int, cols: int, dtype: str) -> None:
    extra = {"D": "IO II int32"} if body == "some rows" else {}
    axes = AXES.format(rows=rows, cols=cols)
    func = small(
        "f", BODIES[body].format(dtype=dtype), axes, dtype,
        A="IO JO II JI", B="NO JI K", C="IO II K", **extra,
    )  # fmt: skip
    kernel = sparsetir.build(func)
    inputs = blocks(rows, cols, dtype)
    rng = np.random.default_rng(0)
    for feat in (0, 1, 21, 70):
        b = rng.integers(-3, 4, (5, cols, feat)).astype(dtype)
        outs = [np.full((4, rows, feat), 9, dtype) for _ in range(2)]
        arguments = {**inputs, "b": b}
        if not extra:
            arguments.pop("d")
        kernel(**arguments, c=outs[0])
        sparsetir.interpret(func, {**arguments, "c": outs[1], "mb": 4, "nb": 5, "feat": feat})
        np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("size", by_default([4, 6, 16], 6))
def test_blocks_that_stick_out(size: int) -> None:
    """The last rows and columns of blocks are outside of the matrix, and not written or read."""
    matrix = sp.random_array((37, 29), density=0.2, rng=0, dtype="float32").tocsr()
    func = decomposed.program(Spmm(), Decomposed(BSR(size, size), True)).with_attr("promises", [])
    padded = sp.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
    padded.resize(-(-37 // size) * size, -(-29 // size) * size)
    bsr = sp.bsr_array(padded, blocksize=(size, size))
    bsr.sort_indices()
    tag = f"bsr_{size}_{size}"
    arguments = {
        f"a_{tag}": bsr.data, f"indptr_jo_{tag}": bsr.indptr, f"indices_jo_{tag}": bsr.indices,
        f"n_io_{tag}": bsr.shape[0] // size, f"n_jo_{tag}": bsr.shape[1] // size,
    }  # fmt: skip
    kernel = sparsetir.build(func)
    for feat in (3, 64, 100):
        b = np.random.default_rng(1).standard_normal((29, feat)).astype("float32")
        out = np.full((38, feat), 7.0, "float32")
        kernel(**arguments, b=b, out=out[:37])
        np.testing.assert_allclose(out[:37], matrix @ b, rtol=1e-4, atol=1e-5)
        assert (out[37] == 7).all()
