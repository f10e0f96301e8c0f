"""SparseTensor and SparseMatrix: what is refused, and how it is said."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetir import SparseMatrix, SparseTensor, StructureError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")

PAIR = ([0, 1], [0, 2])
REFUSED = {
    "out of range": (
        lambda: SparseMatrix(PAIR, (2, 2)), StructureError,
        r"SparseMatrix: argument 'data': axis 1: expected integers in \[0, 2\), got 2 at position",
    ),
    "negative": (
        lambda: SparseTensor([[0, -1]]), StructureError,
        r"SparseTensor: argument 'coords': axis 0: expected integers in \[0, 1\), got -1",
    ),
    "large unsigned": (
        lambda: SparseTensor([np.array([2**64 - 1], "uint64")], None, (3,)), StructureError,
        r"in \[0, 3\), got 18446744073709551615",
    ),
    "floats": (
        lambda: SparseMatrix(([0.0, np.nan], [0, 1])), TypeError,
        "argument 'data': expected integers for axis 0, got float64",
    ),
    "bools": (lambda: SparseTensor([[True]]), TypeError, "expected integers for axis 0, got bool"),
    "lengths": (
        lambda: SparseMatrix(([0], [0, 1])), ValueError,
        r"argument 'data': expected arrays of one length, got lengths \[1, 2\]",
    ),
    "two dimensions": (
        lambda: SparseTensor([[[0]], [[1]]]), ValueError,
        r"argument 'coords': expected one dimension for axis 0, got shape \(1, 1\)",
    ),
    "no axes": (lambda: SparseTensor([]), ValueError, "expected at least one axis, got none"),
    "array of one dimension": (
        lambda: SparseTensor(np.arange(3)), ValueError, r"expected an \(order, nnz\) array .*\(3,\)"
    ),
    "ragged": (lambda: SparseTensor([[0, [1]]]), TypeError, "'coords': expected an array, got"),
    "values": (
        lambda: SparseMatrix(PAIR, values=[1.0]), ValueError,
        r"SparseMatrix: argument 'values': expected shape \(2,\), got \(1,\)",
    ),
    "complex": (
        lambda: SparseMatrix(sp.csr_array(np.eye(2) * 1j)), TypeError,
        "argument 'values': expected one of float16, .*, got complex128",
    ),
    "sparse values": (
        lambda: SparseTensor([[0]], torch.ones(1).to_sparse()), TypeError,
        "argument 'values': expected a dense array, got a sparse one",
    ),
    "shape of another order": (
        lambda: SparseTensor(PAIR, shape=(2, 3, 4)), ValueError,
        r"SparseTensor: argument 'shape': expected 2 integers >= 0, got \(2, 3, 4\)",
    ),
    "negative shape": (lambda: SparseTensor([[]], shape=(-1,)), ValueError, "1 integers >= 0"),
    "shape of floats": (lambda: SparseTensor([[]], shape=(1.5,)), ValueError, "1 integers >= 0"),
    "no shape": (lambda: SparseMatrix(PAIR, 3), ValueError, "expected 2 integers >= 0, got 3"),
    "another shape": (
        lambda: SparseMatrix(sp.eye_array(3), (3, 4)), ValueError,
        r"argument 'shape': expected \(3, 3\), the shape of argument 'data', got \(3, 4\)",
    ),
    "values beside a matrix": (
        lambda: SparseMatrix(sp.eye_array(3), values=[1, 2, 3]), ValueError,
        "argument 'values': expected none beside scipy",
    ),
    "values beside a handle": (
        lambda: SparseMatrix(SparseMatrix(PAIR), values=[1, 2]), ValueError, "with_values"
    ),
    "shape beside a handle": (
        lambda: SparseMatrix(SparseMatrix(PAIR), (9, 9)), ValueError, r"expected \(2, 3\), got"
    ),
    "three axes": (
        lambda: SparseMatrix(sp.coo_array(np.ones((2, 2, 2)))), ValueError,
        r"SparseMatrix: expected 2 axes, got shape \(2, 2, 2\); see SparseTensor",
    ),
    "handle of three axes": (
        lambda: SparseMatrix(SparseTensor(np.zeros((3, 1), int))), ValueError, "expected 2 axes"
    ),
    "dense array": (
        lambda: SparseMatrix(np.eye(3)), ValueError,
        r"expected a sparse matrix or an edge_index .*, got shape \(3, 3\); see .*from_dense",
    ),
    "dense tensor": (lambda: SparseMatrix(torch.eye(3)), ValueError, "see .*from_dense"),
    "sparse as dense": (
        lambda: SparseMatrix.from_dense(sp.eye_array(3)), TypeError,
        "from_dense: argument 'array': expected a dense array, got scipy.dia_array",
    ),
    "number as dense": (lambda: SparseTensor.from_dense(3), ValueError, "at least one axis"),
    "path": (
        lambda: SparseMatrix("a.mtx"), ValueError,
        "SparseMatrix: argument 'data': a.mtx: no such file; a graph is cora, ",
    ),
    "something else": (
        lambda: SparseTensor(3), TypeError, "SparseTensor: argument 'coords': .*, got builtins.int"
    ),
    "edges": (
        lambda: SparseMatrix.from_edge_index(np.zeros((3, 2), int)), ValueError,
        r"from_edge_index: argument 'edge_index': .* of shape \(2, E\), got shape \(3, 2\)",
    ),
    "float edges": (
        lambda: SparseMatrix.from_edge_index(np.ones((2, 2))), TypeError,
        "argument 'edge_index': expected integers for axis 0, got float64",
    ),
    "rows": (
        lambda: SparseMatrix.from_edge_index([[0], [0]], rows="x"), ValueError,
        "argument 'rows': expected 'target' or 'source', got 'x'",
    ),
    "indptr that decreases": (
        lambda: SparseMatrix.from_csr([0, 2, 1, 2], [0, 1], shape=(3, 3)), StructureError,
        "from_csr: argument 'indptr': expected to start at 0, never to decrease and to end at 2",
    ),
    "indptr that ends early": (
        lambda: SparseMatrix.from_csr([0, 1], [0, 1]), StructureError, "end at 2, got 0 to 1"
    ),
    "length of indptr": (
        lambda: SparseMatrix.from_csr([0, 2], [0, 1], shape=(3, 3)), StructureError,
        r"argument 'indptr': expected shape \(4,\), got \(2,\)",
    ),
    "indices of CSR": (
        lambda: SparseMatrix.from_csr([0, 2], [0, 3], shape=(1, 3)), StructureError,
        r"argument 'indices': expected integers in \[0, 3\), got 3 at position 1",
    ),
    "float indices of CSR": (
        lambda: SparseMatrix.from_csr([0, 1], [0.5]), TypeError,
        "argument 'indices': expected integers, got float64",
    ),
    "hybrid": (
        lambda: SparseTensor(torch.ones(2, 3, 4).to_sparse(2)), ValueError,
        r"without batch or dense dimensions, got layout coo, shape \(2, 3, 4\), 1 dense",
    ),
    "batch": (
        lambda: SparseTensor(torch.ones(2, 3, 4).to_sparse_csr()), ValueError,
        r"argument 'coords': .* without batch or dense dimensions, got layout csr",
    ),
    "format": (
        lambda: SparseMatrix(PAIR).to("csr"), TypeError,
        r"SparseMatrix.to: argument 'format': expected a Format, such as CSR\(\), or a rule, got ",
    ),
    "layout": (
        lambda: SparseMatrix(PAIR).to_torch("ell"), ValueError, "argument 'layout': .*, got 'ell'"
    ),
    "layout of a tensor": (
        lambda: SparseTensor(PAIR).to_torch("csr"), ValueError, "expected 'coo', got 'csr'"
    ),
    "blocksize": (
        lambda: SparseMatrix(PAIR).to_torch("bsr"), ValueError,
        "argument 'blocksize': expected two integers",
    ),
    "blocksize of CSR": (
        lambda: SparseMatrix(PAIR).to_torch("csr", (1, 1)), ValueError, r"got \(1, 1\) for 'csr'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make()


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
