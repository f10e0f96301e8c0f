"""Dense features that are nearly all zero: multiplied as sparse ones, and when they are not."""

import gc
import weakref

import pytest
import torch

from sparsetir.nn import GATConv, GCNConv, SAGEConv
from sparsetir.nn.features import MIN_ELEMENTS, sparse_where_known
from sparsetir.ops import Operand, spmm

NODES, FEATURES = 1024, MIN_ELEMENTS // 1024
LAYERS = [GCNConv, SAGEConv, GATConv]


def words(density=0.01, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(NODES, FEATURES, dtype=dtype)
    return x * (torch.rand(NODES, FEATURES) < density)


def edges():
    return torch.randint(0, NODES, (2, 3000))


def test_known_when_it_comes_again():
    x, layer = words(), object()
    assert sparse_where_known(x, layer) is x
    found = sparse_where_known(x, layer)
    assert isinstance(found, Operand)
    assert sparse_where_known(x, layer) is found
    assert sparse_where_known(x, object()) is found
    assert torch.equal(spmm(found, torch.eye(FEATURES, dtype=x.dtype)), x)


def test_once_in_each_of_several_layers_is_not_again():
    x, layers = words(), [object() for _ in range(4)]
    assert all(sparse_where_known(x, layer) is x for layer in layers)


@pytest.mark.parametrize("layer", LAYERS)
def test_results_and_gradients_stay(layer):
    x, graph = words(), edges()
    model = layer(FEATURES, 3).double()
    found = []
    for _ in range(3):
        model.zero_grad()
        out = model(x, graph)
        out.sin().sum().backward()
        found.append([out, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_known_from_inference_and_used_in_training():
    x, graph, layer = words(), edges(), GCNConv(FEATURES, 3).double()
    with torch.inference_mode():
        found = [layer(x, graph) for _ in range(3)]
    out = layer(x, graph)
    torch.testing.assert_close(out, found[0])
    out.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), float(NODES), dtype=x.dtype))


@pytest.mark.parametrize("write", ["torch", "data", "numpy"])
def test_what_is_written_is_seen(write):
    """By torch, and behind its back, to where zeros were or by exchanging columns."""
    x, graph = words(dtype=torch.float32), edges()
    layer = SAGEConv(FEATURES, 3)
    for _ in range(3):
        layer(x, graph)
    new = x.flip(1) if write != "data" else words(0.02, torch.float32)
    if write == "torch":
        x.copy_(new)
    elif write == "data":
        x.data.copy_(new)
    else:
        x.numpy()[:] = new.numpy()
    expected = layer(x.clone(), graph)
    for _ in range(3):
        torch.testing.assert_close(layer(x, graph), expected)


def few_zeros():
    return words(density=0.2)


def infinite():
    x = words()
    x[3, 4] = torch.nan
    return x


def with_gradient():
    return words().requires_grad_()


def small():
    return words()[: NODES // 2]


def of_inference():
    with torch.inference_mode():
        return words()


@pytest.mark.parametrize(
    "make", [few_zeros, infinite, with_gradient, small, of_inference], ids=lambda f: f.__name__
)
def test_what_stays_dense(make):
    x, layer = make(), object()
    assert all(sparse_where_known(x, layer) is x for _ in range(4))


def test_nothing_is_kept_for_tensors_that_are_gone():
    x, layer = words(), object()
    sparse_where_known(x, layer)
    matrix = weakref.ref(sparse_where_known(x, layer).values)
    assert matrix() is not None
    del x
    gc.collect()
    assert matrix() is None


def test_compiled_code_does_not_ask():
    x, layer = words(), GCNConv(FEATURES, 3).double()
    for _ in range(3):
        layer(x, edges())
    torch.compiler.reset()
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    graph = edges()
    out = torch.compile(layer, fullgraph=True, backend=backend)(x, graph)
    torch.testing.assert_close(out, layer(x, graph))
    assert sum("spmm" in name for name in seen) == 1
