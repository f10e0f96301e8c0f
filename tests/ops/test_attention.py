"""Attention over edges, against torch's dense attention with a mask."""

# pyright: reportAttributeAccessIssue=false

import pytest
import torch

import sparsetir
from sparsetir import ops

M, N = 7, 9


def graph(seed=0):
    """Edges in no order of a matrix whose first and last row are empty, and their mask."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(M, N, generator=rng) < 0.4
    mask[[0, -1]] = False
    row, col = mask.nonzero().t()
    return torch.stack([col, row])[:, torch.randperm(len(row), generator=rng)], mask


def operands(heads, feat, width, dtype=torch.float64):
    rng = torch.Generator().manual_seed(1)
    before = () if heads is None else (heads,)
    shapes = ((M, *before, feat), (N, *before, feat), (N, *before, width))
    made = (torch.randn(s, dtype=torch.float64, generator=rng) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in made]


def test_large_scores_infinities_and_nan():
    edges = torch.tensor([[0, 1, 0, 1, 0, 1, 2], [0, 0, 1, 1, 2, 2, 2]])
    q = torch.tensor([[1e20], [-1.0], [0.0]])
    k = torch.tensor([[1.0], [2.0], [float("nan")]])
    v = torch.tensor([[1.0], [float("inf")], [5.0]])
    found = ops.attention((edges, (3, 3)), q, k, v, scale=1.0)
    assert found[0].isinf() and found[1].isinf() and found[2].isnan()


def test_many_edges_over_threads():
    rng = torch.Generator().manual_seed(0)
    edges = torch.stack([torch.randint(0, n, (20000,), generator=rng) for n in (300, 500)])
    q, k, v = (torch.randn(n, 2, 32, generator=rng) for n in (500, 300, 300))
    A = (edges, (300, 500))
    found, before = ops.attention(A, q, k, v), sparsetir.compilations()
    scores = (q[edges[1]] * k[edges[0]]).sum(-1) * 32**-0.5
    weighted = ops.edge_softmax(A, scores)[..., None] * v[edges[0]]
    expected = torch.zeros(500, 2, 32).index_add(0, edges[1], weighted)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found, ops.attention((edges.clone(), (300, 500)), q, k, v))
    assert sparsetir.compilations() <= before + 1  # the softmax alone


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda q, k, v: (q, k[..., :2], v), ValueError, "'k'.*4 features"),
        (lambda q, k, v: (q, k[:, :1], v), ValueError, "'k'.*heads"),
    ],
)
def test_refusals(change, error, text):
    edges, _ = graph()
    with pytest.raises(error, match=text):
        ops.attention((edges, (N, M)), *change(*operands(2, 4, 4)))
