"""Sparse matrices and tensors of all kinds as operands: what they are taken for, gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import sparsetir
from ops_common import SHAPE, cases, compressed, dense, expected_sddmm
from programs import PROGRAMS
from refusals import refusals
from sparsetir import ops

CASES = cases()
M, N = SHAPE
D = dense()
B = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc")


@pytest.mark.parametrize("kind", [*LAYOUTS, "csr int32", "matrix"])
def test_own_values(kind):
    torch.testing.assert_close(ops.spmm(CASES[kind].A, B), D @ B)


@pytest.mark.parametrize("kind", CASES)
def test_resolve(kind):
    """Elements, in the order of A's values."""
    case = CASES[kind]
    rowptr, col, m, n, _ = ops.resolve(case.A, shape=SHAPE)
    assert (m, n) == SHAPE and len(rowptr) == m + 1 and rowptr.dtype == col.dtype
    assert torch.equal(rowptr.diff().long(), torch.bincount(case.rows, minlength=m))
    structure = ops.structure_of(rowptr, col, n)
    assert torch.equal(structure.arranged(case.rows), structure.rows.long())
    assert torch.equal(structure.arranged(case.cols), structure.col.long())
    again = ops.resolve(case.A, shape=SHAPE)
    assert ops.structure_of(again.rowptr, again.col, n) is structure


@pytest.mark.parametrize("kind", CASES)
def test_results_come_in_the_order_of_the_values(kind):
    """The results of sddmm fit spmm, for every kind."""
    case = CASES[kind]
    X = torch.randn(M, 3)
    result = ops.sddmm(case.A, X, B)
    torch.testing.assert_close(result, expected_sddmm(case, X, B))
    want = torch.zeros(SHAPE).index_put((case.rows, case.cols), result, accumulate=True) @ B
    torch.testing.assert_close(ops.spmm(case.A, B, values=result), want)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradient_through_a_sparse_tensor(kind):
    """Gradients reach the values that the tensor was made of."""
    case = CASES[kind]
    values = case.A.values().detach().clone().requires_grad_()
    if kind == "coo":
        A = torch.sparse_coo_tensor(case.A.indices(), values, SHAPE, is_coalesced=True)
    else:
        A = compressed(case.A, values)
    (grads,) = torch.autograd.grad(ops.spmm(A, B).sin().sum(), values)
    flat = values.detach().flatten().requires_grad_()
    out = torch.zeros(SHAPE).index_put((case.rows, case.cols), flat) @ B
    (want,) = torch.autograd.grad(out.sin().sum(), flat)
    torch.testing.assert_close(grads.flatten(), want)


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_gradient_of_a_sparse_tensor(kind):
    """A sparse gradient, where torch has one for a leaf of the layout."""
    A = CASES[kind].A.detach().clone().requires_grad_()
    ops.spmm(A, B).sum().backward()
    assert A.grad.layout is A.layout
    want = (torch.ones(M, 3) @ B.T) * (D != 0)
    torch.testing.assert_close(A.grad.to_dense(), want)


def test_uncoalesced():
    indices = torch.tensor([[3, 0, 3, 3], [1, 2, 0, 1]])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    A = torch.sparse_coo_tensor(indices, values, (4, N))
    torch.testing.assert_close(ops.spmm(A, B), A.to_dense() @ B)
    out = ops.spmm(A, B, "max")  # duplicates are one element, as everywhere in torch
    torch.testing.assert_close(out[3], torch.maximum(5 * B[1], 3 * B[0]))
    (grad,) = torch.autograd.grad(ops.spmm(A, B).sum(), values)
    torch.testing.assert_close(grad, B.sum(1)[indices[1]])


def test_edges():
    edges = CASES["edges"].A[0]
    want = torch.zeros(SHAPE).index_put((edges[1], edges[0]), torch.tensor(1.0), accumulate=True)
    torch.testing.assert_close(ops.spmm((edges, (N, M)), B), want @ B)
    torch.testing.assert_close(ops.spmm((edges.flip(0), (M, N)), torch.eye(M)), want.T)
    square = torch.zeros(N, N)
    square[:M] = want
    torch.testing.assert_close(ops.spmm((edges, N), B), square @ B)
    torch.testing.assert_close(ops.spmm(edges, B), square @ B)
    torch.testing.assert_close(ops.spmm(edges.t().contiguous().t(), B), square @ B)
    assert ops.resolve(edges)[2:4] == (int(edges.max()) + 1,) * 2
    rows = torch.randn(M, 3)
    assert ops.sddmm(edges, rows, B).shape == (70,)  # shape of the operands


