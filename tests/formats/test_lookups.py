"""Decomposed programs that look at other elements, have locals, or are given wrong sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from zoo import MATRICES

import sparsetir
from programs import PROGRAMS, copied
from small import text_of
from sparsetir import formats as F
from sparsetir.sparse_ir.errors import LoweringError, StructureError

HEAD = text_of("f", "", "J_ = T.dense_fixed(n)", A="I J", X="J_", D="J_ K", Y="I")  # fmt: skip
READ = """
    with T.sp_iter([I, J], "SR", "read") as [i, j]:
        with T.init():
            Y[i] = 0.0
        Y[i] = Y[i] + A[i, j + 1] * X[j]
"""
STORE = """
    with T.sp_iter([I, J], "SS", "store") as [i, j]:
        A[i, j + 1] = X[j]
"""
INIT = """
    with T.sp_iter([I, J, K], "SSR", "start") as [i, j, k]:
        with T.init():
            A[i, j] = 1.0
        A[i, j] = A[i, j] + D[j, k]
"""
SET = """
    with T.sp_iter([I, J, K], "SSR", "set") as [i, j, k]:
        T.sp_iter_attr({"ordered": 1})
        A[i, j] = D[j, k]
"""
LOCAL = """
    with T.sp_iter([I, J], "SR", "local") as [i, j]:
        with T.init():
            Y[i] = 0.0
        t = A[i, j] * X[j]
        Y[i] = Y[i] + t * t
"""


def arguments(pattern: F.Pattern, feat: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    whole = lambda *shape: rng.integers(1, 9, shape).astype("float32")  # noqa: E731 - exact sums
    return {
        "a": whole(pattern.nnz), "x": whole(pattern.shape[1]), "y": whole(pattern.shape[0]),
        "d": whole(pattern.shape[1], feat), "indptr": pattern.indptr.astype("int32"),
        "indices": pattern.coords[1].astype("int32"), "m": pattern.shape[0],
        "n": pattern.shape[1], "nnz": pattern.nnz, "feat": feat,
    }  # fmt: skip


def check(body: str, fmt: F.Format, feat: int = 2, pattern: F.Pattern = MATRICES["random"]) -> None:
    """The decomposed program leaves what the program leaves, interpreted and built."""
    func = sparsetir.from_source(HEAD + body)
    given = arguments(pattern, feat)
    want = copied(given)
    sparsetir.interpret(func, want)
    converted = fmt.convert(pattern, F.Operand.of(func, "A"))
    decomposed = converted.decompose(func)
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        mine = copied(given)
        run(decomposed, mine | converted.arguments(A=mine["a"]))
        np.testing.assert_array_equal(mine["y"], want["y"])
        np.testing.assert_array_equal(mine["a"], want["a"])


LOOKED_UP = [F.CSC(), F.ELL(), F.DIA(), F.Ragged(), F.BSR(2, 3), F.DBSR(2, 2)]


@pytest.mark.parametrize("fmt", LOOKED_UP, ids=lambda f: f.name)
@pytest.mark.parametrize("body", [READ, STORE + READ, INIT + READ], ids=["read", "store", "init"])
def test_other_elements_are_looked_up(body: str, fmt: F.Format) -> None:
    check(body, fmt)


@pytest.mark.parametrize(
    "fmt", [F.COO(), F.RowELL(2), F.SRBCRS(2, 2), F.SELL(2)], ids=lambda f: f.name
)
def test_what_cannot_be_looked_up_is_refused(fmt: F.Format) -> None:
    func = sparsetir.from_source(HEAD + READ)
    with pytest.raises(LoweringError, match="cannot be looked up: axis '.*' of rule"):
        fmt.convert(MATRICES["random"], F.Operand.of(func, "A")).decompose(func)


@pytest.mark.parametrize("feat", [0, 2])
def test_an_iteration_that_may_set_nothing(feat: int) -> None:
    check(SET, F.CSR(), feat)


@pytest.mark.parametrize("fmt", [F.Hyb(1, 1), F.EnumeratedPatterns(3)], ids=lambda f: f.name)
def test_locals_in_several_parts(fmt: F.Format) -> None:
    check(LOCAL, fmt)


MATRIX = sp.random(20, 20, 0.2, "csr", "float32", rng=np.random.default_rng(0))
LARGER = sp.random(30, 25, 0.2, "csr", "float32", rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    "fmt",
    [F.CSR(), F.COO(), F.ELL(), F.BSR(3, 2), F.SRBCRS(4, 4), F.SELL(4, 8), F.Hyb(2, 1)],
    ids=lambda f: f.name,
)
def test_operands_of_another_size_are_refused(fmt: F.Format) -> None:
    spmm = PROGRAMS["spmm"].make("float32", "int32")
    matrix, larger = sparsetir.SparseMatrix(MATRIX), sparsetir.SparseMatrix(LARGER)
    converted = matrix.to(fmt)
    _, compute = sparsetir.extract_preprocess(converted.decompose(spmm, drop_full_masks=False))
    kernel = sparsetir.build(compute)
    given = matrix.arguments(fmt, drop_full_masks=False)
    b, c = np.ones((20, 8), "float32"), np.empty((20, 8), "float32")
    kernel(b=b, c=c, **given)
    np.testing.assert_allclose(c, MATRIX @ b, rtol=1e-5)
    for operands in ({"b": b[:5].copy(), "c": c}, {"b": b, "c": c[:3].copy()}):
        with pytest.raises(ValueError, match="expected (indices|shape|rows)"):
            kernel(**operands, **given)
    with pytest.raises(ValueError, match="expected (indices|shape|rows)"):
        kernel(b=b, c=c, **larger.arguments(fmt, drop_full_masks=False))


@pytest.mark.parametrize("fmt", [F.CSR(), F.CSC(), F.BSR(2, 2), F.Hyb(1, 1)], ids=lambda f: f.name)
def test_arrays_that_their_owner_has_written_to(fmt: F.Format) -> None:
    matrix = MATRIX.copy()
    handle = sparsetir.SparseMatrix(matrix)
    matrix.indices[0] = 10**9
    with pytest.raises(StructureError, match=r"expected coordinates in \[0, 20\), got 1000000000"):
        handle.to(fmt)
