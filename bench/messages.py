"""Models of messages in raw torch, and a user's PyG layer, all of one form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing


class Raw(torch.nn.Module):
    """x_j * w, summed."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(channels, out)

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        h, (source, target) = self.lin(x), edge_index
        return self.add_up(h, target, self.message(h[target], h[source], w[:, None]))

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return x_j * w

    def add_up(self, h: Tensor, target: Tensor, message: Tensor) -> Tensor:
        return torch.zeros_like(h).index_add(0, target, message)


class Gate(Raw):
    """sigmoid(x_i * a + x_j) * w, by scatter."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out)
        self.a = torch.nn.Parameter(torch.rand(out))

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(x_i * self.a + x_j) * w

    def add_up(self, h: Tensor, target: Tensor, message: Tensor) -> Tensor:
        return h.new_zeros(h.shape).scatter_add_(0, target[:, None].expand_as(message), message)


class Distance(Raw):
    """Messages weighted by exp(-|x_i - x_j|^2)."""

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return torch.exp(-0.1 * (x_i - x_j).pow(2).sum(-1, keepdim=True)) * x_j * w


class Own(MessagePassing):
    """tanh(x_i * a - x_j) * w: a user's own layer."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(channels, out)
        self.a = torch.nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), w=w)

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x_i * self.a - x_j) * w.view(-1, 1)
