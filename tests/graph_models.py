"""Models of messages, which tests compile: layers of PyG, and raw torch."""

import torch
import torch_geometric.nn as pyg

from bench.messages import Distance, Gate, Own, Raw

NODES, EDGES, FEATURES = 30, 150, 12


def edges(seed=1, nodes=NODES, count=EDGES):
    """Edges in no order, with loops and parallel ones; some nodes have none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, nodes - 3, (2, count), generator=generator)


class Wrapped(torch.nn.Module):
    """A layer of PyG's."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index, *more):
        return self.layer(x, edge_index, *more)


def _of(name, *args, **options):
    return lambda: Wrapped(getattr(pyg, name)(FEATURES, *args, **options))


# By name: what makes the model, and whether it takes a weight for each edge.
MODELS = {
    "raw": (lambda: Raw(FEATURES, 8), True),
    "gate": (lambda: Gate(FEATURES, 8), True),
    "distance": (lambda: Distance(FEATURES, 8), True),
    "own": (lambda: Own(FEATURES, 8), True),
    "GCN": (_of("GCNConv", 8), False),
    "GCN weights": (_of("GCNConv", 8), True),
    "SAGE": (_of("SAGEConv", 8), False),
    "SAGE max": (_of("SAGEConv", 8, aggr="max"), False),
    "GIN": (lambda: Wrapped(pyg.GINConv(torch.nn.Linear(FEATURES, 8))), False),
    "GraphConv": (_of("GraphConv", 8), True),
    "GAT": (_of("GATConv", 4, heads=2), False),
    "GAT one head": (_of("GATConv", 8), False),
    "GATv2": (_of("GATv2Conv", 4, heads=2), False),
    "Transformer": (_of("TransformerConv", 4, heads=2), False),
    "ResGated": (_of("ResGatedGraphConv", 8), False),
    "CG": (_of("CGConv"), False),
    "EdgeConv": (lambda: Wrapped(pyg.EdgeConv(torch.nn.Linear(2 * FEATURES, 8))), False),
    "PNA": (
        _of("PNAConv", 8, ["mean", "max", "std"], ["identity"], torch.ones(9, dtype=torch.long)),
        False,
    ),
}  # fmt: skip


def made(name, seed=0):
    """A model and its arguments."""
    torch.manual_seed(seed)
    make, weighted = MODELS[name]
    model, x = make(), torch.randn(NODES, FEATURES)
    return model, (x, edges(), *([torch.rand(EDGES)] if weighted else []))


def gradients(call, model, x, *more):
    """The results of a call of a model, and gradients of the features and parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = call(x, *more)
    (out * torch.linspace(0, 1, out.numel()).view_as(out)).sum().backward()
    return [
        out.detach(),
        x.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]
