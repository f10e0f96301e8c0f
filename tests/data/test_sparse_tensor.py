"""SparseTensor and SparseMatrix: what they are made from, and the canonical form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as splinalg
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from data.sparse_tensor_common import (
    FLOATS,
    as_torch,
    dense,
    frozen,
    same,
    torch_dtype,
    torch_sparse,
)
from sparsetir import SparseMatrix, SparseTensor
from sparsetir.data.sources import VALUE_DTYPES
from sparsetir.formats import CSR

FORMATS = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")
LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc")
# torch does not compute with larger unsigned integers.
TORCH_DTYPES = (*FLOATS, "bool", "int8", "int16", "int32", "int64", "uint8")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")


@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint16", "bool"])
@pytest.mark.parametrize("format", FORMATS)
def test_scipy(format, dtype, kind):
    want = dense(dtype=dtype)
    source = getattr(sp, f"{format}_{kind}")(want)
    before = source.toarray()
    sparse = SparseMatrix(source)
    same(sparse, want, zeros=format in ("bsr", "dia"))
    assert sparse.nnz == source.nnz
    assert sparse.pattern.coords[0].dtype == sparse.pattern.coords[1].dtype == np.int32
    np.testing.assert_array_equal(source.toarray(), before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scipy_16_bits(dtype):
    want = dense(dtype=dtype)
    pattern = SparseMatrix(np.nonzero(want), want.shape).pattern
    rows, cols = pattern.coords
    csr = sp.csr_array((want[rows, cols], cols, pattern.indptr), shape=want.shape)
    same(SparseMatrix(csr), want)
    csr.indices, csr.data = cols[::-1], want[rows, cols][::-1]
    csr.indptr = csr.nnz - pattern.indptr[::-1]
    same(SparseMatrix(csr), want[::-1])
    assert SparseMatrix(csr).to_scipy().dtype == want.dtype


def test_scipy_of_other_orders():
    want = dense((3, 4, 5))
    same(SparseTensor(sp.coo_array(want)), want)
    same(SparseTensor(sp.coo_array(want[0, 0])), want[0, 0])
    same(SparseTensor(sp.csr_array(want[0])), want[0])


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_and_back(layout, dtype):
    want = dense(dtype=dtype)
    blocks = {"blocksize": (2, 4)} if layout in ("bsr", "bsc") else {}
    same(SparseMatrix(torch_sparse(want, layout)), want, zeros=bool(blocks))
    sparse = SparseMatrix.from_dense(want)
    back = sparse.to_torch(layout, **blocks)
    assert back.layout == getattr(torch, f"sparse_{layout}") and back.dtype == torch_dtype(dtype)
    assert torch.equal(back.to_dense(), as_torch(want))
    assert layout != "coo" or back.is_coalesced()
    assert sparse.to_torch(back.layout, **blocks).layout == back.layout
    again = SparseMatrix(back)
    if not blocks:
        assert (again.pattern.coords[1] == sparse.pattern.coords[1]).all()
        back.values().zero_()  # of a copy
    same(sparse, want)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_types_that_torch_does_not_convert_itself(layout, dtype):
    want = dense(dtype=dtype)
    back = SparseMatrix.from_dense(want).to_torch(layout)
    assert back.layout == getattr(torch, f"sparse_{layout}") and back.dtype == torch_dtype(dtype)
    same(SparseMatrix(back), want)


def test_torch_tensor_of_order_3():
    want = dense((3, 4, 5))
    sparse = SparseTensor(torch.from_numpy(want).to_sparse())
    same(sparse, want)
    assert torch.equal(sparse.to_torch().to_dense(), torch.from_numpy(want))
    values, coords = sparse.to_scipy()
    np.testing.assert_array_equal(sp.coo_array((values, coords), want.shape).toarray(), want)


def test_torch_not_coalesced_and_with_gradient():
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    t = torch.sparse_coo_tensor([[1, 0, 1], [2, 0, 2]], values, (2, 3))
    assert not t.is_coalesced()
    same(SparseMatrix(t), np.array([[2, 0, 0], [0, 0, 5]], "float32"))
    assert not t.is_coalesced() and t._nnz() == 3


def test_torch_that_wrongly_says_it_is_coalesced():
    t = torch.sparse_coo_tensor([[1, 0], [2, 0]], [1.0, 2.0], (2, 3), is_coalesced=True)
    same(SparseMatrix(t), np.array([[2, 0, 0], [0, 0, 1]], "float32"))


def array_of(kind: str, array: np.ndarray) -> Any:
    return {
        "numpy": lambda a: a,
        "torch": torch.from_numpy,
        "tvm": tvm.runtime.tensor,
        "list": lambda a: a.tolist(),
        "dlpack": Capsule,
    }[kind](array)


class Capsule:
    """The part of DLPack that is needed."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "tvm", "list", "dlpack"])
