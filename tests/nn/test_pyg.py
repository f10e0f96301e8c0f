"""PyG's own layers on our kernels."""

import gc

import pytest
import torch

from sparsetir import ops
from sparsetir.nn import accelerate

pyg = pytest.importorskip("torch_geometric.nn")
import torch_geometric.utils  # noqa: E402
from torch_geometric.utils import to_torch_csr_tensor  # noqa: E402

import sparsetir.nn.pyg as adapter  # noqa: E402

NODES, FEATURES = 15, 6
LAYERS = {
    "GCNConv": lambda: pyg.GCNConv(FEATURES, 4),
    "SAGEConv": lambda: pyg.SAGEConv(FEATURES, 4),
    "SAGEConv max": lambda: pyg.SAGEConv(FEATURES, 4, aggr="max"),
    "GraphConv": lambda: pyg.GraphConv(FEATURES, 4),
    "GINConv": lambda: pyg.GINConv(torch.nn.Linear(FEATURES, 4)),
    "SGConv": lambda: pyg.SGConv(FEATURES, 4, K=2),
    "APPNP": lambda: pyg.APPNP(K=2, alpha=0.1),
    "TAGConv": lambda: pyg.TAGConv(FEATURES, 4, K=2),
    "LGConv": lambda: pyg.LGConv(),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch):
    """Counts products of ours."""
    found = []
    product = adapter.spmm

    def counted(*arguments, **options):
        found.append(arguments)
        return product(*arguments, **options)

    monkeypatch.setattr(adapter, "spmm", counted)
    return found


def graph(weighted=False):
    edges = torch.unique(torch.randint(0, NODES, (2, 60)), dim=1)
    return edges, torch.rand(edges.shape[1]) if weighted else None


