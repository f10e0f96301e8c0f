"""PyG's layers that `accelerate` compiles one by one: all on mini-batches, else no products."""

import copy
import threading

import pytest
import torch
import torch.utils.checkpoint

from machines import MACHINES
from sparsetir.graph import backend
from sparsetir.machine import assume
from sparsetir.nn import accelerate, pyg_compiled

pyg = pytest.importorskip("torch_geometric.nn")
import torch_geometric.backend  # noqa: E402
from torch_geometric import EdgeIndex  # noqa: E402

from graph_models import EDGES, FEATURES, NODES, Own, edges, gradients  # noqa: E402

PLAIN = pyg.MessagePassing.__dict__.get("_call_impl")


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    assert pyg.MessagePassing.__dict__.get("_call_impl") is PLAIN
    yield
    assert pyg.MessagePassing.__dict__.get("_call_impl") is PLAIN


@pytest.fixture
def graphs(monkeypatch):
    """Regions of the graphs that were compiled."""
    counts = []
    compile_graph = backend.compile_graph

    def noted(module, inputs, about, *rest):
        run = compile_graph(module, inputs, about, *rest)
        counts.append(len(about.found))
        return run

    monkeypatch.setattr(backend, "compile_graph", noted)
    return counts


W = torch.rand(EDGES)


def given():
    return torch.randn(NODES, FEATURES), edges()


def check(layer, *args):
    """Compare a call with PyG's."""
    expected = gradients(layer, layer, *args)
    with accelerate(compile_from=0):
        grads = gradients(layer, layer, *args)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


LAYERS = {
    "own": (lambda: Own(FEATURES, 8), (torch.rand(EDGES),)),
    "GATv2": (lambda: pyg.GATv2Conv(FEATURES, 4, add_self_loops=False), ()),
    "RGCN": (lambda: pyg.RGCNConv(FEATURES, 4, 3), (torch.randint(0, 3, (EDGES,)),)),
}


@pytest.mark.parametrize(
    "name", ["own", *(pytest.param(n, marks=pytest.mark.slow) for n in ("GATv2", "RGCN"))]
)
def test_values_and_gradients(name, graphs):
    make, more = LAYERS[name]
    check(make(), *given(), *more)
    assert len(graphs) == 1 and graphs[0] > 1


def test_a_layer_is_compiled_once(graphs):
    """Copies of layers, also where `accelerate` begins and ends, with new graphs of all sizes."""
    layer, x, weight = Own(FEATURES, 8), torch.randn(NODES, FEATURES), torch.rand(EDGES)
    for call in (layer, layer, copy.deepcopy(layer)):
        check(call, x, edges(), weight)
    assert len(graphs) == 1
    for seed in range(3):
        nodes, count = NODES + 1 + seed, 90 + seed
        check(layer, torch.randn(nodes, FEATURES), edges(seed, nodes, count), torch.rand(count))
    assert len(graphs) == 2


def test_more_layers_of_a_class_than_torch_compiles_one_function_for(graphs):
    x, edge_index, weight = *given(), torch.rand(EDGES)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for size in (8, 16):
            check_values(Own(FEATURES, size), x, edge_index, weight)
    assert len(graphs) == 2


def check_values(layer, *args):
    expected = layer(*args)
    with accelerate(compile_from=0):
        torch.testing.assert_close(layer(*args), expected, rtol=1e-4, atol=1e-5)


class Dropped(Own):
    """A layer with dropout of edges."""

    def message(self, x_i, x_j, w):
        return torch.nn.functional.dropout(super().message(x_i, x_j, w), 0.5, self.training)