def test_arrays(kind, idtype):
    want = dense(dtype="float64")
    csr = sp.csr_array(want)
    indptr, indices = csr.indptr.astype(idtype), csr.indices.astype(idtype)
    rows, cols = (c.astype(idtype) for c in csr.nonzero())
    arrays = [array_of(kind, a) for a in (indptr, indices, csr.data)]
    same(SparseMatrix.from_csr(*arrays, shape=want.shape), want)
    pair = array_of(kind, rows), array_of(kind, cols)
    same(SparseMatrix(pair, want.shape, arrays[2]), want)
    same(SparseTensor(pair, arrays[2], want.shape), want)
    same(SparseTensor(array_of(kind, np.stack([rows, cols])), arrays[2], want.shape), want)
    assert SparseMatrix.from_csr(*arrays).shape == (6, cols.max() + 1)


def test_bfloat16_values_of_torch_and_tvm():
    values = np.array([1, 2.5], np.dtype("bfloat16"))
    strided = as_torch(np.repeat(values, 2))[::2]
    for source in (as_torch(values), tvm.runtime.tensor(values), strided):
        assert SparseTensor([[0, 3]], source).values.tolist() == [1, 2.5]


@pytest.mark.parametrize("make", [torch.from_numpy, lambda a: a, lambda a: a.tolist()])
def test_edge_index(make):
    edges = np.array([[0, 3, 0, 1], [1, 0, 1, 2]])
    weights = np.array([1, 2, 4, 8], "float32")
    want = np.zeros((4, 4), "float32")
    np.add.at(want, (edges[1], edges[0]), weights)
    sparse = SparseMatrix.from_edge_index(make(edges), weights)
    same(sparse, want)
    x = np.arange(4, dtype="float32")
    gathered = np.zeros(4, "float32")
    np.add.at(gathered, edges[1], weights * x[edges[0]])  # each node adds up its sources
    np.testing.assert_array_equal(sparse.to_scipy() @ x, gathered)
    same(SparseMatrix.from_edge_index(make(edges), weights, rows="source"), want.T)
    same(SparseMatrix.from_edge_index(make(edges), weights, (4, 6)), np.pad(want, [(0, 0), (0, 2)]))
    assert SparseMatrix.from_edge_index(make(edges)).values.tolist() == [1, 2, 1]
    assert SparseMatrix.from_edge_index(np.zeros((2, 0))).shape == (0, 0)
    assert SparseMatrix.from_edge_index(make(edges), shape=9).shape == (9, 9)
    assert SparseMatrix.from_edge_index(make(edges), shape=np.int64(9)).shape == (9, 9)


