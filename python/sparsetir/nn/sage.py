"""GraphSAGE (Hamilton et al., "Inductive representation learning on large graphs", 2017)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetir.nn.conv import Conv, pair, sizes, weights_first
from sparsetir.nn.graph import Graph, check_aggr
from sparsetir.nn.linear import Linear, linear

__all__ = ["SAGEConv"]


class SAGEConv(Conv):
    """x'_i = W_1 x_i + W_2 mean of x_j over neighbours j + b.

    Arguments and parameters as `torch_geometric.nn.SAGEConv`; `lin_l` is W_2 with b, `lin_r` is
    W_1. W_2 is multiplied by before or after a sum or mean, whichever is less work.

    in_channels : features, or a pair of those of sources and of targets; -1 if the first input is
        to tell
    aggr : "mean", "sum", "add", "max" or "min"; of a list of them the results are put side by side
    normalize : divide results by their Euclidean norms
    root_weight : with W_1
    project : a linear map and a ReLU of sources before
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str | list[str] = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        several = isinstance(aggr, tuple | list)
        super().__init__(aggr[0] if several else aggr, **kwargs)
        if several:
            self.aggr = [check_aggr("SAGEConv", a) for a in aggr]
        self.in_channels, self.out_channels = in_channels, out_channels
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        left, right = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        if left <= 0 and (project or several):
            raise ValueError(
                "SAGEConv: argument 'in_channels': expected a number of features with "
                f"project=True or several aggregations, got {in_channels}"
            )
        if project:
            self.lin = Linear(left, left)
        self.lin_l = Linear(left * (len(aggr) if several else 1), out_channels, bias=bias)
        if root_weight:
            self.lin_r = Linear(right, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for part in self.children():
            if isinstance(part, Linear):
                part.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Any,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """(targets, out_channels), of features (nodes, in_channels) or those of (sources, targets).

        Features may be sparse matrices. Those of targets may be None; `size` then says how many
        sources and targets there are.
        """
        sources, targets = pair(x)
        graph = Graph.of(
            "SAGEConv", edge_index, *sizes("SAGEConv", sources, targets, size), self.flow
        )
        if self.project:
            sources = self.lin(sources).relu()
        self.lin_l.materialize(sources.shape[-1])
        out, bias = self._neighbours(graph, sources)
        if self.root_weight and targets is not None:
            self.lin_r.materialize(targets.shape[-1])
            out = out + linear(targets, self.lin_r.weight, bias)
        elif bias is not None:
            out = out + bias
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _neighbours(self, graph: Graph, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`lin_l` of what neighbours send, but for a bias that is still to be added."""
        weight, bias = self.lin_l.weight, self.lin_l.bias
        linear_sum = self.aggr in ("add", "sum", "mean")
        if linear_sum and weights_first(x, weight, self.out_channels):
            return graph.aggregate(linear(x, weight), self.aggr, graph.weight), bias
        x = x if x.layout is torch.strided else x.to_dense()
        every = [self.aggr] if isinstance(self.aggr, str) else self.aggr
        found = [graph.aggregate(x, aggr, graph.weight) for aggr in every]
        return linear(torch.cat(found, -1) if len(found) > 1 else found[0], weight, bias), None

    def __repr__(self) -> str:
        return f"SAGEConv({self.in_channels}, {self.out_channels}, aggr={self.aggr})"
