"""Layers against those of PyG: results, gradients, parameters; and what they refuse."""

import copy

import pytest
import torch

from sparsetir import nn as ours
from sparsetir.datasets import load_cora

pyg = pytest.importorskip("torch_geometric.nn")
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor  # noqa: E402

NODES, EDGES, FEATURES = 20, 90, 6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def graph(nodes=NODES, edges=EDGES):
    """Random edges, some of them loops, some parallel, and a node without any."""
    found = torch.randint(0, nodes - 1, (2, edges))
    found[:, :3] = torch.tensor([[0, 1, 1], [0, 1, 1]])
    found[:, 3:5] = torch.tensor([[2, 2], [3, 3]])
    return found


def features(nodes=NODES, dtype=torch.float64):
    return torch.randn(nodes, FEATURES, dtype=dtype)


def fresh(x):
    """A leaf of its own, where there can be a gradient."""
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
    for layer, given in ((mine, arguments), (theirs, others or arguments)):
        given = tuple(map(fresh, given))
        leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        out = layer(*given)
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
OUT = pytest.mark.parametrize("out", [3, 9])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@DTYPES
@OUT
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"improved": True, "bias": False}, {"add_self_loops": False}, {"normalize": False},
     {"flow": "target_to_source"}],
    ids=str,
)  # fmt: skip
def test_gcn(options, weighted, out, dtype):
    weight = torch.rand(EDGES, dtype=dtype) if weighted else None
    given = (features(dtype=dtype), graph(), weight)
    same("GCNConv", {"in_channels": FEATURES, "out_channels": out, **options}, given, dtype)


@pytest.mark.parametrize("aggr", ["mean", "max", "min"])
def test_gcn_of_other_reductions(aggr):
    options = {"in_channels": FEATURES, "out_channels": 3, "normalize": False, "aggr": aggr}
    same("GCNConv", options, (features(), graph()))


def test_gcn_cached_keeps_the_first_graph():
    x, first, second = features(), graph(), graph()
    layer = ours.GCNConv(FEATURES, 4, cached=True).double()
    before = layer(x, first)
    torch.testing.assert_close(layer(x, second), before)
    layer_of_second = ours.GCNConv(FEATURES, 4).double()
    layer_of_second.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer_of_second(x, second), before)


def test_gcn_sees_that_edges_were_written_to():
    x, edges = features(), graph()
    layer = ours.GCNConv(FEATURES, 4).double()
    before = layer(x, edges)
    edges.copy_(graph())
    after = layer(x, edges)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, layer(x, edges.clone()))


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


@DTYPES
@OUT
@pytest.mark.parametrize(
    "options",
    [{}, {"aggr": "sum", "normalize": True}, {"aggr": "max", "project": True}, {"aggr": "min"},
     {"aggr": ["mean", "max"]}, {"root_weight": False, "bias": False},
     {"flow": "target_to_source"}],
    ids=str,
)  # fmt: skip
def test_sage(options, out, dtype):
    given = (features(dtype=dtype), graph())
    same("SAGEConv", {"in_channels": FEATURES, "out_channels": out, **options}, given, dtype)


@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
@pytest.mark.parametrize("with_targets", [True, False])
def test_bipartite(name, with_targets):
    edges = torch.stack([torch.randint(0, NODES, (EDGES,)), torch.randint(0, 7, (EDGES,))])
    x = (features(), torch.randn(7, 5, dtype=torch.float64) if with_targets else None)
    options = {"in_channels": (FEATURES, 5), "out_channels": 4}
    size = (NODES, 7)
    given = (x, edges, size) if name == "SAGEConv" else (x, edges, None, size)
    same(name, options, given)


@DTYPES
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 3}, {"heads": 3, "concat": False, "residual": True, "bias": False},
     {"heads": 2, "add_self_loops": False, "negative_slope": 0.5}, {"in_channels": -1}],
    ids=str,
)  # fmt: skip
def test_gat(options, dtype):
    x = features(dtype=dtype)
    if options.get("in_channels") == -1:
        mine, theirs = ours.GATConv(-1, 4).to(dtype), pyg.GATConv(-1, 4).to(dtype)
        theirs(x, graph())
        mine.load_state_dict(theirs.state_dict())
        edges = graph()
        torch.testing.assert_close(mine(x, edges), theirs(x, edges))
        return
    same("GATConv", {"in_channels": FEATURES, "out_channels": 4, **options}, (x, graph()), dtype)


