"""What is refused, and how it is said."""

import numpy as np
import pytest
import torch

import sparsetir
from sparsetir import ops
from sparsetir.sparse_ir.errors import StructureError

EDGES = torch.tensor([[0, 1, 2], [1, 0, 1]])
A = (EDGES, (3, 2))
ROWPTR, COL = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
B = torch.ones(3, 4)


def csr(rowptr=ROWPTR, col=COL, n=3):
    return ops.Operand(rowptr, col, 2, n)


def csc(ccol, row):
    """A (3, 2) matrix that torch has not checked."""
    return torch.sparse_csc_tensor(ccol, row, torch.ones(3), (3, 2), check_invariants=False)


REFUSED = {
    "dimensions of B": (
        lambda: ops.spmm(A, torch.ones(3)),
        ValueError, "spmm: argument 'B': expected 2 dimensions, or 3 with heads, got shape",
    ),
    "number of values": (
        lambda: ops.spmm(A, B, values=torch.ones(4)),
        ValueError, r"spmm: argument 'values': expected shape \(3,\) or \(3, heads\), got \(4,\)",
    ),
    "heads": (
        lambda: ops.spmm(A, torch.ones(3, 2, 4), values=torch.ones(3, 5)),
        ValueError, r"argument 'values': expected shape \(3,\) or \(3, 2\), got \(3, 5\)",
    ),
    "reduction": (
        lambda: ops.spmm(A, B, "prod"),
        ValueError,
        "spmm: argument 'reduce': expected sum, add, mean, max, amax, min, amin, got 'prod'",
    ),
    "no matrix": (
        lambda: ops.spmm([1, 2], B),
        TypeError, "spmm: argument 'A': expected a sparse matrix of scipy or torch, a",
    ),
    "dense matrix": (
        lambda: ops.spmm(torch.ones(3, 3), B),
        ValueError, r"spmm: argument 'A': expected a sparse matrix or an edge_index of shape \(2",
    ),
    "float edges": (
        lambda: ops.spmm(EDGES.float(), B),
        TypeError, "spmm: argument 'A': expected an edge_index of int32 or int64, got float32",
    ),
    "int8 edges": (
        lambda: ops.spmm(EDGES.to(torch.int8), B),
        TypeError, "expected an edge_index of int32 or int64, got int8",
    ),
    "a pattern with a gradient": (
        lambda: ops.spmm(EDGES.float().requires_grad_(), B),
        TypeError, "got float32 that requires a gradient: a pattern has none",
    ),
    "size": (
        lambda: ops.spmm((EDGES, "3"), B),
        TypeError, "spmm: argument 'A': expected integers as sizes, got '3'",
    ),
    "source": (
        lambda: ops.spmm((EDGES, (2, 2)), torch.ones(2, 4)),
        IndexError, "spmm: argument 'A': expected each source to be at least 0 and less than 2",
    ),
    "target": (
        lambda: ops.spmm((EDGES, (3, 1)), B),
        IndexError, "spmm: argument 'A': expected each target to be at least 0 and less than 1",
    ),
    "negative source": (
        lambda: ops.spmm((EDGES - 1, (3, 2)), B), IndexError, "each source .* less than 3, got -1",
    ),
    "column": (
        lambda: ops.spmm(csr(col=COL + 1), B),
        IndexError, "spmm: argument 'col': expected each index to be at least 0 and less than 3",
    ),
    "rows that decrease": (
        lambda: ops.spmm(csr(rowptr=torch.tensor([0, 4, 3])), B),
        StructureError, "'rowptr': expected not to decrease, got 4 at 1 and 3 at 2",
    ),
    "ends of rows": (
        lambda: ops.spmm(csr(rowptr=ROWPTR + 1), B),
        StructureError, "'rowptr': expected to go from 0 to nnz = 3, got 1 to 4",
    ),
    "float columns": (
        lambda: ops.spmm(csr(col=COL.float()), B),
        TypeError, "'col': expected int32 or int64, got float32",
    ),
    "columns with a gradient": (
        lambda: ops.spmm(csr(col=COL.float().requires_grad_()), B),
        TypeError, "'col': expected int32 or int64, got float32 that requires a gradient",
    ),
    "two types of indices": (
        lambda: ops.spmm(csr(col=COL.int()), B),
        TypeError, "'col': expected int64 as 'rowptr', got int32",
    ),
    "two devices of indices": (
        lambda: ops.structure_of(ROWPTR.to("meta"), COL, 3),
        StructureError, "'col': expected to be on meta as 'rowptr', got cpu",
    ),
    "shape of rowptr": (
        lambda: ops.structure_of(torch.tensor(0), COL, 3),
        StructureError, r"'rowptr': expected shape \(m \+ 1,\), got \(\)",
    ),
    "shape of edges": (
        lambda: ops.structure_of(ROWPTR, torch.zeros(3, 2, dtype=torch.int64), 3),
        StructureError, r"'edges': expected shape \(2, nnz\), got \(3, 2\)",
    ),
    "features of X and Y": (
        lambda: ops.sddmm(A, torch.ones(2, 4), torch.ones(3, 5)),
        ValueError, r"sddmm: argument 'Y': expected shape \(3, 4\) as 'X', got \(3, 5\)",
    ),
    "batch of sparse matrices": (
        lambda: ops.spmm(torch.ones(2, 3, 3).to_sparse_csr(), B),
        ValueError, "expected a sparse matrix without batch and dense dimensions",
    ),
    "a tensor too few in an operand": (
        lambda: ops.spmm(csr(rowptr=[0, 1, 3]), B),
        TypeError, "spmm: argument 'A.rowptr': expected a tensor, got list",
    ),
    "rows of an operand": (
        lambda: ops.spmm(csr()._replace(m=3), B),
        ValueError, r"spmm: argument 'A.rowptr': expected shape \(4,\) for 3 rows, got \(3,\)",
    ),
    "no size": (
        lambda: ops.spmm((EDGES, (None, 3)), B),
        TypeError, "spmm: argument 'A': expected integers as sizes, got None",
    ),
    "three sizes": (
        lambda: ops.spmm((EDGES, (3, 3, 3)), B),
        ValueError, r"expected \(edge_index, size\) with size = \(sources, targets\) or one number",
    ),
    "float sizes": (
        lambda: ops.spmm((EDGES, (3.0, 3.0)), B), TypeError, "integers as sizes, got 3.0",
    ),
    "a truth as size": (
        lambda: ops.spmm((EDGES, True), B), TypeError, "integers as sizes, got True",
    ),
    "negative size": (
        lambda: ops.spmm((EDGES, (3, -1)), B),
        ValueError, "spmm: argument 'A': expected sizes of 0 or more, got -1",
    ),
    "edges without data or a size": (
        lambda: ops.edge_softmax(EDGES.to("meta"), torch.ones(3, device="meta")),
        ValueError, r"edge_softmax: argument 'A': expected \(edge_index, size\) for edges without",
    ),
    "columns of a structure": (
        lambda: ops.structure_of(ROWPTR, COL, -1),
        ValueError, "structure_of: argument 'n': expected sizes of 0 or more, got -1",
    ),
    "no columns of a structure": (
        lambda: ops.structure_of(ROWPTR, COL, "3"),
        TypeError, "structure_of: argument 'n': expected integers as sizes, got '3'",
    ),
    "part of an entry": (
        lambda: ops.limit_cache(1.5),
        TypeError, "limit_cache: argument 'entries': expected integers as sizes, got 1.5",
    ),
    "pointers of CSC": (
        lambda: ops.spmm(csc(ROWPTR + 1, torch.tensor([1, 0, 1])), torch.ones(2, 4)),
        StructureError, r"spmm: argument 'A.ccol_indices\(\)': expected to go from 0 to nnz = 3",
    ),
    "rows of CSC": (
        lambda: ops.spmm(csc(ROWPTR, COL + 1), torch.ones(2, 4)),
        IndexError, r"'A.row_indices\(\)': expected each index to be at least 0 and less than 3",
    ),
    "pattern of a softmax": (
        lambda: ops.edge_softmax((EDGES, 2), torch.ones(3)),
        IndexError, "edge_softmax: argument 'A': expected each source",
    ),
    "a list as message": (
        lambda: ops.gspmm(A, ["copy_u"], u=B), ValueError, "gspmm: argument 'op': expected one of",
    ),
    "a list as segments": (
        lambda: ops.segment_reduce(B, [0, 3]),
        TypeError, "segment_reduce: argument 'rowptr': expected a tensor, got list",
    ),
    "a number as segments": (
        lambda: ops.segment_reduce(B, torch.tensor(3)),
        ValueError, r"segment_reduce: argument 'rowptr': expected shape \(m \+ 1,\), got \(\)",
    ),
    "segments that do not fit": (
        lambda: ops.segment_reduce(B, ROWPTR + 1),
        StructureError, "segment_reduce: argument 'rowptr': expected to go from 0 to nnz = 3",
    ),
    "a name as scale": (
        lambda: ops.attention((EDGES, 3), B, B, B, scale="2"),
        TypeError, "attention: argument 'scale': expected a number, got str",
    ),
    "a scale with a gradient": (
        lambda: ops.attention((EDGES, 3), B, B, B, scale=torch.ones((), requires_grad=True)),
        TypeError, "attention: argument 'scale': expected a number, got Tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


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
    found = ops.attention((EDGES, 3), x, x, x, scale=np.float32(2))
    assert torch.equal(found, ops.attention((EDGES, 3), x, x, x, scale=2))


def test_a_trusted_pattern_needs_values():
    """Of `plan`, which takes the pattern alone."""
    pattern = ops.structure_of(ROWPTR, COL, 3).pattern
    plan = sparsetir.plan("spmm", pattern, 4)
    with pytest.raises(TypeError, match="spmm: argument 'values': expected an array, got None"):
        plan(B)
    assert plan(B, values=torch.ones(3)).tolist() == [[1] * 4, [2] * 4]
