"""Graph attention (Veličković et al., "Graph attention networks", 2018)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from sparsetir.nn.conv import Conv, pair, sizes
from sparsetir.nn.graph import FLOWS, Graph, check_of_edges, has_edges
from sparsetir.nn.linear import Linear, glorot, zeros
from sparsetir.ops.tensors import check_size
from sparsetir.runtime.refusals import wrong

FILLS = ("add", "sum", "mean", "max", "min", "mul")


class GATConv(Conv):
    """x'_i = sum of alpha_ij W x_j over neighbours j and i itself, + b, for each of several heads.

    alpha_ij is the softmax over j of LeakyReLU(a_src . W x_j + a_dst . W x_i + a_edge . W_e e_ij).
    Arguments and parameters are those of `torch_geometric.nn.GATConv`.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features, or a pair for sources and targets, which then have separate weights; -1 to take it
        from the first input.
    out_channels : int
        Features of a head.
    heads : int
        Number of heads.
    concat : bool
        Concatenate heads, rather than average them.
    negative_slope : float
        The slope of LeakyReLU.
    dropout : float
        Dropout of alpha, in training.
    add_self_loops : bool
        Make each node one of its own neighbours, once.
    edge_dim : int, optional
        Number of edge features e.
    fill_value : float, Tensor or str
        Features of self loops: a number, a tensor, or a reduction of the features of the node's
        incoming edges.
    bias : bool
        Add b.
    residual : bool
        Add a linear map of the targets' features.
    sparse_features : bool
        Multiply dense features as sparse ones (:mod:`sparsetir.nn.linear`), as they are nearly all
        zero, such as bags of words. Not in PyG.
    **kwargs
        Arguments of PyG's `MessagePassing`.

    Notes
    -----
    `torch.compile(fullgraph=True)` supports it with add_self_loops=False only, as the edges then
    depend on data.
    """

    in_channels: int | tuple[int, int]
    out_channels: int
    heads: int
    concat: bool
    negative_slope: float
    dropout: float
    add_self_loops: bool
    edge_dim: int | None
    residual: bool
    att_src: Parameter
    att_dst: Parameter
    res: Linear | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        sparse_features: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(**{"aggr": "add", **kwargs})
        self.sparse_features = sparse_features
        if isinstance(fill_value, str) and fill_value not in FILLS:
            expected = f"a number, a tensor, or one of {', '.join(FILLS)}"
            raise wrong("GATConv", "fill_value", expected, f"{fill_value!r}")
        check_size("GATConv", "heads", heads, 1)
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.concat, self.negative_slope, self.dropout = concat, negative_slope, dropout
        self.add_self_loops, self.edge_dim = add_self_loops, edge_dim
        self.fill_value, self.residual = fill_value, residual

        def projection(channels: int, sparse: bool = sparse_features) -> Linear:
            return Linear(
                channels, heads * out_channels, bias=False, glorot=True, sparse_features=sparse
            )

        def attention() -> Parameter:
            return Parameter(torch.empty(1, heads, out_channels))

        same = isinstance(in_channels, int)
        left, right = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        self.lin: Linear | None = projection(left) if same else None
        self.lin_src: Linear | None = None if same else projection(left)
        self.lin_dst: Linear | None = None if same else projection(right)
        self.att_src, self.att_dst = attention(), attention()
        self.lin_edge: Linear | None = None if edge_dim is None else projection(edge_dim, False)
        self.att_edge: Parameter | None = None if edge_dim is None else attention()
        channels = out_channels * (heads if concat else 1)
        self.res = None
        if residual:
            self.res = Linear(
                right, channels, bias=False, glorot=True, sparse_features=self.sparse_features
            )
        self.bias: Parameter | None = Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for part in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if part is not None:
                part.reset_parameters()
        glorot(self.att_src)
        glorot(self.att_dst)
        glorot(self.att_edge)
        zeros(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: object,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Run the layer.

        Parameters
        ----------
        x : (nodes, in_channels) Tensor or pair of Tensor
            Features; or a pair for sources and targets, the latter of which may be None.
        edge_index : edges or sparse matrix
            As for :func:`sparsetir.ops.resolve`.
        edge_attr : (E,) or (E, edge_dim) Tensor, optional
            Features of edges; by default the values of a matrix.
        size : (int, int), optional
            Numbers of sources and targets.
        return_attention_weights : bool, optional
            If true, return (result, (edges (2, E'), alpha (E', heads))), with the self loops after
            the edges.

        Returns
        -------
        Tensor
            (targets, heads * out_channels), or (targets, out_channels) unless concat.
        """
        sources, targets = pair("GATConv", x, self.flow, (2,))
        n, m = sizes("GATConv", sources, targets, size)
        residual = None if self.res is None or targets is None else self.res(targets)
        h_source, h_target = self._transformed(sources, targets)
        graph = Graph.of("GATConv", edge_index, n, m, self.flow)
        if edge_attr is None and not has_edges(edge_index):
            edge_attr = graph.weight
        if edge_attr is not None:
            check_of_edges("GATConv", "edge_attr", edge_attr, graph, (1, 2))
            edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
        if self.lin_edge is None:
            edge_attr = None
        if self.add_self_loops:
            graph, edge_attr = self._with_loops(graph, edge_attr, min(n, m))
        h_source = graph.source_features(h_source)
        alpha = self._attention(graph, h_source, h_target, edge_attr)
        heads = h_source.transpose(0, 1)
        out = graph.reduce(heads, self.aggr, F.dropout(alpha, self.dropout, self.training))
        out = out.transpose(0, 1).flatten(1) if self.concat else out.mean(0)
        out = out if residual is None else out + residual
        out = out if self.bias is None else out + self.bias
        if not return_attention_weights:
            return out
        return out, (graph.edges(), alpha.t())

    def _transformed(self, sources: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Transformed features of sources and of targets, (nodes, heads, out_channels)."""
        shape = (self.heads, self.out_channels)
        if self.lin is not None:
            h = self.lin(sources).unflatten(-1, shape)
            if targets is None or targets is sources:
                return h, None if targets is None else h
            return h, self.lin(targets).unflatten(-1, shape)
        assert self.lin_src is not None and self.lin_dst is not None
        h = self.lin_src(sources).unflatten(-1, shape)
        return h, None if targets is None else self.lin_dst(targets).unflatten(-1, shape)

    def _attention(
        self, graph: Graph, h_source: Tensor, h_target: Tensor | None, edge_attr: Tensor | None
    ) -> Tensor:
        """Weights of the messages, (heads, E), which add up to one at each target."""
        scores = (h_source * self.att_src).sum(-1).t()
        e = scores.index_select(1, graph.sources)
        if h_target is not None:
            e = e + (h_target * self.att_dst).sum(-1).t().index_select(1, graph.targets)
        if edge_attr is not None and self.lin_edge is not None:
            of_edges = self.lin_edge(edge_attr).unflatten(-1, (self.heads, self.out_channels))
            e = e + (of_edges * self.att_edge).sum(-1).t()
        return graph.softmax(F.leaky_relu(e, self.negative_slope))

    def _with_loops(
        self, graph: Graph, edge_attr: Tensor | None, nodes: int
    ) -> tuple[Graph, Tensor | None]:
        """The graph with exactly one loop at each of the first nodes, after the other edges."""
        looped, kept = graph.with_loops(nodes)
        if edge_attr is not None:
            edge_attr = edge_attr[kept]
            edge_attr = torch.cat(
                [edge_attr, self._loop_features(looped.edges(), edge_attr, nodes)]
            )
        return looped, edge_attr

    def _loop_features(self, edges: Tensor, edge_attr: Tensor, nodes: int) -> Tensor:
        """Features of loops, (nodes, edge_dim)."""
        shape = (nodes, *edge_attr.shape[1:])
        if not isinstance(self.fill_value, str):
            fill = torch.as_tensor(self.fill_value, dtype=edge_attr.dtype, device=edge_attr.device)
            return fill.expand(shape)
        reduce = {"add": "sum", "max": "amax", "min": "amin", "mul": "prod"}
        name = reduce.get(self.fill_value, self.fill_value)
        # PyG uses the second row of `edge_index`, even where it holds the sources.
        row = 1 if self.flow == FLOWS[0] else 0
        target = edges[row, : len(edge_attr)].long()
        index = target[:, None].expand_as(edge_attr)
        start = edge_attr.new_ones(shape) if name == "prod" else edge_attr.new_zeros(shape)
        return start.scatter_reduce(0, index, edge_attr, name, include_self=name in ("prod", "sum"))

    def __repr__(self) -> str:
        return f"GATConv({self.in_channels}, {self.out_channels}, heads={self.heads})"
