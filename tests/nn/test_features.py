"""Dense features that are nearly all zero: multiplied as sparse ones, and when they are not."""

import gc

import pytest
import torch

from sparsetir import ops
from sparsetir.nn import GATConv, GCNConv, RGCNConv, SAGEConv, linear
from sparsetir.nn.linear import as_sparse
from sparsetir.ops import Operand, spmm

NODES, FEATURES = 512, 128
LAYERS = [GCNConv, SAGEConv, GATConv]


def words(density=0.01, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(NODES, FEATURES, dtype=dtype)
    return x * (torch.rand(NODES, FEATURES) < density)


def edges():
    return torch.randint(0, NODES, (2, 3000))


def test_made_once():
    x = words()
    sparse = as_sparse(x)
    assert isinstance(sparse, Operand) and as_sparse(x) is sparse
    assert torch.equal(spmm(sparse, torch.eye(FEATURES, dtype=x.dtype)), x)


def test_layers_do_what_they_are_told(monkeypatch):
    x, graph, inputs = words(), edges(), []
    monkeypatch.setattr(linear, "as_sparse", lambda x: inputs.append(x) or x)
    for layer in LAYERS:
        layer(FEATURES, 3).double()(x, graph)
        assert not inputs
        layer(FEATURES, 3, sparse_features=True).double()(x, graph)
        assert inputs
        inputs.clear()
    with pytest.raises(TypeError, match="RGCNConv: got an unexpected keyword .* 'sparse_features'"):
        RGCNConv(FEATURES, 3, 2, sparse_features=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_results_and_gradients_stay(layer):
    x, graph = words(), edges()
    torch.manual_seed(1)
    model, results = layer(FEATURES, 3, sparse_features=True).double(), []
    dense = layer(FEATURES, 3).double()
    dense.load_state_dict(model.state_dict())
    for each in (dense, model, model):
        each.zero_grad()
        out = each(x, graph)
        out.sin().sum().backward()
        results.append([out, *(p.grad.clone() for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_known_from_inference_and_used_in_training():
    x, graph, layer = words(), edges(), GCNConv(FEATURES, 3, sparse_features=True).double()
    with torch.inference_mode():
        outs = [layer(x, graph) for _ in range(3)]
    out = layer(x, graph)
    torch.testing.assert_close(out, outs[0])
    out.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), float(NODES), dtype=x.dtype))


@pytest.mark.parametrize("write", ["torch", "data", "numpy"])
def test_what_is_written_is_seen(write):
    """Writes by torch, and unnoticed ones, to zeros, or by exchanging columns."""
    x, graph = words(dtype=torch.float32), edges()
    layer = SAGEConv(FEATURES, 3, sparse_features=True)
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


def infinite():
    x = words()
    x[3, 4] = torch.nan
    return x


def with_gradient():
    return words().requires_grad_()


def in_inference():
    with torch.inference_mode():
        return words()


@pytest.mark.parametrize("make", [infinite, with_gradient, in_inference], ids=lambda f: f.__name__)
def test_what_stays_dense(make):
    x = make()
    assert as_sparse(x) is x and as_sparse(x) is x


def test_compiled_code_does_not_ask():
    x, layer = words(), GCNConv(FEATURES, 3, sparse_features=True).double()
    for _ in range(3):
        layer(x, edges())
    torch.compiler.reset()
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    graph = edges()
    out = torch.compile(layer, fullgraph=True, backend=backend)(x, graph)
    torch.testing.assert_close(out, layer(x, graph))
    assert sum("spmm" in name for name in targets) == 1


def test_they_are_in_the_one_cache_while_they_live():
    ops.clear_cache()
    x = words()
    before = ops.cache_info()
    as_sparse(x)
    info = ops.cache_info()
    assert info["entries"] == before["entries"] + 1
    assert info["bytes"] >= x.count_nonzero() * (x.itemsize + 8)
    assert as_sparse(x) is as_sparse(x)
    del x
    gc.collect()
    assert ops.cache_info() == {**before, "misses": info["misses"]}
