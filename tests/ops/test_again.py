"""Calls like one before are not checked again; what has changed since is seen all the same."""

import pytest
import torch

import sparsetir
from sparsetir import ops
from sparsetir.planning.run_plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

M, N, F = 12, 10, 4
DENSE = (torch.rand(M, N, generator=torch.Generator().manual_seed(0)) < 0.4).float()
OTHER = DENSE.roll(1, 1)


@pytest.fixture
def repeats(monkeypatch):
    """The plans of calls that took the short way."""
    plans, run = [], Plan.repeat
    monkeypatch.setattr(Plan, "repeat", lambda self, *args: plans.append(self) or run(self, *args))
    return plans


def operand(dense=DENSE):
    csr = dense.to_sparse_csr()
    parts = csr.crow_indices().clone(), csr.col_indices().clone()
    return ops.Operand(*parts, *dense.shape, csr.values().clone())


def warm(A, b, values=None):
    for _ in range(2):
        ops.spmm(A, b, values=values)


def test_the_same_again(repeats):
    b = torch.randn(N, F)
    edges = DENSE.t().nonzero().t().contiguous()  # in another order than rows
    kinds = {
        "operand": operand(), "csr": DENSE.to_sparse_csr(),
        "matrix": sparsetir.SparseMatrix(DENSE.to_sparse()), "edges": (edges, max(M, N)),
    }  # fmt: skip
    for name, A in kinds.items():
        x = b if name != "edges" else torch.cat([b, torch.zeros(M - N, F)])
        warm(A, x)
        del repeats[:]
        result = ops.spmm(A, x)
        assert len(repeats) == 1, name
        torch.testing.assert_close(result, DENSE @ b)


def test_writing_is_seen():
    A, b = operand(), torch.randn(N, F)
    warm(A, b)
    A.values.mul_(2)
    torch.testing.assert_close(ops.spmm(A, b), 2 * DENSE @ b)
    A.values.numpy()[:] = 3  # unseen by torch, but values are never kept
    b.neg_()
    torch.testing.assert_close(ops.spmm(A, b), 3 * DENSE @ b)
    A.col.copy_(operand(OTHER).col)
    torch.testing.assert_close(ops.spmm(A, b), 3 * OTHER @ b)


def test_sizes_that_change_in_place():
    A, b = operand(), torch.randn(N, F)
    warm(A, b)
    A.col.resize_(len(A.col) - 1)
    with pytest.raises(ValueError, match="'rowptr': expected to go from 0 to nnz"):
        ops.spmm(A, b)
    A = operand()
    warm(A, b)
    b.resize_(N - 1, F)
    with pytest.raises(ValueError, match=f"expected {N} rows"):
        ops.spmm(A, b)
    edges, x = DENSE.nonzero().t().contiguous(), torch.randn(M, F)
    values = torch.ones(edges.shape[1])
    warm((edges, M), x, values)
    with pytest.raises(ValueError, match="values': expected shape"):
        ops.spmm((edges, M), x, values=torch.ones(edges.shape[1] + 3))
    with pytest.raises(TypeError, match="expected float32"):
        ops.spmm((edges, M), x, values=values.double())


def test_gradients_that_are_asked_for_later(repeats):
    A, b = operand(), torch.randn(N, F)
    warm(A, b)
    b.requires_grad_()
    grad = torch.randn(M, F)
    for _ in range(3):
        b.grad = None
        ops.spmm(A, b).backward(grad)
        torch.testing.assert_close(b.grad, DENSE.t() @ grad)
    values = A.values.clone().requires_grad_()
    for _ in range(3):
        b.grad = values.grad = None
        del repeats[:]
        ops.spmm(A, b, values=values).backward(grad)
    assert len(repeats) == 3
    places = DENSE.nonzero().t()
    torch.testing.assert_close(values.grad, (grad @ b.detach().t())[places[0], places[1]])
    with torch.no_grad():
        assert not ops.spmm(A, b).requires_grad
    ops.spmm(A, b, values=values).sum().backward()  # a gradient without separate memory


def test_negative_bits(repeats):
    A, b = operand(), torch.randn(N, F)
    warm(A, b)
    torch.testing.assert_close(ops.spmm(A, torch._neg_view(b)), -(DENSE @ b))
    values = torch._neg_view(A.values)
    warm(A, b, A.values)
    torch.testing.assert_close(ops.spmm(A, b, values=values), -(DENSE @ b))
    leaf, grad = b.clone().requires_grad_(), torch.randn(M, F)
    for _ in range(2):
        leaf.grad = None
        ops.spmm(A, leaf).backward(torch._neg_view(grad))
    torch.testing.assert_close(leaf.grad, -(DENSE.t() @ grad))


def test_what_watches_is_asked_first():
    A, b = operand(), torch.randn(N, F)
    warm(A, b)
    batch = torch.randn(3, N, F)
    for dim, x in enumerate((batch, batch.transpose(0, 1))):
        result = torch.func.vmap(lambda x: ops.spmm(A, x), in_dims=dim)(x)
        torch.testing.assert_close(result, DENSE @ batch)
    assert torch.func.vmap(lambda x: ops.spmm(A, x))(batch[:0]).shape == (0, M, F)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.spmm(A, b).dtype == torch.bfloat16
    with torch.inference_mode():
        assert ops.spmm(A, b).is_inference()
    assert not ops.spmm(A, b).is_inference()
