"""Layers against those of PyG: results, gradients, parameters; and what they refuse."""

import copy

import pytest
import torch

from pairs import in_pairs
from sparsetir import nn as ours
from sparsetir import ops
from sparsetir.data.datasets import load_cora
from sparsetir.nn.rgcn import ROWS_FOR_AN_EDGE
from sparsetir.ops.cache import kept

pyg = pytest.importorskip("torch_geometric.nn")
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor  # noqa: E402

NODES, EDGES, FEATURES = 20, 90, 6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def graph(nodes=NODES, edges=EDGES):
    """Random edges, some of them loops, some parallel, and a node without any."""
    edge_index = torch.randint(0, nodes - 1, (2, edges))
    edge_index[:, :3] = torch.tensor([[0, 1, 1], [0, 1, 1]])
    edge_index[:, 3:5] = torch.tensor([[2, 2], [3, 3]])
    return edge_index


def features(nodes=NODES, dtype=torch.float64):
    return torch.randn(nodes, FEATURES, dtype=dtype)


def fresh(x):
    """A new leaf, if it can have a gradient."""
    dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
    return x.clone().requires_grad_() if dense and x.is_floating_point() else x


def same(name, options, arguments, dtype=torch.float64, others=None):
    """Results and gradients of ours and PyG's, with parameters that went both ways.

    others : what PyG's takes, if not the same
    """
    mine, theirs = getattr(ours, name)(**options), getattr(pyg, name)(**options)
    mine, theirs = mine.to(dtype), theirs.to(dtype)
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    assert repr(mine) == repr(theirs)
    results, gradients = [], []
    for layer, inputs in ((mine, arguments), (theirs, others or arguments)):
        inputs = tuple(map(fresh, inputs))
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        out = layer(*inputs)
        (out * torch.linspace(-1, 2, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        results.append(out)
        gradients.append([x.grad for x in (*layer.parameters(), *leaves)])
    tolerance = {"rtol": 2e-4, "atol": 2e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(*results, **tolerance)
    for one, other in zip(*gradients, strict=True):
        if one is None or other is None:
            assert one is None and (other is None or not other.any())
        else:
            torch.testing.assert_close(one, other, **tolerance)
    return mine


# More and fewer features after than before: both orders of computation.
OUT = [3, 9]
DTYPES = [torch.float32, torch.float64]


def each(name, options, out=OUT, weighted=(False,)):
    """Cases of a layer, every pair of choices."""
    _, params = in_pairs(options=options, weighted=weighted, out=out, dtype=DTYPES)
    return [pytest.param(name, *p.values, marks=p.marks, id=f"{name}-{p.id}") for p in params]


RELATIONS = 4
BACK = {"flow": "target_to_source"}
NEITHER = {"root_weight": False, "bias": False}
GCN = [{}, {"improved": True, "bias": False}, {"add_self_loops": False}, {"normalize": False}, BACK]
SAGE = [
    {}, {"aggr": "sum", "normalize": True}, {"aggr": "max", "project": True}, {"aggr": "min"},
    {"aggr": ["mean", "max"]}, NEITHER, BACK, {"bias": False},
]  # fmt: skip
GAT = [
    {}, {"heads": 3}, {"heads": 3, "concat": False, "residual": True, "bias": False},
    {"heads": 2, "add_self_loops": False, "negative_slope": 0.5},
]  # fmt: skip
RGCN = [
    {"num_relations": RELATIONS, "aggr": aggr, **more} for aggr in ("mean", "sum", "max")
    for more in ({}, {"num_bases": 3}, {"num_blocks": 2, "root_weight": False})
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "weighted", "out", "dtype"), [
    *each("GCNConv", GCN, weighted=[False, True]), *each("GATConv", GAT, [4]),
    *each("SAGEConv", SAGE, [1, *OUT]),  # both weights in one product, if there is little after
    *each("RGCNConv", RGCN, [4, 12]),
])  # fmt: skip
@pytest.mark.default(14)
def test_layers(name, options, weighted, out, dtype):
    args = [features(dtype=dtype), graph()]
    if name == "RGCNConv":
        args.append(torch.randint(0, RELATIONS - 1, (EDGES,)))  # one has no edges
    args += [torch.rand(EDGES, dtype=dtype)] * weighted
    same(name, {"in_channels": FEATURES, "out_channels": out, **options}, args, dtype)


def two_sides():
    return torch.stack([torch.randint(0, NODES, (EDGES,)), torch.randint(0, 7, (EDGES,))])


def cora():
    target, source = load_cora().nonzero()
    return torch.stack([torch.from_numpy(source), torch.from_numpy(target)]).long()


PLAIN = ("GCNConv", "SAGEConv", "GATConv")
NONE = torch.empty(2, 0, dtype=torch.int64)
# Layer, options beside features and results, what it is given.
ALSO = [
    *(
        ("GCNConv", {"normalize": False, "aggr": aggr}, lambda: (features(), graph()))
        for aggr in ("mean", "max", "min")
    ),
    *((name, {}, lambda: (torch.stack([features()] * 2), graph())) for name in PLAIN[:2]),
    *((name, {}, lambda: (features(), NONE)) for name in PLAIN),
    *(
        (name, {"in_channels": 32}, lambda: (torch.rand(2708, 32).double(), cora()))
        for name in PLAIN
    ),
    *(
        (
            "GATConv",
            {"heads": 2, "edge_dim": 3, "fill_value": fill, "flow": flow},
            lambda: (features(), graph(), torch.randn(EDGES, 3, dtype=torch.float64)),
        )
        for fill in ("mean", "add", "max", 0.5)
        for flow in ("source_to_target", "target_to_source")
    ),
    (
        "RGCNConv",
        {"in_channels": (FEATURES, 5), "num_relations": 4},
        lambda: ((features(), features(7)[:, :5]), two_sides(), torch.randint(0, 4, (EDGES,))),
    ),
]


@pytest.mark.parametrize(("name", "options", "make"), ALSO)
def test_other_options_and_graphs(name, options, make):
    same(name, {"in_channels": FEATURES, "out_channels": 3, **options}, make())


@pytest.mark.parametrize("out", [3, 9])
@pytest.mark.parametrize("normalize", [True, False])
def test_gcn_weights_of_a_wider_type(normalize, out):
    """Results are of the weights' dtype, as in PyG."""
    x, edges, weight = features(dtype=torch.float32), graph(), torch.rand(EDGES).double()
    mine, theirs = (p.GCNConv(FEATURES, out, normalize=normalize) for p in (ours, pyg))
    mine.load_state_dict(theirs.state_dict())
    result = mine(x, edges, weight)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, theirs(x, edges, weight), rtol=1e-5, atol=1e-6)


def test_gcn_cached_keeps_the_first_graph():
    x, first, second = features(), graph(), graph()
    layer = ours.GCNConv(FEATURES, 4, cached=True).double()
    before = layer(x, first)
    torch.testing.assert_close(layer(x, second), before)
    layer_of_second = ours.GCNConv(FEATURES, 4).double()
    layer_of_second.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer_of_second(x, second), before)


