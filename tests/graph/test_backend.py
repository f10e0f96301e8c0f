"""`torch.compile(model, backend="sparsetir")`: layers in both directions, edges that change,
what is left to torch."""

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex

from graph_models import EDGES, FEATURES, MODELS, NODES, Wrapped, edges, gradients, made
from sparsetir import compilations
from sparsetir.graph import operator, orders
from sparsetir.graph.backend import Backend
from sparsetir.sparse_ir.errors import StructureIndexError

CHEAP = {"gate", "distance", "SAGE max", "GAT"}
# What is computed for each edge by a product with weights stays a gather.
LEFT = {"CG", "EdgeConv", "PNA"}


pytestmark = pytest.mark.parametrize(
    "rest", ["eager", pytest.param("inductor", marks=pytest.mark.slow)], indirect=True
)


def compiled(model, **options):
    backend = Backend()
    return torch.compile(model, backend=backend, **options), backend


def assert_close(results, expected):
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, equal_nan=True)


def check(model, *args, **options):
    """Both directions against eager; the backend."""
    call, backend = compiled(model, **options)
    assert_close(gradients(call, model, *args), gradients(model, model, *args))
    return backend


def preludes(backend):
    return [part for graph in backend.graphs for p in graph.preludes for part in p.parts]


def check_many_gradients(model, call, args):
    """Gradients of several results in one backward pass, by torch's older vmap."""
    leaves = [x for x in (*args, *model.parameters()) if x.is_floating_point()]
    for x in leaves:
        x.requires_grad_()
    out = call(*args)
    weights = torch.randn(3, *out.shape)
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, **options)
    each = [torch.autograd.grad(model(*args), leaves, w, **options) for w in weights]
    assert_close(grads, map(torch.stack, zip(*each, strict=True)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in CHEAP else pytest.mark.slow) for n in MODELS]
)
@pytest.mark.default("gate-eager", "distance-eager")
def test_layers(name):
    model, args = made(name)
    call, backend = compiled(model)
    expected = gradients(model, model, *args)
    for _ in range(2):
        assert_close(gradients(call, model, *args), expected)
    check_many_gradients(model, call, args)
    with torch.no_grad():
        assert_close([call(*args)], [model(*args)])
    assert all(graph.found for graph in backend.graphs)
    assert name in LEFT or not any(graph.left for graph in backend.graphs)
    # Graphs with and without gradients may share what follows from edges.
    assert all(prelude.runs <= 1 for prelude in preludes(backend))


# -- edges ----------------------------------------------------------------------------------------


def test_what_follows_from_edges_is_kept_while_they_stay(quick_kernels):
    model, (x, pairs) = made("GCN")
    call, backend = compiled(model)

    def runs():
        before = sum(p.runs for p in preludes(backend))
        for _ in range(2):
            assert_close(gradients(call, model, x, pairs), gradients(model, model, x, pairs))
        return sum(p.runs for p in preludes(backend)) - before

    assert runs() == 1
    pairs[:, :9] = pairs[:, :9].flip(1) + 1
    assert runs() == 1
    pairs.numpy()[0, 4] = 3  # where torch counts no version
    assert runs() == 1
    pairs = edges(seed=5)
    assert runs() == 1
    with torch.inference_mode():
        pairs = pairs + 1
        assert_close([call(x, pairs)], [model(x, pairs)])
        pairs[1] = 2
        assert_close([call(x, pairs)], [model(x, pairs)])


def test_edges_that_are_new_in_each_step_compile_nothing(quick_kernels):
    model, _ = made("GCN")
    call, backend = compiled(model)
    counts = []
    for step in range(5):
        nodes = NODES + 3 * step
        args = torch.randn(nodes, FEATURES), edges(step, nodes, EDGES + 11 * step)
        assert_close(gradients(call, model, *args), gradients(model, model, *args))
        counts.append(compilations())
    assert len(backend.graphs) == 2  # of fixed sizes, and of any
    assert len(set(counts[1:])) == 1


def test_layers_share_what_edges_that_are_new_take(monkeypatch):
    """Edges are sorted once in each direction, by what backward keeps of forward, and what kernels
    take of them is made once for layers that are alike."""
    prepared, sorts = [], []

    def counted(of, name, calls):
        before = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args: (calls.append(args), before(*args))[1])

    counted(operator, "_prepare", prepared)
    counted(orders, "sorted_pairs", sorts)
    layers = (pyg.GINConv(torch.nn.Linear(FEATURES, FEATURES)) for _ in range(3))
    model = pyg.Sequential("x, e", [(layer, "x, e -> x") for layer in layers])
    call, backend = compiled(model)
    for step in range(4):
        x, edge_index = torch.randn(NODES, FEATURES), edges(step)
        sorts.clear()
        prepared.clear()
        assert_close(gradients(call, model, x, edge_index), gradients(model, model, x, edge_index))
        if step:
            edge_index[0, 0] += 1  # which is no matter of what was prepared
    assert len(backend.graphs) == 1 and len(backend.graphs[0].found) >= 6
    assert len(sorts) == 2 and len(prepared) == 2


