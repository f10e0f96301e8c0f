"""PyG's layers, as they come, through the backend: values and gradients are those of eager."""

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg
from torch.nn import Linear as linear
from torch_geometric import EdgeIndex

from graph_models import edges, gradients

NODES, EDGES, F, OUT = 40, 200, 16, 8
EDGE_FEATURES, RELATIONS = torch.randn(EDGES, F), torch.randint(0, 3, (EDGES,))
DIRECTIONS = torch.rand(EDGES, 3)
PNA = ["mean", "max", "min", "std"], ["identity", "amplification"], torch.ones(12, dtype=torch.long)


def mlp(inputs):
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, OUT), torch.nn.ReLU(), torch.nn.Linear(OUT, OUT)
    )


# By name: arguments of the layer, options, and what it takes beside features and edges.
LAYERS = [
    ("AGNNConv",), ("AntiSymmetricConv", (F,)), ("APPNP", (3, 0.1)), ("ARMAConv", (F, OUT)),
    ("CGConv", (F,)), ("CGConv", (F, F), {}, EDGE_FEATURES), ("ChebConv", (F, OUT, 3)),
    ("ClusterGCNConv", (F, OUT)), ("DirGNNConv", (pyg.SAGEConv(F, OUT),)),
    ("EdgeConv", (mlp(2 * F),)), ("FastRGCNConv", (F, OUT, 3), {}, RELATIONS),
    ("FeaStConv", (F, OUT), {"heads": 3}), ("FiLMConv", (F, OUT)), ("GATConv", (F, OUT, 2)),
    ("GATConv", (F, OUT, 2), {"edge_dim": F}, EDGE_FEATURES), ("GatedGraphConv", (F, 2)),
    ("GATv2Conv", (F, OUT, 2)), ("GCNConv", (F, OUT)), ("GENConv", (F, OUT)),
    ("GENConv", (F, OUT), {"aggr": "powermean"}), ("GeneralConv", (F, OUT)),
    ("GeneralConv", (F, OUT), {"attention": True, "heads": 2}), ("GINConv", (mlp(F),)),
    ("GINEConv", (mlp(F),), {}, EDGE_FEATURES), ("GMMConv", (F, OUT, 3, 5), {}, DIRECTIONS),
    ("GraphConv", (F, OUT)), ("HypergraphConv", (F, OUT)), ("LEConv", (F, OUT)), ("LGConv",),
    ("MFConv", (F, OUT)), ("MixHopConv", (F, OUT)),
    ("NNConv", (F, OUT, torch.nn.Linear(F, F * OUT)), {}, EDGE_FEATURES),
    ("PDNConv", (F, OUT, F, OUT), {}, EDGE_FEATURES), ("PNAConv", (F, OUT, *PNA)),
    ("ResGatedGraphConv", (F, OUT)), ("RGATConv", (F, OUT, 3), {}, RELATIONS),
    ("RGCNConv", (F, OUT, 3), {}, RELATIONS), *(("SAGEConv", (F, OUT), {"aggr": aggr}) for aggr in
    ("mean", "max", "median", "mul", "softmax", "std", ["mean", "max", "sum"])),
    ("SGConv", (F, OUT), {"K": 2}), ("SimpleConv",), ("SSGConv", (F, OUT, 0.1), {"K": 2}),
    ("TAGConv", (F, OUT)), ("TransformerConv", (F, OUT, 2)),
    ("TransformerConv", (F, OUT, 2), {"beta": True}), ("WLConvContinuous",),
]  # fmt: skip


E, X, DEGREES = edges(1, NODES, EDGES), torch.randn(NODES, F), torch.ones(12, dtype=torch.long)
FEW = torch.stack([E[0], E[1] % 11])  # to nodes of another kind
POSITION, NORMAL = torch.randn(NODES, 3), torch.nn.functional.normalize(torch.randn(NODES, 3))
BATCH = torch.arange(NODES) // 11  # graphs
BY_TARGET = EdgeIndex(E[:, E[1].argsort()], sparse_size=(NODES, NODES), sort_order="col")
TYPES = ["a", "b"], [("a", "to", "b"), ("b", "to", "a")]


def both(model, x):
    """The results at nodes of two types."""
    results = model({"a": x, "b": x.sin()}, {TYPES[1][0]: E, TYPES[1][1]: E.flip(0)})
    return torch.cat(list(results.values()))


def pair(model, x):
    return model((x, x[:11].sin()), FEW)


def placed(model, x):
    return model(x, POSITION, E)


def batched(model, x):
    return model(x, E, BATCH)


def first(model, x):
    return model(x, E, None, BATCH)[0]


def norm(model, x):
    return model(x, BATCH)


def aggregated(model, x):
    return model(x, BATCH, dim_size=4)


def plain(model, x):
    return model(x, E)


