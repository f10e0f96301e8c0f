"""Layers on graphs: what they remember of them, without edges, compiled and exported."""

import shutil

import pytest
import torch

from sparsetir import nn, ops
from sparsetir.nn import GCNConv, RGCNConv, SAGEConv

N, E, F = 20, 90, 6
LAYERS = {
    "gcn": lambda: nn.GCNConv(F, 3),
    "gcn cached": lambda: nn.GCNConv(F, 3, cached=True),
    "gcn reversed": lambda: nn.GCNConv(F, 3, flow="target_to_source"),
    "sage": lambda: nn.SAGEConv(F, 3),
    "gat": lambda: nn.GATConv(F, 3),
    "rgcn": lambda: nn.RGCNConv(F, 3, 2),
}


@pytest.fixture(autouse=True)
def _empty_cache():
    torch.manual_seed(0)
    ops.clear_cache()
    yield
    ops.clear_cache()


def gradients(layer, *args):
    """The result of a layer and the gradients of its parameters, once."""
    layer.zero_grad()
    out = layer(*args)
    out.sin().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize(
    "name, layout",
    [*((name, "edges") for name in LAYERS), ("gcn", "csr"), ("gcn cached", "csr"), ("gat", "csr")],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_first_graph_seen_in_inference_mode(name, layout):
    layer, x, graph = LAYERS[name]().double(), torch.randn(N, F).double(), torch.randint(N, (2, E))
    if layout == "csr":
        graph = torch.eye(N).double().to_sparse_csr()
    args = (x, graph, torch.randint(2, (E,))) if name == "rgcn" else (x, graph)
    with torch.inference_mode():
        layer(*args)
    grads = gradients(layer, *args)
    ops.clear_cache()
    fresh = LAYERS[name]().double()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(grads, gradients(fresh, *args))


def test_learnt_weights_first_seen_in_inference_mode():
    layer, x, edges = nn.GCNConv(F, 3), torch.randn(N, F), torch.randint(N, (2, E))
    weight = torch.rand(E, requires_grad=True)
    with torch.inference_mode():
        layer(x, edges, weight)
    layer(x, edges, weight).sin().sum().backward()
    assert weight.grad.any()


def scaled(weight):
    weight.data.mul_(torch.linspace(0, 2, E))


def by_numpy(weight):
    weight.numpy()[:9] = 3


def in_inference_mode(weight):
    with torch.inference_mode():
        weight.mul_(torch.linspace(0, 2, E))


@pytest.mark.parametrize("write", [scaled, by_numpy, in_inference_mode])
def test_weights_that_are_written_to_unseen(write):
    layer, x, edges = nn.GCNConv(F, 3), torch.randn(N, F), torch.randint(N, (2, E))
    with torch.inference_mode(write is in_inference_mode):
        weight = torch.rand(E)
    before = layer(x, edges, weight)
    write(weight)
    after = layer(x, edges, weight)
    torch.testing.assert_close(after, layer(x, edges.clone(), weight.clone()))
    assert not torch.allclose(after, before)


def test_two_weights_by_turns():
    layer, x, edges = nn.GCNConv(F, 3), torch.randn(N, F), torch.randint(N, (2, E))
    weights = [torch.rand(E), torch.rand(E)]
    want = [layer(x, edges.clone(), weight) for weight in weights]
    for i in (0, 1, 1, 0):
        assert torch.equal(layer(x, edges, weights[i]), want[i])


NONE = torch.zeros(2, 0, dtype=torch.int64)


@pytest.mark.parametrize("nodes, loops", [(3, False), (0, False), (0, True)])
def test_gat(nodes, loops):
    layer = nn.GATConv(4, 2, heads=3, add_self_loops=loops)
    out = layer(torch.randn(nodes, 4), NONE)
    assert out.shape == (nodes, 6) and not out.any()
    out.sum().backward()


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2}, {"aggr": "max"}])
@pytest.mark.parametrize("features", [4, 64])  # sums first, and weights first
def test_gradients_of_rgcn_are_zeros(features, options):
    layer = nn.RGCNConv(features, 2, 3, root_weight=False, bias=False, **options)
    out = layer(torch.randn(3, features), NONE, NONE[0])
    assert out.shape == (3, 2) and not out.any()
    out.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape and not layer.weight.grad.any()


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
@pytest.mark.default("aot_eager-SAGEConv")
def test_compiled_without_graph_breaks(backend, layer):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    torch.compiler.reset()
    relational = layer is RGCNConv
    model = RGCNConv(FEATURES, 8, 3, num_bases=2) if relational else Model(layer)
    args = (features(), graph(), *[torch.arange(90) % 3] * relational)
    compiled, parameters = (
        torch.compile(model, fullgraph=True, backend=backend),
        list(model.parameters()),
    )
    for _ in range(2):
        both = compiled(*args), model(*args)
        torch.testing.assert_close(*both)
        gradients = [torch.autograd.grad(out.square().sum(), parameters) for out in both]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_exported():
    model, x, edges = Model(GCNConv), features(), graph()
    exported = torch.export.export(model, (x, edges)).module()
    torch.testing.assert_close(exported(x, edges), model(x, edges))
