"""PyG's own layers on our kernels."""

import contextlib
import gc
import sys
import threading
import time
import types
import warnings

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
    arguments_of = []
    product = adapter.spmm

    def counted(*arguments, **options):
        arguments_of.append(arguments)
        return product(*arguments, **options)

    monkeypatch.setattr(adapter, "spmm", counted)
    return arguments_of


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
    adjacency = edges if kind == "edges" else to_torch_csr_tensor(edges.flip(0), size=NODES)
    expected = gradients(layer, x, adjacency)
    assert not calls
    with accelerate():
        grads = gradients(layer, x, adjacency)
    assert calls
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    torch.testing.assert_close(gradients(layer, x, adjacency), expected)
    assert not calls


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
        results = layer(x, edges), layer((x[0], None), edges, size=(NODES, 5))
    assert len(calls) == 2
    torch.testing.assert_close(results, expected)


def test_a_layer_made_within(calls):
    class Mine(pyg.SAGEConv):
        """A class that PyG has not seen before."""

    x, (edges, _) = torch.randn(NODES, FEATURES), graph()
    with accelerate():
        layer = Mine(FEATURES, 4)
        result = layer(x, edges)
    assert calls
    calls.clear()
    torch.testing.assert_close(layer(x, edges), result)
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
    setattr(layer, name, lambda *args, **named: 5 * method(*args, **named))
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


def patched():
    """What of PyG may be replaced."""
    return (
        torch_geometric.utils.spmm,
        pyg.conv.sage_conv.spmm,
        pyg.conv.gcn_conv.gcn_norm,
        pyg.conv.sg_conv.gcn_norm,
        pyg.MessagePassing.__dict__.get("_call_impl"),
        pyg.SAGEConv.propagate,
        torch.jit.script,
    )


def test_undo_restores_pyg():
    layer, x, (edges, _) = pyg.SAGEConv(FEATURES, 4), torch.randn(NODES, FEATURES), graph()
    before = patched()
    outer = accelerate()
    with accelerate():
        layer(x, edges)
    assert all(now is not old for now, old in zip(patched(), before, strict=True))
    outer.undo()
    outer.undo()
    assert patched() == before
    with pytest.raises(KeyError), accelerate(), accelerate():
        layer(x, edges)
        raise KeyError
    assert patched() == before


