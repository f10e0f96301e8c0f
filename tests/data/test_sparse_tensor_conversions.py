"""SparseTensor and SparseMatrix: what is shared with the user, kept, and refused."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import format_rules
import sparsetir
from data.sparse_tensor_common import FLOATS, dense, frozen, same
from refusals import refusals
from small import small
from sparsetir import SparseMatrix, SparseTensor, StructureError
from sparsetir.formats import BSR, CSR, Operand
from sparsetir.formats.infer_indices import infer_format

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")


def test_canonical_csr_is_shared():
    csr = sp.csr_array(dense())
    sparse = SparseMatrix(csr)
    assert np.shares_memory(sparse.values, csr.data)
    assert np.shares_memory(sparse.pattern.coords[1], csr.indices)
    assert np.shares_memory(sparse.pattern.indptr, csr.indptr)
    for out in (sparse.to_scipy().data, sparse.to_torch().values().numpy()):
        assert not np.shares_memory(out, csr.data)


def test_what_is_given_stays_as_it_is():
    csr = sp.csr_array((np.ones(3), np.array([2, 0, 2]), np.array([0, 3, 3])), shape=(2, 3))
    frozen(csr.data, csr.indices, csr.indptr)
    sparse = SparseMatrix(csr)
    assert sparse.values.tolist() == [1, 2] and csr.nnz == 3
    coo = sp.coo_array((np.ones(2), ([1, 0], [0, 0])), shape=(2, 2))
    SparseMatrix(coo)
    assert coo.coords[0].tolist() == [1, 0]


def test_flags_of_scipy_are_not_relied_on():
    csr = sp.csr_array(np.ones((2, 3)))
    assert csr.has_canonical_format
    csr.indices[:3] = [2, 0, 2]
    assert csr.has_canonical_format  # scipy does not look again
    same(SparseMatrix(csr), np.array([[1, 0, 2], [1, 1, 1.0]]))


def test_conversions_are_kept():
    sparse = SparseMatrix(sp.csr_array(dense()))
    first = sparse.to(BSR(2, 2))
    assert sparse.to(BSR(2, 2)) is first and sparse.to(BSR(2, 4)) is not first
    assert sparse.to(BSR(2, 2), sparse.operand()) is first
    tagged = Operand({"A": "float32"}, ("I", "J"), tag="_x")
    assert sparse.to(BSR(2, 2), tagged) is sparse.to(BSR(2, 2), tagged) is not first
    assert len(sparse.cached) == 3 and all(c.nbytes > 0 for c in sparse.cached.values())
    with pytest.raises(TypeError):
        sparse.cached["x"] = 1  # type: ignore[index]
    sparse.clear_cache()
    assert not sparse.cached and sparse.to(BSR(2, 2)) is not first
    assert SparseMatrix(sparse).to(BSR(2, 2)) is sparse.to(BSR(2, 2))
    assert SparseTensor(sparse).to(BSR(2, 2)) is sparse.to(BSR(2, 2))


def test_a_rule_is_a_format():
    rule = format_rules.matrix("bsr3")
    matrix = SparseMatrix.from_dense(dense())
    converted = matrix.to(rule)
    assert converted is matrix.to(rule) and converted.rules == [rule]
    want = infer_format(rule, matrix.pattern.coords, matrix.shape)
    arguments = matrix.arguments(rule)
    np.testing.assert_array_equal(arguments["a_bsr3"], want.values(matrix.values))
    np.testing.assert_array_equal(arguments["mask_bsr3"], want.mask)
    matrix.clear_cache()
    assert matrix.to(rule) is not converted
    double = matrix.astype("float64")
    with pytest.raises(ValueError, match=r"bsr3: argument 'A': expected \(\d+,\) float32, got"):
        double.arguments(rule)


def test_with_values_shares_conversions():
    sparse = SparseMatrix(sp.csr_array(dense()))
    converted = sparse.to(BSR(2, 2))
    other = sparse.with_values(torch.arange(sparse.nnz, dtype=torch.float32, requires_grad=True))
    assert type(other) is SparseMatrix and other.to(BSR(2, 2)) is converted
    assert other.to(CSR()) is sparse.to(CSR())
    assert other.T.to(CSR()) is sparse.T.to(CSR())
    assert other.values.tolist() == list(range(sparse.nnz))
    name = converted.parameter("A", converted.parts[0])
    assert converted.restore("A", other.arguments(BSR(2, 2))).tolist() == other.values.tolist()
    assert converted.restore("A", sparse.arguments(BSR(2, 2))).tolist() == sparse.values.tolist()
    assert sparse.arguments(BSR(2, 2))[name] is sparse.arguments(BSR(2, 2))[name]
    half = sparse.astype("float16")
    assert half.dtype == np.float16 and half.to(CSR()).operand.buffers == (("A", "float16"),)
    with pytest.raises(ValueError, match=r"SparseMatrix.with_values: argument 'values': expected "):
        sparse.with_values(np.ones(sparse.nnz + 1))


def test_transposed():
    want = dense()
    sparse = SparseMatrix(sp.csr_array(want))
    same(sparse.T, want.T)
    assert sparse.T.T is sparse and sparse.T is sparse.T
    converted = sparse.T.to(CSR())
    assert sparse.T.to(CSR()) is converted
    other = sparse.with_values(sparse.values * 2)
    same(other.T, 2 * want.T)
    same(other.T.T, 2 * want)
    same(sparse.T.with_values(sparse.T.values * 3).T, 3 * want)
    sparse.clear_cache()
    assert sparse.T.to(CSR()) is not converted
    same(sparse.T, want.T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", [CSR(), BSR(2, 2)])
def test_arguments(format, dtype):
    sparse = SparseMatrix.from_dense(dense(dtype=dtype))
    for drop in (True, False):
        args = sparse.arguments(format, drop_full_masks=drop)
        want = sparse.to(format).arguments(drop, A=sparse.values)
        assert args.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_array_equal(
                np.asarray(args[name], "float64"), np.asarray(value, "float64")
            )
    full = SparseMatrix.from_dense(np.ones((4, 4), np.dtype(dtype)))
    masked = isinstance(format, BSR)
    for drop in (True, False):
        names = full.arguments(format, drop_full_masks=drop)
        assert any(n.startswith("mask") for n in names) == (masked and not drop)
    two = Operand({"A": dtype, "OUT": dtype})
    args = sparse.arguments(format, two, OUT=None)
    converted = sparse.to(format, two)
    out = converted.parameter("OUT", converted.parts[0])
    assert not args[out].any() and args[out].shape == converted.parts[0].shape
    args[out] = sparse.arguments(format, two, A=None)[converted.parameter("A", converted.parts[0])]
    assert not args[out].any()
    with pytest.raises(ValueError, match=r"argument 'A': expected \(\d+,\) int8, got"):
        sparse.arguments(format, Operand({"A": "int8"}))


def test_a_kernel_runs_on_it():
    func = small("row_sums", """
