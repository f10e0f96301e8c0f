"""`torch.compile(model, backend="sparsetir")`: layers in both directions, edges that change,
what is left to torch."""

import pytest
import torch

pytest.importorskip("torch_geometric")

from graph_models import EDGES, FEATURES, MODELS, NODES, edges, gradients, made  # noqa: E402

from sparsetir.graph.backend import Backend  # noqa: E402

CHEAP = {"gate", "distance", "GCN", "SAGE max", "GAT", "Transformer"}
# What is computed for each edge by a product with weights stays a gather.
LEFT = {"CG", "EdgeConv", "PNA"}


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(model):
    backend = Backend()
    return torch.compile(model, backend=backend), backend


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in CHEAP else pytest.mark.slow) for n in MODELS]
)
def test_layers(name):
    model, args = made(name)
    call, backend = compiled(model)
    expected = gradients(model, model, *args)
    for _ in range(2):
        assert_close(gradients(call, model, *args), expected)
    with torch.no_grad():
        assert_close([call(*args)], [model(*args)])
    assert all(graph.found for graph in backend.graphs)
    assert name in LEFT or not any(graph.left for graph in backend.graphs)
    assert all(p.runs == 1 for graph in backend.graphs for p in graph.preludes)