def test_matrix():
    matrix = sparsetir.SparseMatrix(D.to_sparse())
    assert ops.spmm(matrix, B.double()).dtype == torch.float64  # of values that have no gradients
    torch.testing.assert_close(ops.spmm(matrix.astype("bfloat16"), B), D.bfloat16().float() @ B)
    first, other = (ops.resolve(x) for x in (matrix, matrix.with_values(np.ones(matrix.nnz))))
    assert first.rowptr is other.rowptr and first.col is other.col
    ones = torch.ones(matrix.nnz)
    torch.testing.assert_close(ops.spmm(matrix, B, values=ones), (D != 0).float() @ B)


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_read_only_memory_is_read_without_a_warning(name):
    A = scipy.sparse.csr_matrix(D.numpy())
    getattr(A, name).flags.writeable = False
    torch.testing.assert_close(ops.spmm(A, B), D @ B)


def test_an_operand_is_taken_as_it_is():
    operand = ops.resolve(CASES["bsr"].A)
    assert all(x is y for x, y in zip(ops.resolve(operand), operand, strict=True))
    torch.testing.assert_close(ops.spmm(operand, B), D @ B)
    values = torch.randn(len(CASES["bsr"].rows), 2)
    assert ops.resolve(operand, values).values is values
    assert ops.spmm(operand, B, values=values).shape == (M, 2, 3)


A = scipy.sparse.random(6, 5, 0.5, "csr", "float32", random_state=0)
A.sort_indices()
ROWS = np.repeat(np.arange(6), np.diff(A.indptr))
EDGES = torch.from_numpy(np.stack([A.indices, ROWS]).astype("int64"))
FEATURES = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
ONES = (A != 0).astype("float32") @ FEATURES.numpy()
SIZE = (5, 6)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out.untyped_storage().resize_(0)
    return out


@pytest.mark.parametrize("edges", [
    EDGES.numpy().astype(">i8"), np.ascontiguousarray(EDGES.numpy()[:, ::-1])[:, ::-1],
    EDGES.t().contiguous().t(), EDGES.numpy().astype("uint8"),
])  # fmt: skip
def test_edges_in_other_memory(edges: Any) -> None:
    np.testing.assert_allclose(ops.spmm((edges, SIZE), FEATURES), ONES, rtol=1e-5)
    np.testing.assert_allclose(sparsetir.plan("spmm", (edges, SIZE), 4)(FEATURES), ONES, rtol=1e-5)


def out_of_order() -> torch.Tensor:
    indices = torch.stack([EDGES[1], EDGES[0]]).flip(1)
    return torch.sparse_coo_tensor(indices, torch.from_numpy(A.data), (6, 5), is_coalesced=True)


def plan_of(matrix: Any) -> Any:
    return sparsetir.plan("spmm", matrix, 4)


def under_grad(matrix: Any, features: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: ops.spmm(matrix, x).sum())(features)


CSR = torch.sparse_coo_tensor(EDGES.flip(0), torch.from_numpy(A.data), (6, 5)).to_sparse_csr()
NESTED, OBJECTS = torch.nested.nested_tensor([*EDGES]), EDGES.numpy().astype(object)
test_refusals = refusals(
    """
ops.spmm((OBJECTS, SIZE), FEATURES)  # TypeError: 'A': expected an array of numbers that torch knows
ops.spmm((EDGES.to_sparse(), SIZE), FEATURES)  # TypeError: 'A': expected a sparse .. sparse_coo
ops.spmm((NESTED, SIZE), FEATURES)  # TypeError: spmm: argument 'A': expected .. got a nested tensor
ops.spmm(out_of_order(), FEATURES)  # ValueError: 'A': expected elements in order .. is_coalesced()
under_grad(CSR, FEATURES)  # TypeError: spmm: argument 'A': .. ops.prepare .. torch.sparse_csr
plan_of((EDGES.to("meta"), SIZE))  # TypeError: 'matrix': .. of plain numbers, got .. on meta
plan_of((NESTED, SIZE))  # TypeError: 'matrix': expected a sparse .. a pair of .. Tensor and tuple
plan_of(A)(freed(FEATURES))  # TypeError: 'b': expected .. memory, got .. storage was let go of
plan_of(A)(FEATURES, out=freed(torch.empty(6, 4)))  # TypeError: 'out': expected a .. with memory
""",
    globals(),
)


def test_transforms_take_a_compressed_tensor_that_was_prepared() -> None:
    result = under_grad(ops.prepare(CSR), FEATURES)
    torch.testing.assert_close(result, CSR.to_dense().sum(0)[:, None].expand(5, 4))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_kernels_are_not_copied(copied: Callable[[Any], Any]) -> None:
    kernel = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
    with pytest.raises(TypeError, match="^Kernel: cannot be pickled or copied; export it"):
        copied(kernel)
