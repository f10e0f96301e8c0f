"""Graph convolution (Kipf and Welling, "Semi-supervised classification with graph convolutional
networks", 2017)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsetir.nn.conv import Conv, check_features, weights_first
from sparsetir.nn.graph import Graph, check_of_edges, has_edges
from sparsetir.nn.linear import Linear, zeros
from sparsetir.ops.registry import is_transformed
from sparsetir.reductions import LINEAR_NAMES
from sparsetir.runtime.refusals import wrong


def gcn_norm(
    graph: Graph,
    edge_weight: Tensor | None,
    self_loop: float | None,
    replace: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Normalised weights D^-1/2 A' D^-1/2 of the edges (E,) and of a loop at each node (n,).

    self_loop : weight of the loops that A' adds to A; None adds none, and returns no loop weights
    replace : whether to remove the loops of A; if edges have weights, these loops' weights replace
        `self_loop` at their nodes. Otherwise both count

    Edges are neither removed nor added, so that the cached pattern stays valid: removed loops get
    weight zero.
    """
    source, target = graph.sources.long(), graph.targets.long()
    weight = edge_weight
    if weight is None:
        weight = torch.ones(target.shape, dtype=dtype, device=target.device)
    loop = None
    if self_loop is not None:
        loop = torch.full((graph.m,), self_loop, dtype=weight.dtype, device=weight.device)
        if replace:
            is_loop = source == target
            if edge_weight is not None:
                # Other edges write past the last node.
                place = torch.where(is_loop, target, graph.m)
                loop = torch.cat([loop, loop.new_zeros(1)]).index_put((place,), weight)[:-1]
            weight = weight.masked_fill(is_loop, 0)
    zero = torch.zeros(graph.m, dtype=weight.dtype, device=weight.device)
    degree = (zero if loop is None else loop).index_add(0, target, weight)
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == torch.inf, 0)
    weight = scale[target] * weight * graph.source_features(scale)[source]
    return weight, None if loop is None else scale * scale * loop


class GCNConv(Conv):
    """x'_i = W sum of x_j e_ij / sqrt(d_i d_j) over neighbours j and i itself, + b.

    Arguments and parameters are those of `torch_geometric.nn.GCNConv`. The weight is applied before
    or after the sum, whichever is less work.

    Parameters
    ----------
    in_channels, out_channels : int
        Features; the first may be -1, to take it from the first input.
    improved : bool
        Give loops weight two, not one, if edges have weights.
    cached : bool
        Normalise once, and reuse the result.
    add_self_loops : bool, optional
        Make each node one of its own neighbours; by default the same as `normalize`.
    normalize : bool
        Divide by sqrt(d_i d_j).
    bias : bool
        Add b.
    sparse_features : bool
        Multiply dense features as sparse ones (:mod:`sparsetir.nn.linear`), as they are nearly all
        zero, such as bags of words. Not in PyG.
    **kwargs
        Arguments of PyG's `MessagePassing`.
    """

    in_channels: int
    out_channels: int
    improved: bool
    cached: bool
    add_self_loops: bool
    normalize: bool

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        sparse_features: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(**{"aggr": "add", **kwargs})
        self.sparse_features = sparse_features
        add_self_loops = normalize if add_self_loops is None else add_self_loops
        if add_self_loops and not normalize:
            raise wrong("GCNConv", "add_self_loops", "False where normalize=False", "True")
        if add_self_loops and self.aggr not in ("add", "sum"):
            raise wrong("GCNConv", "aggr", "'add' with self loops", f"{self.aggr!r}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.cached = improved, cached
        self.add_self_loops, self.normalize = add_self_loops, normalize
        self.lin: Linear = Linear(
            in_channels, out_channels, bias=False, glorot=True, sparse_features=self.sparse_features
        )
        self.bias: Parameter | None = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, and clear the cache."""
        self.lin.reset_parameters()
        zeros(self.bias)
        self._cached: tuple[Graph, Tensor | None, Tensor | None] | None = None

    def forward(self, x: Tensor, edge_index: object, edge_weight: Tensor | None = None) -> Tensor:
        """Run the layer.

        Parameters
        ----------
        x : (n, in_channels) Tensor
            Features, dense or sparse.
        edge_index : edges or sparse matrix
            As for :func:`sparsetir.ops.resolve`.
        edge_weight : (E,) Tensor, optional
            e_ij; by default ones, or the values of a matrix.

        Returns
        -------
        (n, out_channels) Tensor
        """
        if isinstance(x, (tuple, list)):
            raise wrong("GCNConv", "x", "one tensor, as sources are targets too", "a pair")
        check_features("GCNConv", x)
        graph, weight, loop = self._normalized(x, edge_index, edge_weight)
        linear = self.aggr in LINEAR_NAMES
        # Weights of another dtype may change that of the messages, after `lin` as in PyG.
        mixed = weight is not None and weight.dtype != x.dtype
        first = not linear or mixed or weights_first(x, self.lin.weight, self.out_channels)
        if first:
            x = self.lin(x)
        if weight is not None and mixed:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        out = graph.aggregate(x, self.aggr, weight)
        if loop is not None:
            out = torch.addcmul(out, x, loop[:, None].to(x.dtype))
        if not first:
            out = self.lin(out)
        return out if self.bias is None else out + self.bias

    def _normalized(
        self, x: Tensor, edge_index: object, edge_weight: Tensor | None
    ) -> tuple[Graph, Tensor | None, Tensor | None]:
        """The graph, and the normalised weights of edges and of loops."""
        if self.normalize and self._cached is not None:
            return self._cached
        nodes, edges, dtype = x.shape[-2], has_edges(edge_index), x.dtype
        graph = Graph.of("GCNConv", edge_index, nodes, nodes, self.flow)
        edge_values = graph.weight if edge_weight is None or not edges else edge_weight
        if edges and edge_values is not None:
            check_of_edges("GCNConv", "edge_weight", edge_values, graph)
        if not self.normalize:
            return graph, edge_values, None
        # PyG ignores `improved` without weights: all edges, including loops, then have weight one.
        improved = self.improved and edge_values is not None
        self_loop = (2.0 if improved else 1.0) if self.add_self_loops else None

        def make() -> tuple[Tensor, Tensor | None]:
            return gcn_norm(graph, edge_values, self_loop, edges, dtype)

        if edge_values is not None and edge_values.requires_grad and torch.is_grad_enabled():
            weight, loop = make()
        else:
            key = ("gcn_norm", self_loop, edges, dtype)
            weights = () if edge_values is None else (edge_values,)
            weight, loop = graph.remembered(key, make, weights)
        result = graph, weight, loop
        if self.cached and (torch.compiler.is_compiling() or not is_transformed()):
            self._cached = result
        return result