def matrices():
    """One graph as edges and as matrices of targets x sources, without parallel edges."""
    edges = torch.unique(graph(), dim=1)
    size = (NODES, NODES)
    weight = torch.rand(edges.shape[1], dtype=torch.float64)
    return {
        "csr": to_torch_csr_tensor(edges.flip(0), weight, size),
        "coo": to_torch_coo_tensor(edges.flip(0), weight, size),
    }


@pytest.mark.parametrize("layout", ["csr", "coo"])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
@pytest.mark.filterwarnings("ignore")
def test_sparse_adjacency(name, layout):
    options = {"in_channels": FEATURES, "out_channels": 3}
    if name == "GATConv":
        options["add_self_loops"] = False  # PyG cannot add them to a matrix
    same(name, options, (features(), matrices()[layout]))


@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
@pytest.mark.parametrize("with_targets", [True, False])
def test_bipartite(name, with_targets):
    edges, x = two_sides(), (features(), features(7)[:, :5] if with_targets else None)
    options = {"in_channels": (FEATURES, 5), "out_channels": 4}
    size = (NODES, 7)
    args = (x, edges, size) if name == "SAGEConv" else (x, edges, None, size)
    same(name, options, args)


def test_gat_attention_weights():
    mine, theirs = ours.GATConv(FEATURES, 4, heads=2), pyg.GATConv(FEATURES, 4, heads=2)
    mine.load_state_dict(theirs.state_dict())
    x, edges = features(dtype=torch.float32), graph()
    out, (edges_out, alpha) = mine(x, edges, return_attention_weights=True)
    expected, (expected_edges, expected_alpha) = theirs(x, edges, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    assert torch.equal(edges_out, expected_edges)
    torch.testing.assert_close(alpha, expected_alpha)


def test_gat_drops_attention_in_training_only():
    layer, x, edges = ours.GATConv(FEATURES, 4, dropout=0.9), features(dtype=torch.float32), graph()
    assert not torch.equal(layer(x, edges), layer(x, edges))
    layer.eval()
    assert torch.equal(layer(x, edges), layer(x, edges))


MANY_RELATIONS = 18  # more rows of all relations than a layer makes for its edges


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("aggr", "bases"), [("mean", None), ("mean", 3), ("sum", 3), ("max", 3)])
@pytest.mark.parametrize("index", ["none", "all", "some"])
def test_rgcn_without_features(index, aggr, bases, few):
    """With more edges than nodes have rows of weights; or few: rows that no edge asks for are not
    made of bases."""
    relations = MANY_RELATIONS if few else RELATIONS
    assert NODES * RELATIONS < EDGES and NODES * MANY_RELATIONS >= ROWS_FOR_AN_EDGE * EDGES
    x = {"none": None, "all": torch.arange(NODES), "some": torch.randint(0, 50, (NODES,))}[index]
    options = {"in_channels": 50 if index == "some" else NODES, "out_channels": 4,
               "num_relations": relations, "num_bases": bases, "aggr": aggr}  # fmt: skip
    same("RGCNConv", options, (x, graph(), torch.randint(0, relations, (EDGES,))))


