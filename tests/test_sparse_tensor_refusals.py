"""SparseTensor and SparseMatrix: what is refused, and how it is said."""

from __future__ import annotations

import pytest
import scipy.sparse as sp

from refusals import refusals
from sparsetir import SparseMatrix, SparseTensor, StructureError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")

PAIR = ([0, 1], [0, 2])
test_refusals = refusals(
    """
SparseMatrix(PAIR, (2, 2))
    # StructureError: SparseMatrix: argument 'data': axis 1: expected integers in [0, 2), got 2 at
        position
SparseTensor([[0, -1]])
    # StructureError: SparseTensor: argument 'coords': axis 0: expected integers in [0, 1), got -1
SparseTensor([np.array([2**64 - 1], "uint64")], None, (3,))
    # StructureError: in [0, 3), got 18446744073709551615
SparseMatrix(([0.0, np.nan], [0, 1]))
    # TypeError: argument 'data': expected integers for axis 0, got float64
SparseTensor([[True]])  # TypeError: expected integers for axis 0, got bool
SparseMatrix(([0], [0, 1]))
    # ValueError: argument 'data': expected arrays of one length, got lengths [1, 2]
SparseTensor([[[0]], [[1]]])
    # ValueError: argument 'coords': expected one dimension for axis 0, got shape (1, 1)
SparseTensor([])  # ValueError: expected at least one axis, got none
SparseTensor(np.arange(3))  # ValueError: expected an (order, nnz) array .. (3,)
SparseTensor([[0, [1]]])  # TypeError: 'coords': expected an array, got
SparseMatrix(PAIR, values=[1.0])
    # ValueError: SparseMatrix: argument 'values': expected shape (2,), got (1,)
SparseMatrix(sp.csr_array(np.eye(2) * 1j))
    # TypeError: argument 'values': expected one of float16, .. , got complex128
SparseTensor([[0]], torch.ones(1).to_sparse())
    # TypeError: argument 'values': expected a dense array, got a sparse one
SparseTensor(PAIR, shape=(2, 3, 4))
    # ValueError: SparseTensor: argument 'shape': expected 2 integers >= 0, got (2, 3, 4)
SparseTensor([[]], shape=(-1,))  # ValueError: 1 integers >= 0
SparseTensor([[]], shape=(1.5,))  # ValueError: 1 integers >= 0
SparseMatrix(PAIR, 3)  # ValueError: expected 2 integers >= 0, got 3
SparseMatrix(sp.eye_array(3), (3, 4))
    # ValueError: argument 'shape': expected (3, 3), the shape of argument 'data', got (3, 4)
SparseMatrix(sp.eye_array(3), values=[1, 2, 3])
    # ValueError: argument 'values': expected none beside scipy
SparseMatrix(SparseMatrix(PAIR), values=[1, 2])  # ValueError: with_values
SparseMatrix(SparseMatrix(PAIR), (9, 9))  # ValueError: expected (2, 3), got
SparseMatrix(sp.coo_array(np.ones((2, 2, 2))))
    # ValueError: SparseMatrix: expected 2 axes, got shape (2, 2, 2); see SparseTensor
SparseMatrix(SparseTensor(np.zeros((3, 1), int)))  # ValueError: expected 2 axes
SparseMatrix(np.eye(3))
    # ValueError: expected a sparse matrix or an edge_index .. , got shape (3, 3); see .. from_dense
SparseMatrix(torch.eye(3))  # ValueError: see .. from_dense
SparseMatrix.from_dense(sp.eye_array(3))
    # TypeError: from_dense: argument 'array': expected a dense array, got scipy.dia_array
SparseTensor.from_dense(3)  # ValueError: at least one axis
SparseMatrix("a.mtx")
    # ValueError: SparseMatrix: argument 'data': a.mtx: no such file; a graph is cora,
SparseTensor(3)  # TypeError: SparseTensor: argument 'coords': .. , got builtins.int
SparseMatrix.from_edge_index(np.zeros((3, 2), int))
    # ValueError: from_edge_index: argument 'edge_index': .. of shape (2, E), got shape (3, 2)
SparseMatrix.from_edge_index(np.ones((2, 2)))
    # TypeError: argument 'edge_index': expected integers for axis 0, got float64
SparseMatrix.from_edge_index([[0], [0]], rows="x")
    # ValueError: argument 'rows': expected 'target' or 'source', got 'x'
SparseMatrix.from_csr([0, 2, 1, 2], [0, 1], shape=(3, 3))
    # StructureError: from_csr: argument 'indptr': expected to start at 0, never to decrease and to
        end at 2
SparseMatrix.from_csr([0, 1], [0, 1])  # StructureError: end at 2, got 0 to 1
SparseMatrix.from_csr([0, 2], [0, 1], shape=(3, 3))
    # StructureError: argument 'indptr': expected shape (4,), got (2,)
SparseMatrix.from_csr([0, 2], [0, 3], shape=(1, 3))
    # StructureError: argument 'indices': expected integers in [0, 3), got 3 at position 1
SparseMatrix.from_csr([0, 1], [0.5])
    # TypeError: argument 'indices': expected integers, got float64
SparseTensor(torch.ones(2, 3, 4).to_sparse(2))
    # ValueError: without batch or dense dimensions, got layout coo, shape (2, 3, 4), 1 dense
SparseTensor(torch.ones(2, 3, 4).to_sparse_csr())
    # ValueError: argument 'coords': .. without batch or dense dimensions, got layout csr
SparseMatrix(PAIR).to("csr")
    # TypeError: SparseMatrix.to: argument 'format': expected a Format, such as CSR(), or a rule,
        got
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
