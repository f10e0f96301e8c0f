"""What layers refuse, and how it is said."""

import pytest
import torch

from sparsetir import nn as ours

NODES, EDGES, FEATURES = 20, 90, 6


def graph(nodes=NODES):
    return torch.randint(0, nodes - 1, (2, EDGES))


def features():
    return torch.randn(NODES, FEATURES)


BACK = "target_to_source"
REFUSED = [
    (lambda: ours.GCNConv(3, 4, aggr="median"), ValueError,
     "GCNConv: argument 'aggr': expected 'sum', 'add', 'mean', .* 'amin', got 'median'"),
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
     "SAGEConv: argument 'edge_index': expected an edge_index of int32 or int64, got float32"),
    (lambda: ours.SAGEConv(6, 4, flow=BACK)(features(), torch.eye(20).to_sparse_csr()), ValueError,
     "SAGEConv: argument 'edge_index': expected edges"),
    (lambda: ours.SAGEConv(6, 4)(features(), graph() + NODES), ValueError,
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
    (lambda: ours.GCNConv(6, 4)(None, graph()), TypeError,
     "GCNConv: argument 'x': expected a tensor, got NoneType"),
    (lambda: ours.GCNConv(6, 4)(features(), graph(), torch.ones(3)), ValueError,
     r"GCNConv: argument 'edge_weight': expected shape \(90,\), got \(3,\)"),
    (lambda: ours.GCNConv(6, 4)(features(), graph(), torch.ones(EDGES, 1)), ValueError,
     r"GCNConv: argument 'edge_weight': expected shape \(90,\), got \(90, 1\)"),
    (lambda: ours.GCNConv(6, 4)(features(), graph(), [1.0] * EDGES), TypeError,
     "GCNConv: argument 'edge_weight': expected a dense tensor, got list"),
    (lambda: ours.GCNConv(3, 4, aggr_kwargs=torch.ones(2)), ValueError,
     "GCNConv: argument 'aggr_kwargs': expected None"),
    (lambda: ours.SAGEConv(6, 4, aggr=[]), ValueError,
     "SAGEConv: argument 'aggr': expected one aggregation or more"),
    (lambda: ours.SAGEConv(6, 4)(features()[0], graph()), ValueError,
     r"SAGEConv: argument 'x': expected 2 or 3 dimensions, got shape \(6,\)"),
    (lambda: ours.SAGEConv(6, 4, flow=BACK)((features(), features()), graph()), ValueError,
     "SAGEConv: argument 'x': expected one tensor with flow='target_to_source', got a pair"),
    (lambda: ours.SAGEConv(6, 4)(features(), graph() - NODES), IndexError,
     "SAGEConv: argument 'edge_index': expected each source to be at least 0"),
    (lambda: ours.GATConv(6, 4, heads=0), ValueError,
     "GATConv: argument 'heads': expected 1 or more, got 0"),
    (lambda: ours.GATConv(6, 4, heads=True), TypeError,
     "GATConv: argument 'heads': expected integers"),
    (lambda: ours.GATConv(6, 4)(features()[None], graph()), ValueError,
     "GATConv: argument 'x': expected 2 dimensions, got shape"),
    *((lambda rows=rows: ours.GATConv(6, 4, edge_dim=3)(features(), graph(), torch.ones(rows, 3)),
       ValueError, rf"GATConv: argument 'edge_attr': expected .*, got \({rows}, 3\)")
      for rows in (1, EDGES - 1, EDGES + 1)),
    (lambda: ours.RGCNConv(6, 4, 2)(features(), graph(), [0] * EDGES), TypeError,
     "RGCNConv: argument 'edge_type': expected a tensor of integers"),
    (lambda: ours.RGCNConv(6, 4, 2)(features(), graph(), torch.zeros(EDGES)), TypeError,
     "RGCNConv: argument 'edge_type': expected a tensor of integers, got float32"),
    (lambda: ours.RGCNConv(6, 4, 2)(torch.tensor([0, 1, -1]), torch.zeros(2, 3).long(),
                                    torch.zeros(3).long()), ValueError,
     "RGCNConv: argument 'x': expected integers from 0 to 5, got -1 to 1"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, error, text", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong()
