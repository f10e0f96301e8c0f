"""Errors of layers and their messages."""

import torch

import sparsetir.nn as ours
from refusals import refusals

NODES, EDGES, FEATURES = 20, 90, 6


def graph(nodes=NODES):
    return torch.randint(0, nodes - 1, (2, EDGES))


def features():
    return torch.randn(NODES, FEATURES)


BACK = "target_to_source"


test_refusals = refusals(
    """
ours.GCNConv(3, 4, aggr="median")  # ValueError: 'aggr': expected 'sum', 'add', 'mean', .. 'amin'
ours.SAGEConv(3, 4, aggr="lstm")  # ValueError: SAGEConv: argument 'aggr': expected
ours.GCNConv(3, 4, flow="up")  # ValueError: GCNConv: argument 'flow': expected
ours.GCNConv(3, 4, colour=1)  # TypeError: GCNConv: got an unexpected keyword argument 'colour'
ours.GCNConv(3, 4, node_dim=1)  # ValueError: GCNConv: argument 'node_dim': expected 0, got 1
ours.GCNConv(3, 4, normalize=False, add_self_loops=True)  # ValueError: 'add_self_loops': expected
ours.GCNConv(3, 4, aggr="max")  # ValueError: 'aggr': expected 'add' with self loops, got 'max'
ours.GCNConv(6, 4)((features(), None), graph())  # ValueError: 'x': expected one tensor
ours.SAGEConv(-1, 4, project=True)  # ValueError: 'in_channels': expected a number
ours.SAGEConv(6, 4)(features(), graph(), size=(20, 3))  # ValueError: 'size': expected 20 .. got 3
ours.SAGEConv(6, 4)(features(), torch.eye(3).to_sparse_csr())  # ValueError: 'edge_index': expected
ours.SAGEConv(6, 4)(features(), graph().float())  # TypeError: 'edge_index': expected .. got float32
ours.SAGEConv(6, 4, flow=BACK)(features(), torch.eye(20).to_sparse_csr())
    # ValueError: SAGEConv: argument 'edge_index': expected edges
ours.SAGEConv(6, 4)(features(), graph() + NODES)  # ValueError: expected each source to be at least
ours.GATConv(3, 4, fill_value="most")  # ValueError: 'fill_value': expected a number
ours.RGCNConv(4, 4, 2, num_bases=2, num_blocks=2)  # ValueError: 'num_blocks': expected None
ours.RGCNConv(4, 4, 2, num_blocks=3)  # ValueError: 'num_blocks': expected a divisor of 4 .. got 3
ours.RGCNConv(6, 4, 2)(features(), graph())  # ValueError: 'edge_type': expected shape .. got None
ours.RGCNConv(6, 4, 2)(features(), graph(), torch.full((EDGES,), 2))
    # ValueError: RGCNConv: argument 'edge_type': expected each relation to be .. less than 2, got 2
ours.RGCNConv(6, 4, 2)(features(), torch.eye(20).to_sparse())  # TypeError: 'edge_index': expected a
ours.RGCNConv(6, 4, 2, num_blocks=2)(None, graph(6), torch.zeros(EDGES).long())
    # ValueError: RGCNConv: argument 'x': expected features with 'num_blocks'
ours.GCNConv(6, 4)(None, graph())  # TypeError: 'x': expected a tensor, got NoneType
ours.GCNConv(6, 4)(features(), graph(), torch.ones(3))  # ValueError: (90,), got (3,)
ours.GCNConv(6, 4)(features(), graph(), torch.ones(EDGES, 1))  # ValueError: (90,), got (90, 1)
ours.GCNConv(6, 4)(features(), graph(), [1.0] * EDGES)  # TypeError: 'edge_weight': .. got list
ours.GCNConv(3, 4, aggr_kwargs=torch.ones(2))  # ValueError: 'aggr_kwargs': expected None
ours.SAGEConv(6, 4, aggr=[])  # ValueError: 'aggr': expected one aggregation or more
ours.SAGEConv(6, 4)(features()[0], graph())  # ValueError: 'x': expected 2 or 3 .. got shape (6,)
ours.SAGEConv(6, 4, flow=BACK)((features(), features()), graph())  # ValueError: 'x': expected one
ours.SAGEConv(6, 4)(features(), graph() - NODES)  # IndexError: 'edge_index': expected each source
ours.GATConv(6, 4, heads=0)  # ValueError: GATConv: argument 'heads': expected 1 or more, got 0
ours.GATConv(6, 4, heads=True)  # TypeError: GATConv: argument 'heads': expected an integer
ours.GATConv(6, 4)(features()[None], graph())  # ValueError: 'x': expected 2 dimensions, got shape
ours.GATConv(6, 4, edge_dim=3)(features(), graph(), torch.ones(1, 3))
    # ValueError: GATConv: argument 'edge_attr': expected .. , got (1, 3)
ours.GATConv(6, 4, edge_dim=3)(features(), graph(), torch.ones(89, 3))
    # ValueError: GATConv: argument 'edge_attr': expected .. , got (89, 3)
ours.GATConv(6, 4, edge_dim=3)(features(), graph(), torch.ones(91, 3))
    # ValueError: GATConv: argument 'edge_attr': expected .. , got (91, 3)
ours.RGCNConv(6, 4, 2)(features(), graph(), [0] * EDGES)  # TypeError: 'edge_type': expected a
ours.RGCNConv(6, 4, 2)(features(), graph(), torch.zeros(EDGES))  # TypeError: 'edge_type': expected
ours.RGCNConv(6, 4, 2)(torch.tensor([0, 1, -1]), torch.zeros(2, 3).long(), torch.zeros(3).long())
    # ValueError: RGCNConv: argument 'x': expected integers from 0 to 5, got -1 to 1
    """,
    globals() | {"ours": ours},
)