def test_arrange_takes_values_as_they_were_given():
    edges = np.array([[0, 3, 0, 1], [1, 0, 1, 2]])
    sparse = SparseMatrix.from_edge_index(edges)
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert sparse.arrange(weights).tolist() == [2, 5, 8]
    features = np.stack([weights, -weights], 1)
    assert sparse.arrange(features).tolist() == [[2, -2], [5, -5], [8, -8]]
    again = sparse.with_values(sparse.arrange(weights))
    assert again.T.T.arrange(weights).tolist() == [2, 5, 8]
    np.testing.assert_array_equal(
        sparse.T.with_values(sparse.T.arrange(weights)).to_scipy().toarray(),
        again.to_scipy().toarray().T,
    )
    ordered = SparseMatrix(sp.csr_array(dense()))
    assert ordered.places is None
    assert (ordered.arrange(ordered.values) == ordered.values).all()
    with pytest.raises(ValueError, match=r"arrange: .*expected shape \(4, ...\), got \(3,\)"):
        sparse.arrange(weights[:3])


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense(dtype):
    want = dense((4, 3, 5), dtype)
    same(SparseTensor.from_dense(want), want)
    same(SparseTensor.from_dense(as_torch(want)), want)
    same(SparseMatrix.from_dense(want[0]), want[0])
    same(SparseMatrix.from_dense(np.asmatrix(want[0])), want[0])
    sparse = SparseMatrix.from_dense(np.array([[0, np.nan], [-0.0, np.inf]]))
    assert sparse.nnz == 2 and np.isnan(sparse.values[0])


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_duplicates_are_added_and_order_is_made(dtype):
    coords = np.array([[1, 0, 1, 0, 1], [2, 1, 2, 0, 0], [0, 3, 0, 0, 1]])
    values = np.array([1, 0, 1, 1, 0], np.dtype(dtype))
    frozen(coords, values)
    sparse = SparseTensor(coords, values, (2, 3, 4))
    twice = 1 if dtype == "bool" else 2
    assert [tuple(c) for c in sparse.pattern.coords] == [(0, 0, 1, 1), (0, 1, 0, 2), (0, 3, 1, 0)]
    assert sparse.values.tolist() == [1, 0, 0, twice] and sparse.dtype == np.dtype(dtype)
    assert sparse.places.tolist() == [3, 1, 3, 0, 2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_with_infinities_and_in_16_bits(dtype):
    inf, nan = np.inf, np.nan
    values = np.array([inf, -inf, nan, 1, inf, 1, -0.0], np.dtype(dtype))
    sparse = SparseTensor([[0, 0, 1, 1, 2, 2, 3]], values)
    np.testing.assert_array_equal(sparse.values.astype("float64"), [nan, nan, inf, 0])
    assert np.signbit(sparse.values.astype("float32")[3])
    many = np.full(4096, 1 + 2.0**-7, np.dtype(dtype))  # adding in bfloat16 ends at 256
    total = SparseTensor([np.zeros(4096, int)], many).values
    assert total.astype("float64").tolist() == [4096 * (1 + 2.0**-7)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_as_scipy_says(data):
    m, n = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    count = data.draw(st.integers(0, 20))
    rows = data.draw(hnp.arrays("int64", count, elements=st.integers(0, m - 1)))
    cols = data.draw(hnp.arrays("int32", count, elements=st.integers(0, n - 1)))
    values = data.draw(hnp.arrays("float64", count, elements=st.integers(-3, 3)))
    source = sp.coo_array((values, (rows, cols)), shape=(m, n))
    want = source.tocsr()
    want.sum_duplicates()
    csr = sp.csr_array(
        (values[np.argsort(rows, kind="stable")], cols[np.argsort(rows, kind="stable")],
         np.append(0, np.bincount(rows, minlength=m).cumsum())), shape=(m, n),
    )  # fmt: skip
    csr.has_canonical_format = True  # a lie
    for sparse in (
        SparseMatrix(source),
        SparseMatrix(csr),
        SparseMatrix((rows, cols), (m, n), values),
        SparseMatrix(source.T).T,
        SparseMatrix(csr.T).T,
    ):
        np.testing.assert_array_equal(sparse.pattern.indptr, want.indptr)
        np.testing.assert_array_equal(sparse.pattern.coords[1], want.indices)
        np.testing.assert_array_equal(sparse.values, want.data)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 3)])
def test_nothing_stored(shape):
    empty = np.zeros(shape, "float32")
    sources = [sp.csr_array(empty), sp.csc_array(empty), sp.coo_array(empty), sp.lil_array(empty)]
    sources += [
        torch.sparse_coo_tensor(np.zeros((2, 0), int), [], shape),
        torch_sparse(empty, "csr"),
    ]
    for sparse in [*map(SparseMatrix, sources), SparseMatrix(([], []), shape)]:
        same(sparse, empty)
        same(sparse.T, empty.T)
        assert sparse.to(CSR()).parts[0].stored == 0
        assert sparse.to_scipy().shape == shape and sparse.to_torch().shape == shape
    assert SparseMatrix(([], [])).shape == (0, 0)


def test_explicit_zeros_are_kept():
    values = np.array([0, 1, 0], "float32")
    csr = sp.csr_array((values, [0, 1, 1], [0, 2, 3]), shape=(2, 2))
    for source in (csr, csr.tocsc(), csr.tocoo(), csr.todok(), csr.tolil()):
        assert SparseMatrix(source).values.tolist() == [0, 1, 0], source.format
    assert SparseMatrix(torch_sparse(np.eye(4, dtype="float32"), "bsr")).nnz == 16
    dia = sp.dia_array((np.array([[0, 5, 6.0], [7, 0, 9]]), [0, 2]), shape=(2, 3))
    assert SparseMatrix(dia).values.tolist() == [0, 9, 5]
    assert SparseMatrix(dia).nnz == dia.nnz