@pytest.mark.parametrize("shared", [False, True])
def test_threads_that_enter_and_leave(shared, monkeypatch):
    """PyG is replaced while any thread is inside, of which one fails, and restored then."""
    layer, x, (edges, _) = pyg.SAGEConv(FEATURES, 4), torch.randn(NODES, FEATURES), graph()
    before, expected = patched(), layer(x, edges)
    patch, results = accelerate(), []
    patch.undo()

    def run(n):
        with contextlib.suppress(ZeroDivisionError):
            for step in range(40):
                with patch if shared else accelerate():
                    out = layer(x, edges)
                    assert torch_geometric.utils.spmm is not before[0]
                    1 / (n - step)
        results.append(out)

    begin = adapter._Patches.begin

    def begin_late(patches, compile_from):
        time.sleep(1e-3)  # others run
        begin(patches, compile_from)

    monkeypatch.setattr(adapter._Patches, "begin", begin_late)
    threads = [threading.Thread(target=run, args=(n,)) for n in (10, 20, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patched() == before
    torch.testing.assert_close(results, [expected] * 3)


def test_entering_again_searches_only_after_changes(calls, monkeypatch):
    """In each step of a training; modules and classes that are new since are found."""
    x, (edges, _) = torch.randn(NODES, FEATURES), graph()
    search, searches = adapter._Patches._search, []
    monkeypatch.setattr(adapter._Patches, "_search", lambda p: searches.append(1) or search(p))
    with accelerate():
        pass
    searches.clear()
    for _ in range(3):
        with accelerate():
            pass
    assert not searches

    class Derived(pyg.SAGEConv):
        pass

    with accelerate():
        pass
    layer = Derived(FEATURES, 4)  # its class has its own `propagate` from now on
    with accelerate(None):
        layer(x, edges)
    assert len(calls) == 1

    module = types.ModuleType("torch_geometric.imported_later")
    module.spmm = torch_geometric.utils.spmm
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with accelerate():
        assert module.spmm is torch_geometric.utils.spmm
        late = module.spmm
    assert module.spmm is torch_geometric.utils.spmm is not late
    late(torch.eye(NODES).to_sparse_csr(), x)  # is PyG's after the end
    assert len(calls) == 1

    def own(src, other, reduce="sum"):
        raise NotImplementedError

    monkeypatch.setattr(pyg.conv.sage_conv, "spmm", own)  # another's is left alone
    with accelerate():
        assert pyg.conv.sage_conv.spmm is own
    assert pyg.conv.sage_conv.spmm is own


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
    computed = []
    norm = adapter._gcn_norm

    def counted(old, *args, **options):
        return norm(lambda *x, **named: computed.append(x) or old(*x, **named), *args, **options)

    monkeypatch.setattr(adapter, "_gcn_norm", counted)
    monkeypatch.setattr(adapter, "_patches", adapter._Patches())
    return computed


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"improved": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_are_kept_while_edges_and_weights_stay(weighted, options, norms):
    layer, x = pyg.GCNConv(FEATURES, 4, **options), torch.randn(NODES, FEATURES)
    (edges, weight), others = graph(weighted), graph(weighted)
    ops.clear_cache()

    def check(*args):
        expected = gradients(layer, x, *args)
        norms.clear()
        with accelerate():
            grads = gradients(layer, x, *args)
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
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
            grad = torch.autograd.grad(layer(x, edges, weight).square().sum(), weight)
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert len(norms) == 2


def test_norms_that_were_written_to_are_made_again(norms):
    edges, _ = graph()
    with accelerate():
        norm = pyg.conv.gcn_conv.gcn_norm
        expected = [x.clone() for x in norm(edges)]
        for norm_part in norm(edges):
            norm_part.zero_()
        torch.testing.assert_close(list(norm(edges)), expected)
    assert len(norms) == 2


@pytest.mark.parametrize("name", ["explain", "get_param_names"])
def test_a_pyg_without_what_is_needed(name, calls, monkeypatch):
    """Nothing is patched, each call warns, and the next that can succeeds."""
    layer, x, (edges, _) = pyg.SAGEConv(FEATURES, 4), torch.randn(NODES, FEATURES), graph()
    before = torch_geometric.utils.spmm, pyg.SAGEConv.propagate
    monkeypatch.setattr(adapter, "_patches", adapter._Patches())
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

    replace = adapter._Patches._replace

    def fail(self, replacement):
        if replacement[2] == "_call_impl":
            raise ValueError("here")
        replace(self, replacement)

    with monkeypatch.context() as other:
        other.setattr(adapter._Patches, "_replace", fail)
        with pytest.raises(ValueError, match="here"):
            accelerate()
    assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before
    with accelerate():
        assert torch_geometric.utils.spmm is not before[0]
    assert (torch_geometric.utils.spmm, pyg.SAGEConv.propagate) == before


def derived(call, x):
    """Vectorised Jacobians in reverse and forward mode, and gradients of many results at once."""
    jacobian, leaf = torch.autograd.functional.jacobian, x.clone().requires_grad_()
    yield jacobian(call, x, vectorize=True)
    yield jacobian(call, x, vectorize=True, strategy="forward-mode")
    yield torch.func.jacfwd(call)(x)
    out = call(leaf)
    many = torch.eye(out.numel()).view(*out.shape, *out.shape).flatten(0, out.dim() - 1)
    (grads,) = torch.autograd.grad(out, leaf, many, is_grads_batched=True)
    yield grads.view(*out.shape, *x.shape)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv max", "GraphConv", "SGConv"])
def test_derivatives_of_many_results_at_once(name, monkeypatch):
    monkeypatch.setattr("sparsetir.ops.products._sorted", 0)
    layer, x = LAYERS[name](), torch.randn(NODES, FEATURES)
    with accelerate():
        for _ in range(18):  # the last of which are not sorted
            edges = graph()[0]
            layer(x, edges)
        expected = torch.autograd.functional.jacobian(lambda x: layer(x, edges), x)
        for jacobian in derived(lambda x: layer(x, edges), x):
            torch.testing.assert_close(jacobian, expected)


def scripted(model, *args):
    return torch.jit.script(model)


def traced(model, *args):
    return torch.jit.trace(model, args, check_trace=False)


def compiled(model, *args):
    torch.compiler.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


class Attention(torch.nn.Module):
    """A layer of another kind, whose arguments `torch.jit.script` takes."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.GATConv(FEATURES, 4)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.layer(x, edge_index, return_attention_weights=None)


CAPTURED = {**LAYERS, "LEConv": lambda: pyg.LEConv(FEATURES, 4)}  # the last is no product


@pytest.mark.parametrize("capture", [scripted, traced, compiled])
@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.default(5)
def test_what_torch_captures_is_pygs(name, capture, calls):
    model = CAPTURED[name]()
    first, second = ((torch.randn(n, FEATURES), graph()[0]) for n in (NODES, NODES + 2))
    expected = model(*second)
    with accelerate(compile_from=0):
        run = capture(model, *first)
        torch.testing.assert_close(run(*second), expected)
    torch.testing.assert_close(run(*second), expected)
    capture(CAPTURED[name](), *first)  # after the end of `accelerate`, too
    assert not calls


@pytest.mark.parametrize("layer", [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv])
@pytest.mark.default("GCNConv")
def test_layers_are_leaves_of_tracers(layer, calls):
    """Models as `to_hetero` traces them."""
    types, options = ["a", "b"], {"add_self_loops": False} if layer is not pyg.SAGEConv else {}
    ends = [("a", "b"), ("b", "a")] if layer is not pyg.GCNConv else [("a", "a"), ("b", "b")]
    relations = [(source, "to", target) for source, target in ends]
    x = {name: torch.randn(NODES, FEATURES) for name in types}
    edges = {relation: graph()[0] for relation in relations}

    class Model(torch.nn.Module):
        """Layers in a model."""

        def __init__(self):
            super().__init__()
            self.first, self.second = (layer(FEATURES, FEATURES, **options) for _ in range(2))

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    plain = pyg.to_hetero(Model(), (types, relations))
    expected = plain(x, edges)
    with accelerate(compile_from=0):
        hetero = pyg.to_hetero(Model(), (types, relations))
        hetero.load_state_dict(plain.state_dict())
        torch.testing.assert_close(hetero(x, edges), expected)
    torch.testing.assert_close(hetero(x, edges), expected)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_errors_and_warnings_of_products_are_those_of_pyg(calls):
    matrix, x = torch.rand(NODES, NODES).round(), torch.randn(NODES, FEATURES)
    with accelerate():
        spmm = torch_geometric.utils.spmm
        for convert, reduce in [("csc", "sum"), ("coo", "mean"), ("csc", "max"), ("csr", "min")]:
            sparse = getattr(matrix, f"to_sparse_{convert}")()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                spmm(sparse, x, reduce)
            texts = [str(w.message) for w in caught if w.filename == __file__]
            assert len(calls) == 1 and len(texts) == (convert != "csr")
            assert all(t.startswith("Converting sparse tensor to CSR format") for t in texts)
            calls.clear()
        spmm(matrix.to_sparse_csc(), x.requires_grad_())
        for wrong in [(matrix, x), ("cora", x), (matrix.to_sparse_csr(), x, "prod")]:
            with pytest.raises(ValueError, match="'src' must be|not supported"):
                spmm(*wrong)
