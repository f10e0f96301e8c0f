"""What layers remember of graphs: not used for other ones, and fit for gradients later."""

import pytest
import torch

from sparsetir import nn, ops

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


def gradients(layer, *given):
    """Of its result and its parameters, once."""
    layer.zero_grad()
    out = layer(*given)
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
    given = (x, graph, torch.randint(2, (E,))) if name == "rgcn" else (x, graph)
    with torch.inference_mode():
        layer(*given)
    found = gradients(layer, *given)
    ops.clear_cache()
    fresh = LAYERS[name]().double()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(found, gradients(fresh, *given))


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