# By name: what makes a module, and how it is called.
CALLS = {
    "SignedConv": (lambda: pyg.SignedConv(F, OUT, True), lambda m, x: m(x, E, E.flip(0))),
    "DNAConv": (lambda: pyg.DNAConv(F, 4), lambda m, x: m(x[:, None].expand(-1, 3, -1), E)),
    "PointNetConv": (lambda: pyg.PointNetConv(mlp(F + 3), mlp(OUT)), placed),
    "PPFConv": (lambda: pyg.PPFConv(mlp(F + 4)), lambda m, x: m(x, POSITION, NORMAL, E)),
    "PointTransformerConv": (lambda: pyg.PointTransformerConv(F, OUT), placed),
    "PointGNNConv": (
        lambda: pyg.PointGNNConv(linear(F, 3), linear(F + 3, F), linear(F, F)),
        placed,
    ),
    "GCN2Conv": (lambda: pyg.GCN2Conv(F, 0.1, 0.5, 1), lambda m, x: m(x, x.sin(), E)),
    "SuperGATConv": (lambda: pyg.SuperGATConv(F, OUT, 2, attention_type="SD").eval(), plain),
    "FAConv": (lambda: pyg.FAConv(F), lambda m, x: m(x, x.cos(), E)),
    "EGConv": (lambda: pyg.EGConv(F, OUT, ["sum", "mean", "max"]), plain),
    "HEATConv": (
        lambda: pyg.HEATConv(F, OUT, 3, 3, 5, F, 5, heads=2),
        lambda m, x: m(x, E, torch.arange(NODES) % 3, RELATIONS, EDGE_FEATURES),
    ),
    "HGTConv": (lambda: pyg.HGTConv({"a": F, "b": F}, OUT, TYPES, 2), both),
    "HANConv": (lambda: pyg.HANConv({"a": F, "b": F}, OUT, TYPES, 2), both),
    "HeteroConv": (
        lambda: pyg.HeteroConv({
            TYPES[1][0]: pyg.SAGEConv((F, F), OUT),
            TYPES[1][1]: pyg.GATConv((F, F), OUT, add_self_loops=False),
        }),
        both,
    ),
    "GPSConv": (lambda: pyg.GPSConv(F, pyg.GINConv(linear(F, F)), heads=2).eval(), batched),
    "GAT, pair": (lambda: pyg.GATConv((F, F), OUT, 2, add_self_loops=False), pair),
    "GATv2, pair": (lambda: pyg.GATv2Conv((F, F), OUT, 2, add_self_loops=False), pair),
    "Transformer, pair": (lambda: pyg.TransformerConv((F, F), OUT, 2), pair),
    "GraphConv, pair": (lambda: pyg.GraphConv((F, F), OUT), pair),
    "SAGE, no targets": (lambda: pyg.SAGEConv(F, OUT), lambda m, x: m((x, None), FEW, (NODES, 11))),
    **{
        f"{name}, EdgeIndex": (lambda n=name: getattr(pyg, n)(F, OUT), lambda m, x: m(x, BY_TARGET))
        for name in ["GCNConv", "SAGEConv", "GATConv", "GraphConv", "TransformerConv"]
    },
    "GAT, other flow": (lambda: pyg.GATConv(F, OUT, 2, flow="target_to_source"), plain),
    **{
        f"aggregation {name}": (lambda n=name: pyg.aggr.MultiAggregation([n]), aggregated)
        for name in ["mul", "var", "softmax", "powermean", "median"]
    },
    "quantiles": (lambda: pyg.aggr.QuantileAggregation(0.3), aggregated),
    "LSTM": (lambda: pyg.aggr.LSTMAggregation(F, OUT), aggregated),
    "Set2Set": (lambda: pyg.aggr.Set2Set(F, 2), aggregated),
    "degree scaler": (
        lambda: pyg.aggr.DegreeScalerAggregation(["mean", "max"], ["amplification"], DEGREES),
        aggregated,
    ),
    "sort": (lambda: pyg.aggr.SortAggregation(3), aggregated),
    "attentional": (lambda: pyg.aggr.AttentionalAggregation(linear(F, 1)), aggregated),
    "deep sets": (lambda: pyg.aggr.DeepSetsAggregation(mlp(F), mlp(OUT)), aggregated),
    "variance": (lambda: pyg.aggr.VariancePreservingAggregation(), aggregated),
    "set transformer": (lambda: pyg.aggr.SetTransformerAggregation(F, heads=2), aggregated),
    **{
        f"pool {name}": (
            lambda: linear(F, F),
            lambda m, x, n=name: getattr(pyg, f"global_{n}_pool")(m(x), BATCH),
        )
        for name in ["add", "mean", "max"]
    },
    **{
        n: (lambda n=n: getattr(pyg, n)(F), norm)
        for n in ["InstanceNorm", "LayerNorm", "GraphNorm"]
    },
    **{n: (getattr(pyg, n), norm) for n in ["GraphSizeNorm", "PairNorm", "MeanSubtractionNorm"]},
    "TopKPooling": (lambda: pyg.TopKPooling(F), first),
    "SAGPooling": (lambda: pyg.SAGPooling(F), first),
}  # fmt: skip


class Called(torch.nn.Module):
    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x):
        return self.call(self.module, x)


def check(model, *args):
    expected = gradients(model, model, *args)
    grads = gradients(torch.compile(model, backend="sparsetir"), model, *args)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    torch.manual_seed(0)
    make, call = CALLS[name]
    check(Called(make(), call), X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", LAYERS, ids=lambda x: " ".join([x[0], *map(str, x[2:3])]))
def test_a_layer(layer):
    name, args, options, *more = (*layer, *[(), {}][len(layer) - 1 :])
    torch.manual_seed(0)
    model, inputs = getattr(pyg, name)(*args, **options), (edges(1, NODES, EDGES), *more)
    check(model, torch.randn(NODES, F), *inputs)
