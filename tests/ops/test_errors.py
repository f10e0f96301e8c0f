"""Errors of operators and their messages."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from refusals import refusals
from sparsetir import ops

EDGES = torch.tensor([[0, 1, 2], [1, 0, 1]])
A = (EDGES, (3, 2))
ROWPTR, COL = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
B = torch.ones(3, 4)


def csr(rowptr=ROWPTR, col=COL, n=3):
    return ops.Operand(rowptr, col, 2, n)


def csc(ccol, row):
    """A (3, 2) matrix that torch has not checked."""
    return torch.sparse_csc_tensor(ccol, row, torch.ones(3), (3, 2), check_invariants=False)


def unchecked():
    """A matrix of scipy whose row pointers were replaced."""
    matrix = sp.csr_array(np.eye(3, dtype="float32"))
    matrix.indptr = matrix.indptr + 1
    return matrix


CSR = torch.sparse_csr_tensor(ROWPTR, COL, torch.ones(3), (2, 3))
NESTED = torch.nested.nested_tensor([B[0], B[1]])


test_refusals = refusals(
    """
ops.spmm(A, torch.ones(3))  # ValueError: 'B': expected 2 dimensions, or 3 with heads, got shape
ops.spmm(A, B, values=torch.ones(4))  # ValueError: 'values': expected shape (3,) or (3 .. got (4,)
ops.spmm(A, torch.ones(3, 2, 4), values=torch.ones(3, 5))  # ValueError: 'values': .. got (3, 5)
ops.spmm(A, B, "prod")  # ValueError: 'reduce': expected sum, add, mean, max, amax .. got 'prod'
ops.spmm(CSR, B.double())  # TypeError: spmm: argument 'A': expected float64 as the other operand
ops.spmv(CSR, B[:, 0].double())  # TypeError: spmv: argument 'A': expected float64 as the other
ops.spmm(CSR, B, values=torch.ones(3).double())  # TypeError: 'values': expected float32
ops.spmm((torch.tensor([0, 1]), COL), B)  # ValueError: 'A': expected arrays of one length, got
ops.spmm(unchecked(), B)  # ValueError: spmm: argument 'A': index pointer should start with 0
ops.spmm(sp.coo_array(np.ones(3)), B)  # ValueError: 'A': expected 2 axes .. (3,); see SparseTensor
ops.spmm(A, NESTED)  # TypeError: spmm: argument 'B': expected a dense tensor, got a nested one
ops.spmm(A, B, values=NESTED)  # TypeError: 'values': expected a dense tensor, got a nested one
ops.gspmm(A, "copy_u", "sum", NESTED)  # TypeError: 'u': expected a dense .. got a nested one
ops.attention(A, NESTED, B, B)  # TypeError: 'q': expected a dense tensor, got a nested one
ops.prepare(EDGES, "3")  # TypeError: prepare: argument 'size': expected an integer, got '3'
ops.spmm([1, 2], B)  # TypeError: spmm: argument 'A': expected a sparse matrix of scipy or torch, a
ops.spmm(torch.ones(3, 3), B)  # ValueError: 'A': expected a sparse matrix or an edge_index of shape
ops.spmm(EDGES.float(), B)  # TypeError: 'A': expected an edge_index of int32 or int64, got float32
ops.spmm(EDGES.to(torch.int8), B)  # TypeError: expected an edge_index of int32 or int64, got int8
ops.spmm(EDGES.float().requires_grad_(), B)  # TypeError: got float32 that requires a gradient: a
ops.spmm((EDGES, "3"), B)  # TypeError: spmm: argument 'A': expected an integer, got '3'
ops.spmm((EDGES, (2, 2)), torch.ones(2, 4))  # IndexError: 'A': expected each source to be at least
ops.spmm((EDGES, (3, 1)), B)  # IndexError: 'A': expected each target to be at least 0 and less than
ops.spmm((EDGES - 1, (3, 2)), B)  # IndexError: each source .. less than 3, got -1
ops.spmm(csr(col=COL + 1), B)  # IndexError: 'col': expected each index to be at least 0 and less
ops.spmm(csr(rowptr=torch.tensor([0, 4, 3])), B)  # StructureError: 'rowptr': expected not to
ops.spmm(csr(rowptr=ROWPTR + 1), B)  # StructureError: 'rowptr': expected to go from 0 .. got 1 to 4
ops.spmm(csr(col=COL.float()), B)  # TypeError: 'col': expected int32 or int64, got float32
ops.spmm(csr(col=COL.float().requires_grad_()), B)  # TypeError: 'col': expected int32 or int64, got
ops.spmm(csr(col=COL.int()), B)  # TypeError: 'col': expected int64 as 'rowptr', got int32
ops.structure_of(ROWPTR.to("meta"), COL, 3)  # StructureError: 'col': expected to be on .. got cpu
ops.structure_of(torch.tensor(0), COL, 3)  # StructureError: 'rowptr': expected shape (m + .. got ()
ops.structure_of(ROWPTR, torch.zeros(3, 2, dtype=torch.int64), 3)
    # StructureError: 'edges': expected shape (2, nnz), got (3, 2)
