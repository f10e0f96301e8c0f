"""Views that split or merge features are moved from edges to nodes."""

import pytest
import torch

from graph_models import FEATURES, NODES, edges, gradients
from sparsetir.graph.backend import Backend

HEADS = 3


class Attention(torch.nn.Module):
    """Sums of weighted neighbours; heads are split at edges, and merged there again."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce, self.a = reduce, torch.nn.Parameter(torch.rand(HEADS, FEATURES // HEADS))
        self.features = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x, edge_index):
        x, (source, target) = self.features(x), edge_index
        heads = x[source].view(-1, HEADS, FEATURES // HEADS)
        weights = (heads * x.index_select(0, target).reshape(heads.shape) * self.a).sum(-1)
        values = (heads * weights.sigmoid()[:, :, None]).view(-1, FEATURES)
        at = target[:, None].expand_as(values)
        if self.reduce == "sum":
            return torch.zeros_like(x).scatter_add(0, at, values)
        return torch.zeros_like(x).scatter_reduce(0, at, values, self.reduce, include_self=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_heads_of_edges(reduce, dtype, dynamic):
    torch.manual_seed(0)
    model, backend = Attention(reduce).to(dtype), Backend()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for count in (150, 150, 60, 0):
        x, edge_index = torch.randn(NODES, FEATURES, dtype=dtype), edges(count=count)
        expected = gradients(model, model, x, edge_index)
        for a, b in zip(gradients(compiled, model, x, edge_index), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    found = [r for graph in backend.graphs for r in graph.found]
    assert found and (reduce != "sum" or not any(graph.left for graph in backend.graphs))
    if reduce == "sum":  # no region stores features of edges
        wide = [r for r in found if r.program.reduce is None and len(r.program.result) > 1]
        assert all(r.program.result[-1] is None or r.program.summed for r in wide)