def test_training_evaluation_and_dropout(graphs):
    layer, args = Dropped(FEATURES, 8), (*given(), W)
    for training in (True, False, True):
        layer.train(training)
        torch.manual_seed(3)
        expected = layer(*args)
        torch.manual_seed(3)
        with accelerate(compile_from=0):
            torch.testing.assert_close(layer(*args), expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2
    with torch.inference_mode():
        check_values(layer.eval(), *args)
    check_values(layer, *args)


@pytest.mark.slow
def test_two_kinds_of_nodes(graphs):
    x, edge_index = given()
    few = torch.stack([edge_index[0], edge_index[1] % 7])
    check_values(pyg.GATv2Conv((FEATURES, FEATURES), 4, add_self_loops=False), (x, x[:7]), few)
    assert len(graphs) == 1


class Fails(Own):
    """A layer that is more than one graph."""

    def forward(self, x, edge_index, w):
        print(end="")
        return super().forward(x, edge_index, w)


class Pointwise(pyg.MessagePassing):
    """A layer without edges."""

    def forward(self, x, edge_index):
        return x.exp()


def hooked():
    layer = Own(FEATURES, 8)
    layer.register_message_forward_hook(lambda layer, inputs, out: 3 * out)
    return layer


def hooked_outside():
    layer = Own(FEATURES, 8)
    layer.register_forward_hook(lambda layer, inputs, out: 3 * out)
    return layer


def replaced():
    layer = Own(FEATURES, 8)
    message = layer.message
    layer.message = lambda **args: 3 * message(**args)
    return layer


def explained():
    layer = Own(FEATURES, 8)
    layer.explain = True
    layer._edge_mask, layer._loop_mask, layer._apply_sigmoid = torch.rand(EDGES), None, False
    return layer


LEFT = {
    "more than a graph": lambda: (Fails(FEATURES, 8), *given(), W),
    "hooks": lambda: (hooked(), *given(), W),
    "hooks of modules": lambda: (hooked_outside(), *given(), W),
    "methods of an instance": lambda: (replaced(), *given(), W),
    "explanations": lambda: (explained(), *given(), W),
    "EdgeIndex": lambda: (pyg.GATv2Conv(FEATURES, 4), given()[0], EdgeIndex(edges())),
    "sparse": lambda: (
        pyg.GATv2Conv(FEATURES, 4, add_self_loops=False), given()[0],
        torch.sparse_coo_tensor(edges().unique(dim=1), torch.ones(edges().unique(dim=1).shape[1]),
                                (NODES, NODES)).to_sparse_csr(),
    ),
    "products": lambda: (pyg.SAGEConv(FEATURES, 4), *given()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name, graphs):
    layer, *args = LEFT[name]()
    check_values(layer, *args)
    assert not graphs


def test_hooks_that_come_later_are_called(graphs):
    layer, args = Own(FEATURES, 8), (*given(), W)
    check_values(layer, *args)
    for part in (layer.lin, layer.aggr_module):
        hook = part.register_forward_hook(lambda part, inputs, out: 3 * out)
        check_values(layer, *args)
        hook.remove()
    check_values(layer, *args)
    assert len(graphs) == 1


def test_what_has_no_region_is_left(graphs):
    args = given()
    check_values(Pointwise(), *args)
    check_values(Pointwise(), *args)
    assert set(graphs) == {0}


def test_types_and_autocast(graphs):
    """A graph each, which the same layer has in turn."""
    (x, edge_index), of_16_bits = given(), torch.bfloat16
    layer = Own(FEATURES, 8)
    for _ in range(2):
        check_values(layer, x, edge_index, W)
        with torch.autocast("cpu", of_16_bits):
            expected = layer(x, edge_index, W)
            with accelerate(compile_from=0):
                result = layer(x, edge_index, W)
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
    assert len(graphs) == 2
    args = (a.double() for a in (x, W))
    check_values(copy.deepcopy(layer).double(), next(args), edge_index, next(args))
    assert len(graphs) == 3


def test_transforms_and_global_hooks_are_left(graphs):
    layer, (x, edge_index), ran = Own(FEATURES, 8), given(), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: ran.append(args[0]))
    try:
        check_values(layer, x, edge_index, W)
    finally:
        hook.remove()
    assert ran.count(layer) == 2
    with accelerate(compile_from=0):
        torch.func.grad(lambda x: layer(x, edge_index, W).sum())(x)
    assert not graphs


def test_a_backend_that_fails_is_left(monkeypatch):
    """Forward and backward: all of it is compiled in the first call."""
    tried = []

    def fail(*args):
        tried.append(args)
        raise ArithmeticError("here")

    for name in ("reuse_memory", "rewrite"):
        with monkeypatch.context() as other:
            other.setattr(backend, name, fail)
            check(Own(FEATURES, 8), *given(), W)
    run = backend._runner

    def fail_backward(graph, about, is_edges, direct):
        return run(graph, about, is_edges, direct) if is_edges else fail(graph)

    with monkeypatch.context() as other:
        other.setattr(backend, "_runner", fail_backward)
        layer, args = Own(FEATURES, 8), (*given(), W)
        check(layer, *args)
        calls = len(tried)
        check(layer, *args)  # which is not tried again
    assert len(tried) == calls == 3


def test_backward_twice_and_writes_to_results(graphs):
    layer, args = Own(FEATURES, 8), (*given(), W)
    results = []
    for least in (None, 0):
        with accelerate(compile_from=least):
            layer.zero_grad()
            out = layer(*args)
            out.relu_()
            for _ in range(2):
                out.sum().backward(retain_graph=True)
            layer(*args).zero_()
            results.append([layer(*args), *(p.grad.clone() for p in layer.parameters())])
    assert len(graphs) == 1
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_checkpoints(graphs):
    layer, (x, edge_index) = Own(FEATURES, 8), given()

    def call(x):
        out = torch.utils.checkpoint.checkpoint(layer, x, edge_index, W, use_reentrant=False)
        return out.relu()

    expected = gradients(call, layer, x)
    with accelerate(compile_from=0):
        for _ in range(2):
            grads = gradients(call, layer, x)
            torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def test_errors_are_those_of_pyg(graphs):
    layer, (x, edge_index) = Own(FEATURES, 8), given()
    with pytest.raises(RuntimeError) as expected:
        layer(x[:, 1:], edge_index, W)
    with accelerate(compile_from=0):
        with pytest.raises(type(expected.value), match=str(expected.value)[:20]):
            layer(x[:, 1:], edge_index, W)
        layer(x, edge_index, W)
    assert len(graphs) == 1


def test_few_edges_are_not_worth_it(graphs):
    layer, args = Own(FEATURES, 8), (*given(), W)
    for least in (EDGES + 1, None):
        with accelerate(0), accelerate(compile_from=least):
            layer(*args)
    with accelerate():
        layer(*args)
    assert not graphs
    with accelerate(None), accelerate(compile_from=EDGES):
        layer(*args)
    assert len(graphs) == 1
    for wrong in (-1, 1.5, True, "all"):
        with pytest.raises(ValueError, match="accelerate: argument 'compile_from': expected 0"):
            accelerate(wrong)


def test_batches_are_worth_it_from_fewer_edges(graphs):
    """Where calls differ in their number of edges, all sizes share one graph."""
    layer = Own(FEATURES, 8)

    def call(count, training=True):
        x, weight = torch.randn(NODES, FEATURES), torch.rand(count)
        args = x, edges(count, NODES, count), weight
        layer.train(training)
        expected = gradients(layer, layer, *args)
        with accelerate(compile_from=4 * EDGES):
            grads = gradients(layer, layer, *args)
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)

    call(EDGES)
    call(EDGES)
    call(EDGES - 1, training=False)
    assert not graphs
    for count in (EDGES // 2, EDGES - 1, EDGES + 2, EDGES):
        call(count)
        assert len(graphs) == (count != EDGES // 2)


def test_products_are_compiled_on_batches(graphs):
    """Dense layers beside a sum take most of a step, and share one graph with it."""
    convs = pyg.SAGEConv(FEATURES, 4), pyg.GCNConv(FEATURES, 4)
    for compiled, layer in enumerate(convs):
        for n, count in enumerate((EDGES, EDGES, EDGES - 1, EDGES + 2)):
            args = torch.randn(NODES + count % 3, FEATURES), edges(count, NODES, count)
            expected = gradients(layer, layer, *args)
            with accelerate(compile_from=4 * EDGES):
                grads = gradients(layer, layer, *args)
            torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
            assert len(graphs) == compiled + (n > 1)


def test_products_are_left_alone_on_batches_without_avx_512(graphs):
    """torch's dense products are as fast there, and a graph's call takes longer than PyG's."""
    layer = pyg.SAGEConv(FEATURES, 4)
    with assume(MACHINES["no AVX-512"]):
        for least, count in ((4 * EDGES, EDGES), (4 * EDGES, EDGES + 2), (EDGES, EDGES + 1)):
            with accelerate(compile_from=least):
                layer(torch.randn(NODES, FEATURES), edges(count, NODES, count))
            assert len(graphs) == (least == EDGES)


@pytest.mark.parametrize("through", ["eager", "sparsetir"])
def test_nothing_is_compiled_within_a_compiled_model(through, graphs):
    layer, args = Own(FEATURES, 8), (*given(), W)
    model = torch.nn.Sequential(layer)
    model.forward = lambda *args: layer(*args)
    expected = layer(*args)
    with accelerate(compile_from=0):
        result = torch.compile(model.forward, backend=through, fullgraph=True)(*args)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == (through == "sparsetir")


@pytest.mark.slow
def test_layers_that_know_their_sizes_later(graphs):
    layer, args = pyg.GATv2Conv(-1, 4, add_self_loops=False), given()
    with accelerate(compile_from=0):
        layer(*args)
        assert not graphs
        result = layer(*args)
    assert len(graphs) == 1
    torch.testing.assert_close(result, layer(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_threads():
    layers, args = [Own(FEATURES, 8) for _ in range(3)], (*given(), W)
    expected, results = [layer(*args) for layer in layers], [None] * 3

    def run(n):
        for _ in range(5):
            results[n] = layers[n](*args)

    with accelerate(compile_from=0):
        threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_of_layers_that_are_gone():
    layer = Own(FEATURES, 8)
    check_values(layer, *given(), W)
    before = len(pyg_compiled._of_layers)
    del layer
    assert len(pyg_compiled._of_layers) == before - 1


def test_switches_of_pyg_come_back():
    before = torch_geometric.backend.use_segment_matmul
    with accelerate():
        pass
    assert torch_geometric.backend.use_segment_matmul is before