@pytest.mark.parametrize("fill", ["mean", "add", "max", 0.5])
def test_gat_of_edge_features(fill):
    options = {"in_channels": FEATURES, "out_channels": 4, "heads": 2, "edge_dim": 3}
    edge_attr = torch.randn(EDGES, 3, dtype=torch.float64)
    same("GATConv", {**options, "fill_value": fill}, (features(), graph(), edge_attr))


def test_gat_attention_weights():
    mine, theirs = ours.GATConv(FEATURES, 4, heads=2), pyg.GATConv(FEATURES, 4, heads=2)
    mine.load_state_dict(theirs.state_dict())
    x, edges = features(dtype=torch.float32), graph()
    out, (found, alpha) = mine(x, edges, return_attention_weights=True)
    expected, (expected_edges, expected_alpha) = theirs(x, edges, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    assert torch.equal(found, expected_edges)
    torch.testing.assert_close(alpha, expected_alpha)


def test_gat_drops_attention_in_training_only():
    layer, x, edges = ours.GATConv(FEATURES, 4, dropout=0.9), features(dtype=torch.float32), graph()
    assert not torch.equal(layer(x, edges), layer(x, edges))
    layer.eval()
    assert torch.equal(layer(x, edges), layer(x, edges))


RELATIONS = 4


@DTYPES
@pytest.mark.parametrize("out", [4, 12])
@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize(
    "options", [{}, {"num_bases": 3}, {"num_blocks": 2, "root_weight": False}], ids=str
)
def test_rgcn(options, aggr, out, dtype):
    relation = torch.randint(0, RELATIONS - 1, (EDGES,))  # one has no edges
    options = {"in_channels": FEATURES, "out_channels": out, "num_relations": RELATIONS,
               "aggr": aggr, **options}  # fmt: skip
    same("RGCNConv", options, (features(dtype=dtype), graph(), relation), dtype)


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("bases", [None, 3])
@pytest.mark.parametrize("index", ["none", "all", "some"])
def test_rgcn_without_features(index, bases, aggr):
    relation = torch.randint(0, RELATIONS, (EDGES,))
    x = {"none": None, "all": torch.arange(NODES), "some": torch.randint(0, 50, (NODES,))}[index]
    options = {"in_channels": 50 if index == "some" else NODES, "out_channels": 4,
               "num_relations": RELATIONS, "num_bases": bases, "aggr": aggr}  # fmt: skip
    same("RGCNConv", options, (x, graph(), relation))


def test_rgcn_bipartite():
    edges = torch.stack([torch.randint(0, NODES, (EDGES,)), torch.randint(0, 7, (EDGES,))])
    x = (features(), torch.randn(7, 5, dtype=torch.float64))
    options = {"in_channels": (FEATURES, 5), "out_channels": 4, "num_relations": RELATIONS}
    same("RGCNConv", options, (x, edges, torch.randint(0, RELATIONS, (EDGES,))))


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
def test_cora(name):
    target, source = load_cora().nonzero()
    edges = torch.stack([torch.from_numpy(source), torch.from_numpy(target)]).long()
    x = torch.rand(2708, 32)
    same(name, {"in_channels": 32, "out_channels": 7}, (x, edges), torch.float32)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "RGCNConv"])