@pytest.mark.parametrize("blocks", [None, 2])
def test_rgcn_keeps_a_graph_once(blocks):
    """One structure of the graph, and the same result where sums are in place."""
    ops.clear_cache()
    layer = ours.RGCNConv(FEATURES, 4, RELATIONS, num_blocks=blocks).double()
    args = features(), graph(), torch.randint(0, RELATIONS, (EDGES,))
    out = layer(*args)
    with torch.no_grad():
        torch.testing.assert_close(layer(*args), out)
    assert sum(key[0][0] == "relations" for key in kept._entries) == 1
    ops.clear_cache()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "RGCNConv"])
def test_a_seed_gives_the_parameters_of_pyg(name):
    states = []
    for package in (ours, pyg):
        torch.manual_seed(3)
        arguments = (FEATURES, 4, 2) if name == "RGCNConv" else (FEATURES, 4)
        states.append(getattr(package, name)(*arguments).state_dict())
    mine, theirs = states
    assert list(mine) == list(theirs)
    for key in mine:
        torch.testing.assert_close(mine[key], theirs[key])


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
def test_features_counted_by_the_first_input(name):
    layer = getattr(ours, name)(-1, 4).double()
    empty = copy.deepcopy(layer)
    x, edges = features(), graph()
    out = layer(x, edges)
    empty.load_state_dict(layer.state_dict())
    torch.testing.assert_close(empty(x, edges), out)


@pytest.mark.parametrize("out", [1, 9])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_features(name, out):
    x, edges = features().relu(), graph()
    layer = getattr(ours, name)(FEATURES, out).double()
    results = []
    for rows in (x, x.to_sparse_csr()):
        layer.zero_grad()
        y = layer(rows, edges)
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*results)


def test_layers_can_be_copied_and_pickled(tmp_path):
    x, edges = features(), graph()
    for layer in (ours.GCNConv(FEATURES, 3, cached=True), ours.SAGEConv(FEATURES, 3)):
        layer = layer.double()
        out = layer(x, edges)
        torch.testing.assert_close(copy.deepcopy(layer)(x, edges), out)
        torch.save(layer, tmp_path / "layer.pt")
        torch.testing.assert_close(
            torch.load(tmp_path / "layer.pt", weights_only=False)(x, edges), out
        )
