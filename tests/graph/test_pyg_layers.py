"""PyG's layers, as they come, through the backend: values and gradients are those of eager."""

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as pyg

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", LAYERS, ids=lambda x: " ".join([x[0], *map(str, x[2:3])]))
def test_a_layer(layer):
    name, args, options, *more = (*layer, *[(), {}][len(layer) - 1 :])
    torch.manual_seed(0)
    model, given = getattr(pyg, name)(*args, **options), (edges(1, NODES, EDGES), *more)
    x = torch.randn(NODES, F)
    expected = gradients(model, model, x, *given)
    found = gradients(torch.compile(model, backend="sparsetir"), model, x, *given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