def gradients(layer, x, *graph):
    """The result, and gradients of the features and parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, *graph)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("kind", ["edges", "csr"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_layers_call_our_kernels_and_give_the_same(name, kind, calls):
    layer, x = LAYERS[name](), torch.randn(NODES, FEATURES)
    edges, _ = graph()
    given = edges if kind == "edges" else to_torch_csr_tensor(edges.flip(0), size=NODES)
    expected = gradients(layer, x, given)
    assert not calls
    with accelerate():
        found = gradients(layer, x, given)
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    torch.testing.assert_close(gradients(layer, x, given), expected)
    assert not calls


def test_weights_of_edges_have_gradients(calls):
    layer, x = pyg.GraphConv(FEATURES, 4), torch.randn(NODES, FEATURES)
    edges, weight = graph(weighted=True)
    found = []
    for accelerated in (False, True):
        patch = accelerate() if accelerated else None
        w = weight.clone().requires_grad_()
        layer(x, edges, w).square().sum().backward()
        found.append(w.grad)
        if patch:
            patch.undo()
    assert len(calls) == 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_weights_of_a_wider_type(calls):
    layer, x = pyg.GCNConv(FEATURES, 4, normalize=False), torch.randn(NODES, FEATURES)
    edges, weight = graph(weighted=True)
    expected = layer(x, edges, weight.double())
    with accelerate():
        torch.testing.assert_close(layer(x, edges, weight.double()), expected)
    assert expected.dtype == torch.float64 and len(calls) == 1


def test_bipartite_with_a_size(calls):
    layer = pyg.SAGEConv((FEATURES, 3), 4)
    x = (torch.randn(NODES, FEATURES), torch.randn(5, 3))
    edges = torch.stack([torch.randint(0, NODES, (30,)), torch.randint(0, 5, (30,))])
    expected = layer(x, edges), layer((x[0], None), edges, size=(NODES, 5))
    with accelerate():
        found = layer(x, edges), layer((x[0], None), edges, size=(NODES, 5))
    assert len(calls) == 2
    torch.testing.assert_close(found, expected)


def test_a_layer_made_within(calls):
    class Mine(pyg.SAGEConv):
        """A class that PyG has not seen before."""

    x, (edges, _) = torch.randn(NODES, FEATURES), graph()
    with accelerate():
        layer = Mine(FEATURES, 4)
        found = layer(x, edges)
    assert calls
    calls.clear()
    torch.testing.assert_close(layer(x, edges), found)
    assert not calls


def test_other_layers_are_left_alone(calls):
    x, (edges, _) = torch.randn(NODES, FEATURES), graph()

    class Doubled(pyg.SAGEConv):
        def message(self, x_j):
            return 2 * x_j

    hooked = pyg.SAGEConv(FEATURES, 4)
    hooked.register_message_forward_hook(lambda layer, inputs, out: 3 * out)
    summed, largest = pyg.GraphConv(FEATURES, 4), pyg.GraphConv(FEATURES, 4)
    summed.aggr_module.register_forward_hook(lambda layer, inputs, out: 3 * out)
    largest.aggr_module = pyg.MaxAggregation()
    layers = [
        pyg.GATConv(FEATURES, 4), Doubled(FEATURES, 4), hooked, summed, largest,
        pyg.SAGEConv(FEATURES, 4, flow="target_to_source"), pyg.SAGEConv(FEATURES, 4, "median"),
    ]  # fmt: skip
    for layer in layers:
        expected = layer(x, edges)
        with accelerate():
            torch.testing.assert_close(layer(x, edges), expected)
    assert not calls


@pytest.mark.parametrize("name", ["message", "aggregate", "update", "message_and_aggregate"])
def test_methods_of_an_instance_are_left_alone(name, calls):
    x, (edges, _) = torch.randn(NODES, FEATURES), graph()
    layer = pyg.SAGEConv(FEATURES, 4)
    method = getattr(layer, name)
    setattr(layer, name, lambda *given, **named: 5 * method(*given, **named))
    expected = layer(x, edges)
    with accelerate():
        torch.testing.assert_close(layer(x, edges), expected)
    assert not calls


def test_entered_again(calls):
    layer, x, (edges, _) = pyg.SAGEConv(FEATURES, 4), torch.randn(NODES, FEATURES), graph()
    before = pyg.SAGEConv.propagate
    patch = accelerate()
    with patch:
        pass
    assert pyg.SAGEConv.propagate is before
    with patch:
        with patch:
            layer(x, edges)
        layer(x, edges)
    assert len(calls) == 2
    assert pyg.SAGEConv.propagate is before


def test_undo_restores_pyg():
    pyg.SAGEConv(FEATURES, 4)
    before = torch_geometric.utils.spmm, pyg.SAGEConv.propagate
    norm = pyg.conv.gcn_conv.gcn_norm
    outer = accelerate()
    with accelerate():
        assert torch_geometric.utils.spmm is not before[0]
    assert pyg.SAGEConv.propagate is not before[1]
    outer.undo()
    outer.undo()
    assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before
    assert pyg.conv.sage_conv.spmm is before[0]
    assert pyg.conv.gcn_conv.gcn_norm is pyg.conv.sg_conv.gcn_norm is norm


def test_nothing_is_kept_of_edges_that_are_made_in_each_call():
    (edges, _), x, layer = graph(), torch.rand(NODES, FEATURES), pyg.SAGEConv(FEATURES, 4)
    ops.clear_cache()
    with accelerate():
        for _ in range(3):
            out = layer(x, edges.clone())
            assert ops.cache_info()["entries"] == 0
            out.sum().backward()
            assert ops.cache_info()["entries"] == 0


@pytest.fixture
def norms(monkeypatch):
    """Counts what PyG's `gcn_norm` computes."""
    found = []
    norm_of = adapter._norm_of

    def counted(old):
        return norm_of(lambda *given, **named: found.append(given) or old(*given, **named))

    monkeypatch.setattr(adapter, "_norm_of", counted)
    return found


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"improved": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_are_kept_while_edges_and_weights_stay(weighted, options, norms):
    layer, x = pyg.GCNConv(FEATURES, 4, **options), torch.randn(NODES, FEATURES)
    (edges, weight), others = graph(weighted), graph(weighted)
    ops.clear_cache()

    def check(*given):
        expected = gradients(layer, x, *given)
        norms.clear()
        with accelerate():
            found = gradients(layer, x, *given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return len(norms)

    assert [check(edges, weight), check(edges, weight)] == [1, 0]
    edges[:, :9] = edges[:, :9].flip(1)
    assert [check(edges, weight), check(edges, weight)] == [1, 0]
    edges.numpy()[0, 4] = 3  # where torch counts no version
    assert [check(edges, weight), check(edges, weight)] == [1, 0]
    if weighted:
        weight[7] = 5
        assert [check(edges, weight), check(edges, weight)] == [1, 0]
    assert [check(*others), check(edges, weight)] == [1, 0]
    del edges, weight, others
    gc.collect()
    assert ops.cache_info()["entries"] == 0


def test_norms_of_weights_with_gradients_are_not_kept(norms):
    layer, x, (edges, weight) = pyg.GCNConv(FEATURES, 4), torch.randn(NODES, FEATURES), graph(True)
    weight.requires_grad_()
    expected = torch.autograd.grad(layer(x, edges, weight).square().sum(), weight)
    with accelerate():
        for _ in range(2):
            found = torch.autograd.grad(layer(x, edges, weight).square().sum(), weight)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(norms) == 2


def test_norms_that_were_written_to_are_made_again(norms):
    edges, _ = graph()
    with accelerate():
        norm = pyg.conv.gcn_conv.gcn_norm
        expected = [x.clone() for x in norm(edges)]
        for found in norm(edges):
            found.zero_()
        torch.testing.assert_close(list(norm(edges)), expected)
    assert len(norms) == 2


@pytest.mark.parametrize("name", ["_set_jittable_templates", "explain", "get_param_names"])
def test_a_pyg_without_what_is_needed(name, calls, monkeypatch):
    """Nothing is patched, each call says so, and the next that can succeeds."""
    layer, x, (edges, _) = pyg.SAGEConv(FEATURES, 4), torch.randn(NODES, FEATURES), graph()
    before = torch_geometric.utils.spmm, pyg.SAGEConv.propagate
    with monkeypatch.context() as other:
        other.delattr(
            type(layer.inspector) if name == "get_param_names" else pyg.MessagePassing, name
        )
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=f"accelerate: .* {torch_geometric.__version__}.*'{name}'"
            ):
                accelerate()
            assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before
    with accelerate():
        layer(x, edges)
    assert len(calls) == 1
    assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before


def test_a_failure_half_way_is_undone(monkeypatch):
    pyg.SAGEConv(FEATURES, 4)
    before = torch_geometric.utils.spmm, pyg.SAGEConv.propagate

    def fail(old):
        raise ValueError("here")

    with monkeypatch.context() as other:
        other.setattr(adapter, "_propagate_of", fail)
        with pytest.raises(ValueError, match="here"):
            accelerate()
    assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before
    with accelerate():
        assert torch_geometric.utils.spmm is not before[0]
    assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before
