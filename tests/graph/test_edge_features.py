"""Layers with features of edges: products with few numbers of each edge are parts of regions."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg

import sparsetir
from graph_models import NODES, Wrapped, edges
from pairs import by_default
from sparsetir.graph import operator, regions
from sparsetir.graph.backend import Backend
from sparsetir.graph.expressions import SMALL

F, OUT, DIM, EDGES = 16, 12, 5, 150


class Scored(torch.nn.Module):
    """Messages of several heads: a bias, and a product that is read as it is and in heads."""

    def __init__(self, dim=DIM, heads=3):
        super().__init__()
        self.of_edge, self.heads = torch.nn.Linear(dim, F * heads), heads

    def forward(self, x, edge_index, features):
        source, target = edge_index
        product = self.of_edge(features)
        gate = torch.sigmoid(product.view(-1, self.heads, F) + x[source][:, None])
        index = target[:, None, None].expand_as(gate)
        out = x.new_zeros(NODES, self.heads, F).scatter_add(0, index, gate * x[target][:, None])
        plain = x.new_zeros(NODES, F * self.heads).index_add(0, target, product.relu())
        return out.flatten(1) + plain


class Unordered(Scored):
    """Edges' numbers that are computed, and read by torch, too."""

    def forward(self, x, edge_index, features):
        product = self.of_edge(features * 2)
        source, target = edge_index
        out = x.new_zeros(NODES, F * self.heads).index_add(
            0, source, product * x[target].repeat(1, self.heads)
        )
        return out + product.sort(1).values[:NODES]


MODELS = {
    "GATv2": lambda: Wrapped(pyg.GATv2Conv(F, OUT, heads=2, edge_dim=DIM)),
    "GATv2 without loops": lambda: Wrapped(
        pyg.GATv2Conv(F, OUT, heads=2, edge_dim=DIM, add_self_loops=False)
    ),
    "GAT": lambda: Wrapped(pyg.GATConv(F, OUT, heads=2, edge_dim=DIM)),
    "Transformer": lambda: Wrapped(pyg.TransformerConv(F, OUT, heads=2, edge_dim=DIM)),
    "GINE": lambda: Wrapped(pyg.GINEConv(torch.nn.Linear(F, OUT), edge_dim=DIM)),
    "scored": Scored,
    "unordered": Unordered,
}
SCHEDULED = {"GINE", "scored"}  # by default, the others' kernels are as their programs say
WITHOUT = {"GATv2", "GATv2 without loops", "Transformer", "GINE"}  # anything stored


def features(wanted, dim=DIM):
    return torch.randn(EDGES, dim, requires_grad=wanted)