def test_index_types():
    far = 2**33
    sparse = SparseMatrix((np.array([1, 0], "int32"), [far, 5]), (3, far + 1))
    assert sparse.pattern.coords[0].dtype == sparse.pattern.coords[1].dtype == np.int64
    assert sparse.pattern.coords[1].tolist() == [5, far] and sparse.operand().idtype == "int64"
    sparse = SparseMatrix((np.array([0, 2, 1], "int64"), [0, 1, 2]), (3, 4))
    assert sparse.pattern.coords[0].dtype == np.int32
    wide = SparseTensor(np.array([[7, 7, 1], [9, 2, 9], [3, 4, 3], [7, 7, 1]]), None, (2**20,) * 4)
    assert [c.tolist() for c in wide.pattern.coords[:2]] == [[1, 7, 7], [9, 2, 9]]
    same(SparseTensor([np.array([1, 0], ">i8")], np.array([1, 2], ">f4")), np.array([2, 1], "f4"))


def test_room_behind_the_arrays_of_scipy():
    csr = sp.csr_array(dense())
    csr.indices = np.append(csr.indices, [99, 99])
    csr.data = np.append(csr.data, np.ones(2, "float32"))
    same(SparseMatrix(csr), dense())


def test_solvers_of_scipy() -> None:
    stored = sp.random(40, 40, 0.2, "csr", random_state=0)
    stored = sp.csr_array(stored @ stored.T + 10 * sp.eye(40))
    A, b = SparseMatrix(stored), np.arange(40.0)
    np.testing.assert_allclose(splinalg.cg(A, b, rtol=1e-10)[0], splinalg.spsolve(stored, b))
    np.testing.assert_allclose(
        splinalg.lsqr(A, b, atol=1e-12, btol=1e-12)[0], splinalg.spsolve(stored, b)
    )
    values = [splinalg.eigsh(x, 2, return_eigenvectors=False) for x in (A, stored)]
    np.testing.assert_allclose(*values)
    operator = splinalg.aslinearoperator(SparseMatrix(stored[:30]))
    np.testing.assert_allclose(operator.T @ b[:30], stored[:30].T @ b[:30])


def test_products_notice_that_values_were_written_to() -> None:
    stored = sp.random(50, 50, 0.3, "csr", "float32", random_state=0)
    A, x = SparseMatrix(stored), np.ones(50, "float32")
    for factor in (1, 2, 3):
        stored.data *= factor
        for _ in range(3):  # the first makes no plan
            np.testing.assert_allclose(A @ x, stored @ x, rtol=1e-5)
            np.testing.assert_allclose(x @ A, x @ stored, rtol=1e-5)
        np.testing.assert_array_equal(A.T.toarray(), stored.toarray().T)
        assert A.T is A.T and A.T.T is A


def test_products_with_what_is_dense():
    a = sp.random_array((30, 20), density=0.1, format="csr", dtype="float32", rng=0)
    A, x = SparseMatrix(a), np.random.default_rng(0).random((20, 7), "float32")
    np.testing.assert_allclose(A @ x, a @ x, atol=1e-5)
    np.testing.assert_allclose(A @ x[:, 0], a @ x[:, 0], atol=1e-5)  # with gaps in memory
    np.testing.assert_allclose(A.T @ (A @ x), a.T @ (a @ x), atol=1e-4)
    assert (A @ x.astype("float64")).dtype == np.float64 and (A @ x).dtype == np.float32
    tensor = torch.from_numpy(x).requires_grad_()
    (A @ tensor).sum().backward()
    torch.testing.assert_close(tensor.grad, torch.from_numpy(a.sum(0))[:, None].expand(20, 7))
    assert (A.tocsr() != a).nnz == 0
    held = A @ x, A._products
    assert (A @ x == held[0]).all() and len(A._products) == 3
    A.clear_cache()
    assert not A._products


def test_products_that_do_not_fit():
    A = SparseMatrix(([0], [1]), (2, 3))
    with pytest.raises(
        ValueError, match=r"'x' of A @ x: expected shape \(3,\) or \(3, feat\), got"
    ):
        A @ np.ones(2)
    with pytest.raises(TypeError, match="unsupported operand"):
        A @ [1, 2, 3]


def test_what_notebooks_show():
    shown = SparseMatrix(([0, 99], [1, 50]), (100, 60))._repr_html_()
    assert "SparseMatrix: 100 x 60, 2 elements, 0.00033 of all places, float32" in shown
    assert "<title>Elements of a SparseMatrix: 100 x 60, " in shown
    assert shown.count("<rect ") == 2 and 'viewBox="0 0 20 34"' in shown
    assert "<svg" not in SparseTensor([[0], [0], [0]])._repr_html_()
    assert "<svg" not in SparseMatrix(([], []), (0, 5))._repr_html_()
