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


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_without_graph_breaks(backend, layer):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    torch.compiler.reset()
    model, x, edges = Model(layer), features(), graph()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    parameters = list(model.parameters())
    for _ in range(2):
        out, expected = compiled(x, edges), model(x, edges)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), parameters),
            torch.autograd.grad(expected.square().sum(), parameters),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_exported():
    model, x, edges = Model(GCNConv), features(), graph()
    exported = torch.export.export(model, (x, edges)).module()
    torch.testing.assert_close(exported(x, edges), model(x, edges))


def test_relational_layer_compiled_without_graph_breaks():
    torch.compiler.reset()
    layer, x, edges = RGCNConv(FEATURES, 8, 3, num_bases=2), features(), graph()
    given = (x, edges, torch.arange(90) % 3)
    out, expected = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given), layer(*given)
    torch.testing.assert_close(out, expected)
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