def gradients(call, model, x, edge_index, given):
    """The result, and gradients of x, the edges' features if asked for, and parameters."""
    x = x.detach().clone().requires_grad_()
    given = given.detach().clone().requires_grad_(given.requires_grad)
    model.zero_grad()
    out = call(x, edge_index, given)
    (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = [x.grad, given.grad, *(p.grad for p in model.parameters())]
    return [out.detach(), *(g.clone() for g in grads if g is not None)]


def wide_tensors(graphs, least=OUT):
    """Shapes of what is stored for all edges with as many numbers as a message has."""
    costs = (c for g in graphs for m in g.measured for c in m.costs.values())
    return [c.shape for c in costs if c.edges and torch.Size(c.shape[1:]).numel() >= least]


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default(  # GATv2 with loops is below, beside Inductor
    "GATv2 without loops-True",
    "GAT-False",
    "Transformer-False",
    "GINE-True",
    "scored-False",
    "unordered-True",
)
def test_as_eager(name, wanted, request, monkeypatch):
    if name not in SCHEDULED:
        request.getfixturevalue("quick_kernels")
    monkeypatch.setattr(regions, "FEW", 0)  # as of larger graphs
    model = MODELS[name]()
    args = torch.randn(NODES, F), edges(), features(wanted)
    backend = Backend(noted=True)
    compiled = torch.compile(model, backend=backend)
    expected = gradients(model, model, *args)
    for _ in range(2):  # costs are those of further runs
        results = gradients(compiled, model, *args)
        assert len(results) == len(expected)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # The gradient of features without those of self loops is a scatter by a mask.
    if name != "unordered" and not (wanted and name in ("GATv2", "GAT")):
        assert all(not graph.left for graph in backend.graphs)
    if name in WITHOUT:
        assert wide_tensors(backend.graphs) == []
    elif name == "unordered":
        assert (EDGES, 3 * F) in wide_tensors(backend.graphs)


@pytest.mark.parametrize("dim, inside", [(1, True), (SMALL, True), (SMALL + 1, False)])
def test_which_products_are_parts_of_regions(dim, inside, quick_kernels):
    model = Wrapped(pyg.GINEConv(torch.nn.Linear(40, OUT), edge_dim=dim))
    args = torch.randn(NODES, 40), edges(), features(False, dim)
    backend = Backend(noted=True)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        results = gradients(compiled, model, *args)
    for a, b in zip(results, gradients(model, model, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert bool(wide_tensors(backend.graphs, 40)) != inside


def test_explain_names_nothing_stored(quick_kernels):
    model = MODELS["GATv2 without loops"]()
    report = sparsetir.explain(model, torch.randn(NODES, F), edges(), features(False))
    (graph,) = report.graphs
    assert wide_tensors(report.graphs) == [] and not graph.left
    assert sum(x.times is not None for r in graph.found for x in r.program.operands) >= 4
    assert "C5 = T.dense_fixed(5)" in report.programs()
    for number in range(len(graph.found)):
        assert graph.call(number).program == graph.found[number].program


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", by_default(["GATv2", "scored"], "scored"))
def test_types(name, kind, quick_kernels):
    """Sums over edges are as exact as eager's, and rounded once."""
    dtype = getattr(torch, kind)
    model = MODELS[name]().to(dtype)
    args = torch.randn(NODES, F, dtype=dtype), edges(), features(True).to(dtype)
    args = (*args[:2], args[2].detach().requires_grad_())
    exact = copy.deepcopy(model).double()
    wide = args[0].double(), args[1], args[2].detach().double().requires_grad_()
    ours = gradients(torch.compile(model, backend="sparsetir"), model, *args)
    eager = gradients(model, model, *args)
    for a, b, c in zip(ours, eager, gradients(exact, exact, *wide), strict=True):
        assert a.dtype == b.dtype == dtype
        off, torchs = ((x.double() - c).abs().max() / c.abs().max() for x in (a, b))
        assert off <= 2 * torchs + (32 if kind == "float64" else 2) * torch.finfo(dtype).eps


@pytest.mark.parametrize("edge_count", [0, 1, 7, EDGES])
@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_chunks_of_any_number_of_edges(edge_count, chunk, plain, monkeypatch):
    """A row may be in several of them, and some rows have no edges."""
    model = Scored()
    monkeypatch.setattr(operator, "CHUNK", 4 * 3 * F * chunk)
    given = features(True)[:edge_count].detach().requires_grad_()
    args = torch.randn(NODES, F), edges()[:, :edge_count], given
    results = gradients(torch.compile(model, backend="sparsetir"), model, *args)
    for a, b in zip(results, gradients(model, model, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_features_that_change(plain):
    """Data derived from edges and features are kept while both stay, also for writes by NumPy."""
    model = MODELS["GATv2"]()
    compiled, given = torch.compile(model, backend="sparsetir"), features(False)
    args = torch.randn(NODES, F), edges(), given
    for _ in range(3):
        with torch.no_grad():
            result, expected = compiled(*args), model(*args)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        given.numpy()[3] += 1


@pytest.mark.parametrize("rest", ["inductor"], indirect=True)
def test_inductor_for_the_rest(rest, quick_kernels):
    model = MODELS["GATv2"]()
    args = torch.randn(NODES, F), edges(), features(True)
    options = {"rest": rest} if rest else {}
    compiled = torch.compile(model, backend="sparsetir", options=options)
    for _ in range(2):
        results = gradients(compiled, model, *args)
        for a, b in zip(results, gradients(model, model, *args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_features_of_nodes_are_not_kept(plain):
    """A vector of numbers of nodes does not make their features those of edges."""

    def model(x, edge_index, batch):
        out = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return x.new_zeros(3, F).index_add(0, batch, out)

    backend = Backend()
    args = torch.randn(NODES, F), edges(), torch.arange(NODES) % 3
    result = torch.compile(model, backend=backend)(*args)
    torch.testing.assert_close(result, model(*args))
    assert len(backend.graphs[0].found) == 2