def test_a_seed_gives_the_parameters_of_pyg(name):
    made = []
    for package in (ours, pyg):
        torch.manual_seed(3)
        arguments = (FEATURES, 4, 2) if name == "RGCNConv" else (FEATURES, 4)
        made.append(getattr(package, name)(*arguments).state_dict())
    mine, theirs = made
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


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_features(name):
    x, edges = features().relu(), graph()
    layer = getattr(ours, name)(FEATURES, 9).double()
    found = []
    for given in (x, x.to_sparse_csr()):
        layer.zero_grad()
        out = layer(given, edges)
        out.square().sum().backward()
        found.append([out, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*found)


def test_layers_of_empty_graphs():
    edges, x = torch.empty(2, 0, dtype=torch.int64), features()
    for name in ("GCNConv", "SAGEConv", "GATConv"):
        same(name, {"in_channels": FEATURES, "out_channels": 3}, (x, edges))


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


def test_compiled_without_graph_breaks():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = ours.GCNConv(FEATURES, 8), ours.GCNConv(8, 3)

        def forward(self, x, edges):
            return self.second(self.first(x, edges).relu(), edges)

    model, x, edges = Model(), features(dtype=torch.float32), graph()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(x, edges)
    torch.testing.assert_close(out, model(x, edges))
    (gradient,) = torch.autograd.grad(out.sum(), model.first.lin.weight)
    (expected,) = torch.autograd.grad(model(x, edges).sum(), model.first.lin.weight)
    torch.testing.assert_close(gradient, expected)
    exported = torch.export.export(model, (x, edges)).module()
    torch.testing.assert_close(exported(x, edges), out)


BACK = "target_to_source"
REFUSED = [
    (lambda: ours.GCNConv(3, 4, aggr="median"), ValueError,
     "GCNConv: argument 'aggr': expected 'add', 'sum', 'mean', 'max', 'min', got 'median'"),
    (lambda: ours.SAGEConv(3, 4, aggr="lstm"), ValueError, "SAGEConv: argument 'aggr': expected "),
    (lambda: ours.GCNConv(3, 4, flow="up"), ValueError, "GCNConv: argument 'flow': expected "),
    (lambda: ours.GCNConv(3, 4, colour=1), TypeError,
     "GCNConv: got an unexpected keyword argument 'colour'"),
    (lambda: ours.GCNConv(3, 4, node_dim=1), ValueError,
     "GCNConv: argument 'node_dim': expected 0, got 1"),
    (lambda: ours.GCNConv(3, 4, normalize=False, add_self_loops=True), ValueError,
     "GCNConv: argument 'add_self_loops': expected False"),
    (lambda: ours.GCNConv(3, 4, aggr="max"), ValueError,
     "GCNConv: argument 'aggr': expected 'add' with self loops, got 'max'"),
    (lambda: ours.GCNConv(6, 4)((features(), None), graph()), ValueError,
     "GCNConv: argument 'x': expected one tensor"),
    (lambda: ours.SAGEConv(-1, 4, project=True), ValueError,
     "SAGEConv: argument 'in_channels': expected a number"),
    (lambda: ours.SAGEConv(6, 4)(features(), graph(), size=(20, 3)), ValueError,
     "SAGEConv: argument 'size': expected 20 at 1 as the features have, got 3"),
    (lambda: ours.SAGEConv(6, 4)(features(), torch.eye(3).to_sparse_csr()), ValueError,
     "SAGEConv: argument 'edge_index': expected a matrix of 20 targets x 20 sources"),
    (lambda: ours.SAGEConv(6, 4)(features(), graph().float()), TypeError,
     "SAGEConv: argument 'A': expected an edge_index of int32 or int64, got float32"),
    (lambda: ours.SAGEConv(6, 4, flow=BACK)(features(), torch.eye(20).to_sparse_csr()), ValueError,
     "SAGEConv: argument 'edge_index': expected edges"),
    (lambda: ours.SAGEConv(6, 4).double()(features(), graph() + NODES), ValueError,
     "expected each source to be at least 0 and less than 20"),
    (lambda: ours.GATConv(3, 4, fill_value="most"), ValueError,
     "GATConv: argument 'fill_value': expected a number"),
    (lambda: ours.RGCNConv(4, 4, 2, num_bases=2, num_blocks=2), ValueError,
     "RGCNConv: argument 'num_blocks': expected None"),
    (lambda: ours.RGCNConv(4, 4, 2, num_blocks=3), ValueError,
     "RGCNConv: argument 'num_blocks': expected a divisor of 4 and 4, got 3"),
    (lambda: ours.RGCNConv(6, 4, 2)(features(), graph()), ValueError,
     r"RGCNConv: argument 'edge_type': expected shape \(90,\), got None"),
    (lambda: ours.RGCNConv(6, 4, 2)(features(), graph(), torch.full((EDGES,), 2)), ValueError,
     "RGCNConv: argument 'edge_type': expected relations from 0 to 1, got 2 to 2"),
    (lambda: ours.RGCNConv(6, 4, 2)(features(), torch.eye(20).to_sparse()), TypeError,
     "RGCNConv: argument 'edge_index': expected a"),
    (lambda: ours.RGCNConv(6, 4, 2, num_blocks=2)(None, graph(6), torch.zeros(EDGES).long()),
     ValueError, "RGCNConv: argument 'x': expected features with 'num_blocks'"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, error, text", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong()