@pytest.mark.parametrize("wrong", [-1, NODES])
def test_an_index_out_of_range_is_refused(wrong):
    model, (x, edge_index, w) = made("raw")
    edge_index[0, 3] = wrong
    with pytest.raises(StructureIndexError, match=f"at least 0 and less than {NODES}, got {wrong}"):
        compiled(model)[0](x, edge_index, w)


@pytest.mark.slow
def test_kinds_of_edges():
    model, (x, pairs, w) = made("raw")
    check(model, x, pairs.int(), w)
    check(model, x, pairs[:, :0], w[:0])
    check(model, x, pairs[:, :1].clone(), w[:1])
    layer = Wrapped(pyg.SAGEConv(FEATURES, 8))
    size = (NODES, NODES)
    by_targets = EdgeIndex(pairs[:, pairs[1].argsort()], sparse_size=size, sort_order="col")
    for edge_index in EdgeIndex(pairs, sparse_size=size), by_targets.fill_cache_():
        assert check(layer, x, edge_index).graphs[0].found
    check(Wrapped(pyg.GCNConv(FEATURES, 8, flow="target_to_source")), x, pairs)


def test_one_index_of_nodes_of_two_kinds():
    def model(x, y, edge_index):
        source, target = edge_index
        few = x.new_zeros(len(x), 8).index_add(0, target, y[source] * y[target])
        return few + x, y.new_zeros(len(y), 8).index_add(0, target, y[source])

    args = torch.randn(30, 8), torch.randn(40, 8), edges()
    for a, b in zip(torch.compile(model, backend="sparsetir")(*args), model(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_layers_have_one_prelude():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = pyg.GCNConv(FEATURES, 8), pyg.GCNConv(8, 4)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    backend = check(Two(), torch.randn(NODES, FEATURES), edges())
    (graph,) = backend.graphs
    # Self loops are taken out of the edges once, although each layer does it.
    assert len(graph.found) == 4 and not graph.left
    assert len(preludes(backend)) == 1


def test_what_changes_in_each_step_leaves_what_does_not():
    """Counters of normalisation, and another graph's edges."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = pyg.GCNConv(FEATURES, 8), torch.nn.BatchNorm1d(8)

        def forward(self, x, pairs, batch):
            return pyg.global_mean_pool(self.norm(self.layer(x, pairs)), batch, 3)

    model, x, edge_index = Normed(), torch.randn(NODES, FEATURES), edges()
    call, backend = compiled(model)
    other = Normed()
    other.load_state_dict(model.state_dict())
    for _ in range(3):
        batch = torch.randint(0, 3, (NODES,)).sort().values
        result, expected = call(x, edge_index, batch), other(x, edge_index, batch)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert sorted(part.runs for part in preludes(backend)) == [1, 3]


def test_views_that_divide_edges():
    def forward(x, pairs):
        source, target = pairs[:, pairs[0] != pairs[1]]
        message = x[source].view(-1, 2, FEATURES // 2).flatten(0, 1) * 2
        halves = torch.stack([target, target + NODES], 1).flatten()
        return x.new_zeros(2 * NODES, FEATURES // 2).index_add(0, halves, message)

    x, edge_index = torch.randn(NODES, FEATURES, requires_grad=True), edges()
    call, _ = compiled(forward)
    assert_close([call(x, edge_index)], [forward(x, edge_index)])


def test_who_gets_what_a_prelude_keeps_may_write_to_it():
    class Degrees(torch.nn.Module):
        def forward(self, x, pairs):
            ones = torch.ones(pairs.shape[1])
            degrees = torch.zeros(len(x)).index_add(0, pairs[1], ones)
            return x * degrees[:, None], degrees

    call, backend = compiled(Degrees())
    x, edge_index = torch.randn(NODES, FEATURES, requires_grad=True), edges()
    first = call(x, edge_index)[1]
    expected = first.clone()
    first.zero_()
    torch.testing.assert_close(call(x, edge_index)[1], expected)
    assert [p.runs for p in preludes(backend)] == [1]


def test_a_truth_about_edges_that_a_model_asks_for():
    def model(x, pairs):
        source, target = pairs[:, pairs[0] != pairs[1]]
        if source.numel() > 3:  # which breaks it into two graphs
            torch._dynamo.graph_break()
        return x.new_zeros(x.shape).index_add(0, target, x[source])

    x, edge_index = torch.randn(NODES, FEATURES, requires_grad=True), edges()
    assert_close([compiled(model)[0](x, edge_index)], [model(x, edge_index)])


@pytest.mark.parametrize("dynamic", [True, None])
def test_views_of_edges_that_a_model_gives_are_of_these_edges(dynamic):
    """Edges that a graph hands to the next, where a model breaks."""

    def model(x, pairs):
        source, target = pairs
        return x.new_zeros(x.shape).index_add(0, target, x[source]), target.view_as(target)

    x, edge_index = torch.randn(NODES, FEATURES, requires_grad=True), edges()
    out, target = compiled(model, dynamic=dynamic)[0](x, edge_index)
    assert_close([out], [model(x, edge_index)[0]])
    assert torch.equal(target, edge_index[1]) and target.data_ptr() == edge_index[1].data_ptr()


def test_buffers_that_a_model_writes_to():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(NODES))

        def forward(self, x, pairs):
            self.total += torch.zeros(NODES).index_add(0, pairs[1], torch.ones(pairs.shape[1]))
            return x * self.total[:, None]

    model, x = Counts(), torch.randn(NODES, FEATURES)
    call, _ = compiled(model)
    one = call(x, edges())
    torch.testing.assert_close(call(x, edges()), 2 * one)


# -- what torch does ------------------------------------------------------------------------------


@pytest.mark.slow
def test_dropout_draws_the_numbers_that_eager_draws():
    model = Wrapped(pyg.GATConv(FEATURES, 4, heads=2, dropout=0.5))
    x, edge_index = torch.randn(NODES, FEATURES), edges()
    call, _ = compiled(model)
    runs = []
    for f in (model, call, call):
        torch.manual_seed(3)
        runs.append(gradients(f, model, x, edge_index))
    assert_close(runs[1], runs[0])
    assert_close(runs[2], runs[0])


def test_second_gradients_are_refused_by_name():
    model, (x, *more) = made("raw")
    x.requires_grad_()
    (first,) = torch.autograd.grad(compiled(model)[0](x, *more).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()


def test_extrema_keep_nan():
    model, (x, edge_index) = made("SAGE max")
    x[3] = float("nan")
    call, _ = compiled(model)
    with torch.no_grad():
        result, expected = call(x, edge_index), model(x, edge_index)
    assert torch.equal(result.isnan(), expected.isnan()) and result.isnan().any()


def test_running_means_under_reentrant_checkpoints():
    """A layer's writes without gradients happen before backward runs it again."""
    source, target = edges()
    norm = torch.nn.BatchNorm1d(FEATURES)

    def block(x):
        return norm(torch.zeros_like(x).index_add(0, target, x[source]))

    def model(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)

    means = []
    for through in ("aot_eager", "sparsetir"):
        torch._dynamo.reset()
        norm.reset_running_stats()
        x = torch.ones(NODES, FEATURES, requires_grad=True)
        torch.compile(model, backend=through)(x * torch.arange(FEATURES)).sum().backward()
        means.append(norm.running_mean.clone())
    assert_close(*means)


def test_one_row_is_expanded_to_any_number_of_nodes(plain):
    """A mean over nodes does so in its gradient: their number is not that of the row."""

    def model(x, pairs):
        out = torch.zeros_like(x).index_add(0, pairs[1], x[pairs[0]])
        return (out - out.mean(0, keepdim=True)) / (1 + out.pow(2).sum())

    norm = Wrapped(model)
    call, _ = compiled(norm)
    for count in (5, NODES):  # the second compilation has it as a dynamic size
        x, to = torch.randn(count, FEATURES), torch.randint(count, (2, 40))
        for edge_index in (to, torch.stack([to[0], 0 * to[1]])):
            assert_close(gradients(call, norm, x, edge_index), gradients(norm, norm, x, edge_index))


def test_what_is_reduced_in_part_or_of_one_row(plain):
    """Products that have the index of a region are none; nor are sums that are added by one row."""

    def model(x, index, w):
        some, none = index.view(-1, 1).expand(-1, 3), x.new_zeros(NODES, FEATURES)
        return (
            none.scatter_add(0, some, w),
            none.scatter_reduce(0, some, w * x[index], "amax", include_self=False),
            x.new_zeros(NODES).scatter_add(0, index[:9], w[:, 0]),
            none.index_put((index,), w[:1], accumulate=True),
            none[:1].index_add(0, 0 * index, w) + none.index_add(0, 0 * index, w * x[index]),
        )

    x, index = torch.randn(NODES, FEATURES), edges()[0]
    for dynamic in (False, True):
        torch._dynamo.reset()
        w = torch.randn(EDGES, FEATURES)
        assert_close(compiled(model, dynamic=dynamic)[0](x, index, w), model(x, index, w))