ops.sddmm(A, torch.ones(2, 4), torch.ones(3, 5))  # ValueError: 'Y': expected shape (3 .. got (3, 5)
ops.spmm(torch.ones(2, 3, 3).to_sparse_csr(), B)  # ValueError: expected a sparse matrix without
ops.spmm(csr(rowptr=[0, 1, 3]), B)  # TypeError: 'A.rowptr': expected a tensor, got list
ops.spmm(csr()._replace(m=3), B)  # ValueError: 'A.rowptr': expected shape (4,) for 3 rows, got (3,)
ops.spmm((EDGES, (None, 3)), B)  # TypeError: 'A': expected an integer, got None
ops.spmm((EDGES, (3, 3, 3)), B)  # ValueError: expected (edge_index, size) with size = (sources
ops.spmm((EDGES, (3.0, 3.0)), B)  # TypeError: an integer, got 3.0
ops.spmm((EDGES, True), B)  # TypeError: an integer, got True
ops.spmm((EDGES, (3, -1)), B)  # ValueError: spmm: argument 'A': expected 0 or .. got -1
ops.spmm((EDGES, 2**63), B)  # ValueError: 'A': expected less than 2**63, got
ops.spmm((EDGES, 3), B, values=torch.ones(3, 1))
    # ValueError: 'values': expected shape (3,), as values.flatten(), .. 'B' of shape (n, 1, feat)
ops.spmm((EDGES, 3), B, "max", torch.ones(3, 1))  # ValueError: 'values': expected shape (3,), as
ops.spmv((EDGES, 3), B[:, 0], values=torch.ones(3, 1))
    # ValueError: 'values': expected shape (3,), as values.flatten(), or .. 'x' of shape (n, 1), got
ops.edge_softmax(EDGES.to("meta"), torch.ones(3, device="meta"))
    # ValueError: edge_softmax: argument 'A': expected (edge_index, size) for edges without
ops.structure_of(ROWPTR, COL, -1)  # ValueError: 'n': expected 0 or more, got -1
ops.structure_of(ROWPTR, COL, "3")  # TypeError: 'n': expected an integer, got '3'
ops.limit_cache(1.5)  # TypeError: 'entries': expected an integer, got 1.5
ops.spmm(csc(ROWPTR + 1, torch.tensor([1, 0, 1])), torch.ones(2, 4))
    # StructureError: spmm: argument 'A.ccol_indices()': expected to go from 0 to nnz = 3
ops.spmm(csc(ROWPTR, COL + 1), torch.ones(2, 4))  # IndexError: 'A.row_indices()': expected each
ops.edge_softmax((EDGES, 2), torch.ones(3))  # IndexError: 'A': expected each source
ops.gspmm(A, ["copy_u"], u=B)  # ValueError: gspmm: argument 'op': expected one of
ops.segment_reduce(B, [0, 3])  # TypeError: 'rowptr': expected a tensor, got list
ops.segment_reduce(B, torch.tensor(3))  # ValueError: 'rowptr': expected shape (m + 1,), got ()
ops.segment_reduce(B, ROWPTR + 1)  # StructureError: 'rowptr': expected to go from 0 to nnz = 3
ops.attention((EDGES, 3), B, B, B, scale="2")  # TypeError: 'scale': expected a number, got str
ops.attention((EDGES, 3), B, B, B, scale=torch.ones((), requires_grad=True))
    # TypeError: attention: argument 'scale': expected a number, got Tensor
    """,
    globals(),
)


def test_the_operator_refuses_too():
    rowptr, col = ops.resolve(A)[:2]
    with pytest.raises(IndexError, match="each source to be at least 0 and less than 1, got 2"):
        torch.ops.sparsetir.spmm(rowptr, col, None, torch.ones(1, 4), "sum")
    with pytest.raises(ValueError, match=r"'c': expected shape \(2, feat\)"):
        torch.ops.sparsetir.spmm_transposed(rowptr, col, None, B, 3)


@pytest.mark.parametrize("size", [np.int64(3), (np.int32(3), np.uint8(3))])
def test_sizes_by_numpy(size):
    assert torch.equal(ops.spmm((EDGES, size), B), ops.spmm((EDGES, 3), B))
    assert ops.structure_of(ROWPTR, COL, np.int64(3)).shape == (2, 3)


def test_a_scale_by_numpy():
    x = torch.randn(3, 4)
    result = ops.attention((EDGES, 3), x, x, x, scale=np.float32(2))
    assert torch.equal(result, ops.attention((EDGES, 3), x, x, x, scale=2))


def test_a_trusted_pattern_needs_values():
    """Calls of `plan`, which takes the pattern alone."""
    pattern = ops.structure_of(ROWPTR, COL, 3).pattern
    plan = sparsetir.plan("spmm", pattern, 4)
    with pytest.raises(TypeError, match="spmm: argument 'values': expected an array, got None"):
        plan(B)
    assert plan(B, values=torch.ones(3)).tolist() == [[1] * 4, [2] * 4]
