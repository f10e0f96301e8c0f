"""Layers on graphs without edges, or without nodes."""

import pytest
import torch

from sparsetir import nn

NONE = torch.zeros(2, 0, dtype=torch.int64)


@pytest.mark.parametrize("nodes, loops", [(3, False), (0, False), (0, True)])
def test_gat(nodes, loops):
    layer = nn.GATConv(4, 2, heads=3, add_self_loops=loops)
    out = layer(torch.randn(nodes, 4), NONE)
    assert out.shape == (nodes, 6) and not out.any()
    out.sum().backward()


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2}, {"aggr": "max"}])
@pytest.mark.parametrize("features", [4, 64])  # sums first, and weights first
def test_gradients_of_rgcn_are_zeros(features, options):
    layer = nn.RGCNConv(features, 2, 3, root_weight=False, bias=False, **options)
    out = layer(torch.randn(3, features), NONE, NONE[0])
    assert out.shape == (3, 2) and not out.any()
    out.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape and not layer.weight.grad.any()
