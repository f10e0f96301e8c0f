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
from sparsetir.schedules.passes.vectorize_innermost import FAR
from sparsetir.schedules.targets import l2_bytes
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


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"), [(4, 4, "float32"), (8, 6, "float16"), (3, 5, "float64")]
)
@pytest.mark.default("8-6-float16")
def test_panels_of_blocks(rows: int, cols: int, dtype: str) -> None:
    """Each row of B is read often; the last tile of features overlaps the one before, or not."""
    rng = np.random.default_rng(0)
    blocks_of = sp.random_array((90 // rows, 20), density=0.6, rng=rng, format="csr")
    stored = rng.integers(-3, 4, (blocks_of.nnz, rows, cols)).astype(dtype)
    func = decomposed.program(Spmm(dtype=dtype), Decomposed(BSR(rows, cols), True))
    kernel, tag = sparsetir.build(func), f"bsr_{rows}_{cols}"
    assert 'sblock("panels")' in kernel.stages["II scheduled"].script()
    m, n = blocks_of.shape[0] * rows, 20 * cols
    dense = sp.bsr_array(
        (stored.astype("float64"), blocks_of.indices, blocks_of.indptr), shape=(m, n)
    )
    for feat in (32, 33, 64, 100, 128):
        b, out = rng.integers(-3, 4, (n, feat)).astype(dtype), np.empty((m, feat), dtype)
        kernel(
            b=b, out=out, m=m, n=n, feat=feat,
            **{
                f"a_{tag}": stored, f"indptr_jo_{tag}": blocks_of.indptr.astype("int32"),
                f"indices_jo_{tag}": blocks_of.indices.astype("int32"),
                f"n_io_{tag}": m // rows, f"n_jo_{tag}": 20,
            },
        )  # fmt: skip
        np.testing.assert_array_equal(out, dense @ b.astype("float64"))


def test_rows_are_summed_up_together() -> None:
    func = small(
        "f", PLAIN.format(dtype="float32"), AXES.format(rows=8, cols=4),
        A="IO JO II JI", B="NO JI K", C="IO II K",
    )  # fmt: skip
    text = sparsetir.lower(func, target="llvm")["II scheduled"].script()
    assert "acc_31[" in text and "acc_32[" not in text  # four of eight rows, by eight vectors


def test_rows_that_no_cache_holds_are_read_in_longer_pieces() -> None:
    """The same sums on both sides of the choice."""
    rows, cols, feat, count = 4, 8, 160, 1500
    func = small(
        "f", PLAIN.format(dtype="float32"), AXES.format(rows=rows, cols=cols),
        A="IO JO II JI", B="NO JI K", C="IO II K",
    )  # fmt: skip
    kernel, rng = sparsetir.build(func), np.random.default_rng(0)
    far = FAR * l2_bytes() // (cols * feat * 4) + 1
    for blocks_of_b in (far, count):
        indices = rng.integers(0, blocks_of_b, 3 * 6).reshape(6, 3)
        indices = np.sort(indices, axis=1).astype("int32")
        b = rng.random((blocks_of_b, cols, feat), dtype="float32")
        a, out = rng.random((18, rows, cols), dtype="float32"), np.empty((6, rows, feat), "float32")
        kernel(a=a, b=b, c=out, indptr=np.arange(0, 19, 3, dtype="int32"), indices=indices.ravel())
        expected = np.einsum("srab,srbk->sak", a.reshape(6, 3, rows, cols), b[indices])
        np.testing.assert_allclose(out, expected, rtol=1e-5)
