"""GraphSAGE (Hamilton et al., "Inductive representation learning on large graphs", 2017)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetir.nn.conv import Conv, pair, sizes, weights_first
from sparsetir.nn.graph import Graph, check_aggr
from sparsetir.nn.linear import Linear, linear
from sparsetir.reductions import LINEAR_NAMES
from sparsetir.runtime.refusals import wrong

# Ratio of input to output features, from which one product with the weights of neighbours and of
# the node itself is faster than two, as most of the time goes into reading features.
WIDE = 4


class SAGEConv(Conv):
    """x'_i = W_1 x_i + W_2 mean of x_j over neighbours j + b.

    Arguments and parameters are those of `torch_geometric.nn.SAGEConv`; `lin_l` is W_2 with b,
    `lin_r` is W_1. W_2 is applied before or after a sum or mean, whichever is less work.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features, or a pair for sources and targets; -1 to take it from the first input.
    out_channels : int
        Features of the result.
    aggr : str or list of str
        The reduction, as for :func:`sparsetir.ops.spmm`; for a list of them the results are
        concatenated.
    normalize : bool
        Divide results by their Euclidean norms.
    root_weight : bool
        Add the term of W_1.
    project : bool
        Apply a linear map and a ReLU to sources first.
    bias : bool
        Add b.
    sparse_features : bool
        Multiply dense features as sparse ones (:mod:`sparsetir.nn.linear`), as they are nearly all
        zero, such as bags of words. Not in PyG.
    **kwargs
        Arguments of PyG's `MessagePassing`.
    """

    aggr: Any
    in_channels: int | tuple[int, int]
    out_channels: int
    normalize: bool
    root_weight: bool
    project: bool

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str | list[str] = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        sparse_features: bool = False,
        **kwargs: Any,
    ) -> None:
        several = isinstance(aggr, tuple | list)
        if several and not aggr:
            raise wrong("SAGEConv", "aggr", "one aggregation or more", "none")
        super().__init__(aggr[0] if several else aggr, **kwargs)
        self.sparse_features = sparse_features
        if several:
            self.aggr = [check_aggr("SAGEConv", a) for a in aggr]
        self.in_channels, self.out_channels = in_channels, out_channels
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        left, right = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        if left <= 0 and (project or several):
            expected = "a number of features with project=True or several aggregations"
            raise wrong("SAGEConv", "in_channels", expected, in_channels)
        if project:
            self.lin: Linear = Linear(left, left)
        width = left * (len(aggr) if several else 1)
        self.lin_l: Linear = Linear(
            width, out_channels, bias=bias, sparse_features=self.sparse_features
        )
        if root_weight:
            self.lin_r: Linear = Linear(
                right, out_channels, bias=False, sparse_features=self.sparse_features
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for part in self.children():
            if isinstance(part, Linear):
                part.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: object,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Run the layer.

        Parameters
        ----------
        x : (nodes, in_channels) Tensor or pair of Tensor
            Features, or those of (sources, targets); may be sparse matrices. Those of targets may
            be None.
        edge_index : edges or sparse matrix
            As for :func:`sparsetir.ops.resolve`.
        size : (int, int), optional
            Sources and targets.

        Returns
        -------
        (targets, out_channels) Tensor
        """
        sources, targets = pair("SAGEConv", x, self.flow)
        graph = Graph.of(
            "SAGEConv", edge_index, *sizes("SAGEConv", sources, targets, size), self.flow
        )
        if self.project:
            sources = self.lin(sources).relu()
        self.lin_l.materialize(sources.shape[-1])
        roots = targets if self.root_weight else None
        if roots is not None:
            self.lin_r.materialize(roots.shape[-1])
        linear_sum = self.aggr in LINEAR_NAMES
        if linear_sum and weights_first(sources, self.lin_l.weight, self.out_channels):
            out = self._weights_first(graph, sources, roots)
        else:
            out = self._weights_last(graph, sources, roots)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _weights_first(self, graph: Graph, x: Tensor, own: Tensor | None) -> Tensor:
        """The results if features are multiplied before they are summed; own : those of targets."""
        weight, bias = self.lin_l.weight, self.lin_l.bias
        known = self.lin_l.converted(x)
        root: Tensor | None = bias
        dense = known is x and x.layout is torch.strided
        if own is x and dense and x.shape[-1] >= WIDE * self.out_channels:
            both = torch.cat([weight, self.lin_r.weight])
            bias = None if bias is None else F.pad(bias, (self.out_channels, 0))
            h, root = F.linear(x, both, bias).split(self.out_channels, -1)
        else:
            h = linear(known, weight)
            if own is not None:
                root = linear(known, self.lin_r.weight, bias) if own is x else self._root(own, bias)
        out = graph.aggregate(h, self.aggr, graph.weight)
        return out if root is None else out + root

    def _weights_last(self, graph: Graph, x: Tensor, own: Tensor | None) -> Tensor:
        """The results if sums over neighbours are multiplied."""
        x = x if x.layout is torch.strided else x.to_dense()
        every = [self.aggr] if isinstance(self.aggr, str) else self.aggr
        if len(every) == 1:
            sums = [graph.aggregate(x, every[0], graph.weight)]
        else:
            x = graph.source_features(x)
            sums = [graph.reduce(x, aggr, graph.weight) for aggr in every]
        gathered = torch.cat(sums, -1) if len(sums) > 1 else sums[0]
        out = linear(gathered, self.lin_l.weight, self.lin_l.bias)
        return out if own is None else out + self._root(own)

    def _root(self, own: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply `lin_r` to features of targets."""
        return linear(self.lin_r.converted(own), self.lin_r.weight, bias)

    def __repr__(self) -> str:
        return f"SAGEConv({self.in_channels}, {self.out_channels}, aggr={self.aggr})"
