"""tiles: operands in tiles of constant extents; what it makes, that it means the same, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from schedule_common import opened, program
from sparsetir.formats import BSR, Operand
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess

ORDER = ["K0", "J_0", "J_1", "K1", "J_2"]


def arguments(m: int = 7, n: int = 10, feat: int = 5) -> dict[str, Any]:
    a = sp.random_array((m, n), density=0.4, format="csr", dtype="float32", rng=0)
    a.sort_indices()
    b = np.random.default_rng(1).random((n, feat), dtype="float32")
    return {
        "a": a.data, "b": b, "c": np.full((m, feat), np.nan, "float32"),
        "indptr": a.indptr.astype("int32"), "indices": a.indices.astype("int32"),
        "m": m, "n": n, "nnz": a.nnz, "feat": feat, "wanted": a @ b,
    }  # fmt: skip


def in_tiles(sizes: Any = None, order: Any = None, **options: Any) -> tuple[Any, Any]:
    """SpMM in a workspace, with B in tiles."""
    sch, it, (i, j, k) = opened()
    k0, k1 = sch.split(k, [None, 4])
    sch.sparse_reorder(it, [i, k0, j, k1])
    sch.precompute("C", k0, [k1])
    sizes = {"J_": [2, 2], "K": [4]} if sizes is None else sizes
    return sch, sch.tiles("B", it, sizes, order=ORDER if order is None else order, **options)


@pytest.mark.parametrize("sizes, order", [
    (None, None), ({"K": [4]}, ["K0", "J_", "K1"]), ({"J_": [3]}, ["J_0", "K", "J_1"]),
    ({"J_": [1, 8], "K": [2, 2]}, ["J_2", "K2", "J_1", "K1", "J_0", "K0"]),
])  # fmt: skip
@pytest.mark.parametrize("feat", [1, 5, 8])
def test_it_means_the_same(sizes: Any, order: Any, feat: int) -> None:
    """Sizes that tiles divide and others; interpreted and compiled."""
    sch, copy = in_tiles(sizes, order)
    assert copy.name == "B_tiles_copy"
    for n in (1, 10, 16):
        given = arguments(n=n, feat=feat)
        wanted = given.pop("wanted")
        sparsetir.interpret(sch.func, given)
        np.testing.assert_allclose(given["c"], wanted, rtol=1e-5)
        given["c"][:] = np.nan
        sparsetir.build(sch)(**given)
        np.testing.assert_allclose(given["c"], wanted, rtol=1e-5)


def test_places_beyond_the_operand_are_zero() -> None:
    """So infinities beside it do not show."""
    sch, _ = in_tiles()
    given = arguments(n=9, feat=5)
    wanted = given.pop("wanted")
    with np.errstate(all="raise"):
        sparsetir.interpret(sch.func, given)
    np.testing.assert_allclose(given["c"], wanted, rtol=1e-5)


def test_what_the_docstring_shows() -> None:
    """Of blocks the coordinates are those of the loops alone, without a condition."""
    spmm = program()
    rules = BSR(32, 32).rules(Operand({"A": "float32"}, ("I", "J"), "int32"))
    _, func = extract_preprocess(decompose_format(spmm, rules, [r.name for r in rules]))
    sch, it, (io, jo, ii, ji, k) = opened(func, "spmm_bsr_32_32")
    k0, k1 = sch.split(k, [None, 32])
    p, q = sch.split(ji, [None, 2])
    sch.sparse_reorder(it, [io, k0, jo, ii, k1, p, q])
    sch.precompute("C", k0, [ii, k1])
    whole = sch.get_sparse_iteration("spmm_bsr_32_32")
    sch.tiles("B", whole, {"J_": [16, 2], "K": [32]}, order=ORDER)
    text = sch.func.script()
    assert "B_tiles[k0, j_0, j_1, k1, j_2] = B[j_0 * 32 + j_1 * 2 + j_2, k0 * 32 + k1]" in text
    assert "B_tiles[k0, jo, ji0, k1, ji1]" in text
    reduce = sch.lower().get(sch.lower().get_sblock("spmm_bsr_32_32_reduce0"))
    assert "if_then_else" not in str(reduce.body)


def test_tiles_that_the_caller_gives() -> None:
    sch, copy = in_tiles(given=True)
    assert copy is None
    given = arguments()
    wanted, b = given.pop("wanted"), given.pop("b")
    whole = np.zeros((12, 8), "float32")
    whole[:10, :5] = b
    given["b"] = np.ascontiguousarray(whole.reshape(3, 2, 2, 2, 4).transpose(3, 0, 1, 4, 2))
    kernel = sparsetir.build(sch)
    kernel(**given)
    np.testing.assert_allclose(given["c"], wanted, rtol=1e-5)
    with pytest.raises(ValueError, match=r"argument 'b': expected shape \(2, 3, 2, 4, 2\), got"):
        kernel(**{**given, "b": given["b"][:1]})
