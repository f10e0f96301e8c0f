"""torch.compile and torch.export of models of two layers."""

import shutil

import pytest
import torch

from sparsetir.nn import GCNConv, RGCNConv, SAGEConv

NODES, FEATURES = 20, 6


def features():
    torch.manual_seed(0)
    return torch.randn(NODES, FEATURES)


def graph():
    return torch.randint(0, NODES, (2, 90))


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(FEATURES, 8), layer(8, 3)

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv, RGCNConv])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_without_graph_breaks(backend, layer):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    torch.compiler.reset()
    relational = layer is RGCNConv
    model = RGCNConv(FEATURES, 8, 3, num_bases=2) if relational else Model(layer)
    given = (features(), graph(), *[torch.arange(90) % 3] * relational)
    compiled, parameters = (
        torch.compile(model, fullgraph=True, backend=backend),
        list(model.parameters()),
    )
    for _ in range(2):
        both = compiled(*given), model(*given)
        torch.testing.assert_close(*both)
        gradients = [torch.autograd.grad(out.square().sum(), parameters) for out in both]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_exported():
    model, x, edges = Model(GCNConv), features(), graph()
    exported = torch.export.export(model, (x, edges)).module()
    torch.testing.assert_close(exported(x, edges), model(x, edges))