with T.sp_iter([I, J], "SR", "row_sums") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j]
""", "J = T.sparse_variable(I, (n, nnz), (p, x))", A="I J", Y="I")  # fmt: skip  # fmt: skip
    want = dense((13, 11))
    sparse = SparseMatrix(sp.csc_array(want))
    converted = sparse.to(BSR(4, 2), Operand.of(func, "A"))
    assert converted is sparse.to(BSR(4, 2))
    _, run = sparsetir.extract_preprocess(converted.decompose(func))
    kernel = sparsetir.build(run)
    for factor in (1, 3):
        y = np.empty(13, "float32")
        kernel(y=y, **sparse.with_values(sparse.values * np.float32(factor)).arguments(BSR(4, 2)))
        np.testing.assert_array_equal(y, factor * want.sum(axis=1))


PAIR = ([0, 1], [0, 2])
test_refusals = refusals(
    """
SparseMatrix(PAIR, (2, 2))  # StructureError: 'data': axis 1: expected integers .. got 2 at position
SparseTensor([[0, -1]])  # StructureError: 'coords': axis 0: expected integers in [0, 1), got -1
SparseTensor([np.array([2**64 - 1], "uint64")], None, (3,))  # StructureError: in [0, 3), got
SparseMatrix(([0.0, np.nan], [0, 1]))  # TypeError: 'data': expected integers for .. got float64
SparseTensor([[True]])  # TypeError: expected integers for axis 0, got bool
SparseMatrix(([0], [0, 1]))  # ValueError: 'data': expected arrays of one length, got lengths [1, 2]
SparseTensor([[[0]], [[1]]])  # ValueError: 'coords': expected one dimension for .. got shape (1, 1)
SparseTensor([])  # ValueError: expected at least one axis, got none
SparseTensor(np.arange(3))  # ValueError: expected an (order, nnz) array .. (3,)
SparseTensor([[0, [1]]])  # TypeError: 'coords': expected an array, got
SparseMatrix(PAIR, values=[1.0])  # ValueError: 'values': expected shape (2,), got (1,)
SparseMatrix(sp.csr_array(np.eye(2) * 1j))  # TypeError: 'values': expected one of float16, .. , got
SparseTensor([[0]], torch.ones(1).to_sparse())  # TypeError: 'values': expected .. got a sparse one
SparseTensor(PAIR, shape=(2, 3, 4))  # ValueError: 'shape': expected 2 integers >= 0, got (2, 3, 4)
SparseTensor([[]], shape=(-1,))  # ValueError: 1 integers >= 0
SparseTensor([[]], shape=(1.5,))  # ValueError: 1 integers >= 0
SparseMatrix(PAIR, 3)  # ValueError: expected 2 integers >= 0, got 3
SparseMatrix(sp.eye_array(3), (3, 4))  # ValueError: 'shape': expected (3, 3), the .. got (3, 4)
SparseMatrix(sp.eye_array(3), values=[1, 2, 3])  # ValueError: 'values': expected none for scipy
SparseMatrix(SparseMatrix(PAIR), values=[1, 2])  # ValueError: with_values
SparseMatrix(SparseMatrix(PAIR), (9, 9))  # ValueError: expected (2, 3), got
SparseMatrix(sp.coo_array(np.ones((2, 2, 2))))  # ValueError: SparseMatrix: expected 2 axes, got
SparseMatrix(SparseTensor(np.zeros((3, 1), int)))  # ValueError: expected 2 axes
SparseMatrix(np.eye(3))  # ValueError: expected a sparse matrix or an edge_index .. , got shape (3
SparseMatrix(torch.eye(3))  # ValueError: see .. from_dense
SparseMatrix.from_dense(sp.eye_array(3))  # TypeError: 'array': expected a .. got scipy.dia_array
SparseTensor.from_dense(3)  # ValueError: at least one axis
SparseMatrix("a.mtx")  # ValueError: 'data': a.mtx: no such file; a graph is cora,
SparseTensor(3)  # TypeError: SparseTensor: argument 'coords': .. , got builtins.int
SparseMatrix.from_edge_index(np.zeros((3, 2), int))  # ValueError: 'edge_index': .. of shape (2, E)
SparseMatrix.from_edge_index(np.ones((2, 2)))  # TypeError: 'edge_index': expected .. got float64
SparseMatrix.from_edge_index([[0], [0]], 5)
    # TypeError: 'values': expected (E,) weights, or None: the number of nodes is shape=5, got 5
