"""Softmax and attention over the elements of rows, against torch's of dense matrices."""

# pyright: reportAttributeAccessIssue=false

import pytest
import torch

from refusals import refuse
from sparsetir import ops

M, N = 7, 9


def graph(seed=0, density=0.4):
    """Edges in no order of a matrix whose first and last row are empty."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(M, N, generator=rng) < density
    mask[[0, -1]] = False
    row, col = mask.nonzero().t()
    shuffled = torch.randperm(len(row), generator=rng)
    return torch.stack([col, row])[:, shuffled]


def scores(edges, *heads, dtype=torch.float64, seed=1):
    rng = torch.Generator().manual_seed(seed)
    x = 10 * torch.randn(edges.shape[1], *heads, dtype=torch.float64, generator=rng)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_sparse_softmax_of_torch(layout):
    """A matrix's own values, with gradients; rows without elements stay so."""
    edges = graph()
    dense = torch.zeros(M, N).index_put((edges[1], edges[0]), scores(edges).detach().float())
    A = dense.to_sparse(layout=layout)
    values = A.values().clone().requires_grad_()
    result = ops.sparse_softmax(A)
    assert torch.equal(result, ops.sparse_softmax(A, values))
    expected = torch.sparse.softmax(dense.to_sparse_coo().coalesce(), 1).values()
    torch.testing.assert_close(result, expected)
    ops.sparse_softmax(A, values).pow(2).sum().backward()
    assert values.grad.abs().max() > 0


def test_extremes():
    """Infinities and NaN give torch's results; no overflow; tiny weights are 0 or right."""
    nan, inf = float("nan"), float("inf")
    rows = [[0.0, -inf, 1], [-inf, -inf, -inf], [inf, 0, 1], [nan, 0, 1], [1e30, -1e30, 1e30],
            [0, -86.9, -120], [-1e38, -3e38, -1e38]]  # fmt: skip
    x = torch.tensor(rows)
    A = torch.ones_like(x).to_sparse_csr()
    result = ops.sparse_softmax(A, x.flatten()).view(x.shape)
    torch.testing.assert_close(result, x.softmax(1), equal_nan=True, atol=1e-37, rtol=1e-5)


def test_refusals():
    A, (q, k, v) = (graph(), (N, M)), operands(2, 4, 4)
    x = scores(A[0]).detach()
    refuse(
        """
        ops.sparse_softmax(A)  # TypeError: 'values' .. without values
        ops.edge_softmax((A[0].float(), A[1]), x)  # TypeError: float32
        ops.edge_softmax(A, x, norm_by="both")  # ValueError: 'norm_by': expected .. got 'both'
        ops.attention(A, q, k[..., :2], v)  # ValueError: 'k' .. 4 features
        ops.attention(A, q, k[:, :1], v)  # ValueError: 'k' .. heads
        """,
        locals(),
        globals(),
    )


def operands(heads, feat, width, dtype=torch.float64):
    rng = torch.Generator().manual_seed(1)
    before = () if heads is None else (heads,)
    shapes = ((M, *before, feat), (N, *before, feat), (N, *before, width))
    tensors = (torch.randn(s, dtype=torch.float64, generator=rng) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in tensors]


def test_large_scores_infinities_and_nan():
    edges = torch.tensor([[0, 1, 0, 1, 0, 1, 2], [0, 0, 1, 1, 2, 2, 2]])
    q = torch.tensor([[1e20], [-1.0], [0.0]])
    k = torch.tensor([[1.0], [2.0], [float("nan")]])
    v = torch.tensor([[1.0], [float("inf")], [5.0]])
    result = ops.attention((edges, (3, 3)), q, k, v, scale=1.0)
    assert result[0].isinf() and result[1].isinf() and result[2].isnan()