SparseMatrix.from_edge_index([[0], [0]], rows="x")  # ValueError: 'rows': expected .. got 'x'
SparseMatrix.from_csr([0, 2, 1, 2], [0, 1], shape=(3, 3))  # StructureError: 'indptr': expected to
SparseMatrix.from_csr([], [])  # StructureError: 'indptr': expected shape (1,), got (0,)
SparseMatrix.from_csr([0, 1], [0, 1])  # StructureError: end at 2, got 0 to 1
SparseMatrix.from_csr([0, 2], [0, 1], shape=(3, 3))  # StructureError: 'indptr': .. got (2,)
SparseMatrix.from_csr([0, 2], [0, 3], shape=(1, 3))  # StructureError: 'indices': expected integers
SparseMatrix.from_csr([0, 1], [0.5])  # TypeError: 'indices': expected integers, got float64
SparseTensor(torch.ones(2, 3, 4).to_sparse(2))  # ValueError: without batch or dense dimensions, got
SparseTensor(torch.ones(2, 3, 4).to_sparse_csr())  # ValueError: 'coords': .. without batch or dense
SparseMatrix(PAIR).to("csr")  # TypeError: 'format': expected a Format, such as CSR(), or a rule
SparseMatrix(PAIR).to_torch("ell")  # ValueError: argument 'layout': .. , got 'ell'
SparseTensor(PAIR).to_torch("csr")  # ValueError: expected 'coo', got 'csr'
SparseMatrix(PAIR).to_torch("bsr")  # ValueError: argument 'blocksize': expected two integers
SparseMatrix(PAIR).to_torch("csr", (1, 1))  # ValueError: got (1, 1) for 'csr'
""",
    globals(),
    SparseTensor,
)


def test_edited_arrays_of_scipy_are_refused():
    for format in ("csr", "csc", "bsr"):
        matrix = sp.eye_array(4).asformat(format)
        matrix.indices[0] = 4
        with pytest.raises(StructureError, match="got 4 at position 0"):
            SparseMatrix(matrix)
        matrix = sp.eye_array(4).asformat(format)
        matrix.indptr[1] = 3
        with pytest.raises(StructureError, match="'indptr': expected to start at 0, never to decr"):
            SparseMatrix(matrix)
