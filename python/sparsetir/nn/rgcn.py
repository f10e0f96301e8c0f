"""Relational graph convolution (Schlichtkrull et al., "Modeling relational data with graph
convolutional networks", 2018)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsetir.nn.conv import Conv, pair
from sparsetir.nn.graph import Graph, is_edges, is_spread, remembered, reversed_edges, with_others
from sparsetir.nn.linear import glorot, zeros
from sparsetir.ops.operands import plain_edges
from sparsetir.ops.prepared import PreparedRelations
from sparsetir.ops.relations import check_relations, edge_copies
from sparsetir.ops.rgms import rgms
from sparsetir.ops.tensors import INDEX_DTYPES, check_size
from sparsetir.reductions import LINEAR_NAMES
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

# Rows of all relations per edge, from which an epoch is faster without computing them all: with 4
# it takes as long on a Zen 5, with 2 it takes 1.4 times as long, with 5 0.7 times.
ROWS_FOR_AN_EDGE = 4


class Extrema(NamedTuple):
    """Patterns for extrema in relations, whose rows are the targets that a relation has edges to.

    count : number of rows of each relation
    to_rows : (2, E) edges from nodes, or from rows (relation * nodes + node) of a table, to rows
    to_targets : (2, rows) edges from rows to nodes
    """

    count: list[int]
    to_rows: Tensor
    to_targets: Tensor

    @classmethod
    def of(
        cls, edge_index: Tensor, edge_type: Tensor, n: int, m: int, relations: int, of_table: bool
    ) -> Extrema:
        (source, target), kind = edge_index.long(), edge_type.long()
        key, row = torch.unique(kind * m + target, return_inverse=True)
        count = torch.bincount(key // max(m, 1), minlength=relations).tolist()
        source = kind * n + source if of_table else source
        order = torch.arange(len(key), device=key.device)
        return cls(count, torch.stack([source, row]), torch.stack([order, key % max(m, 1)]))


class RGCNConv(Conv):
    """x'_i = W_root x_i + sum over relations r of W_r mean of x_j over neighbours j in r, + b.

    Arguments and parameters are those of `torch_geometric.nn.RGCNConv`. Sums and means use
    :func:`sparsetir.ops.rgms`, which stores no features per edge. For other reductions, rows are
    multiplied by the weights of each relation separately.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features, or a pair for sources and targets; without features, the number of nodes.
    out_channels : int
        Features of the result.
    num_relations : int
        Number of relations, 1 or more.
    num_bases : int, optional
        Number of matrices that each W_r is a linear combination of.
    num_blocks : int, optional
        Number of diagonal blocks of each W_r, which is zero elsewhere.
    aggr : str
        The reduction within a relation, as for :func:`sparsetir.ops.spmm`.
    root_weight : bool
        Add the term of W_root.
    is_sorted : bool
        Accepted for compatibility; has no effect.
    bias : bool
        Add b.
    **kwargs
        Arguments of PyG's `MessagePassing`.
    """

    in_channels: int | tuple[int, int]
    out_channels: int
    num_relations: int
    num_bases: int | None
    num_blocks: int | None
    is_sorted: bool
    in_channels_l: int

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(**{"aggr": aggr, **kwargs})
        if num_bases is not None and num_blocks is not None:
            raise wrong("RGCNConv", "num_blocks", "None with 'num_bases'", num_blocks)
        check_size("RGCNConv", "num_relations", num_relations, 1)
        left, right = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        if num_blocks is not None and (left % num_blocks or out_channels % num_blocks):
            raise wrong(
                "RGCNConv", "num_blocks", f"a divisor of {left} and {out_channels}", num_blocks
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations, self.num_bases, self.num_blocks = num_relations, num_bases, num_blocks
        self.is_sorted, self.in_channels_l = is_sorted, left
        shape: tuple[int, ...] = (num_relations, left, out_channels)
        if num_bases is not None:
            shape = (num_bases, left, out_channels)
        elif num_blocks is not None:
            shape = (num_relations, num_blocks, left // num_blocks, out_channels // num_blocks)
        self.weight: Parameter = Parameter(torch.empty(shape))
        of_bases = None if num_bases is None else torch.empty(num_relations, num_bases)
        self.comp: Parameter | None = None if of_bases is None else Parameter(of_bases)
        self.root: Parameter | None = (
            Parameter(torch.empty(right, out_channels)) if root_weight else None
        )
        self.bias: Parameter | None = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        glorot(self.weight)
        glorot(self.comp)
        glorot(self.root)
        zeros(self.bias)

    def forward(
        self,
        x: Tensor | None | tuple[Tensor | None, Tensor],
        edge_index: object,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Parameters
        ----------
        x : (nodes, in_channels) Tensor, pair of Tensor, or None
            Features, or a pair for sources and targets; integers (nodes,) select rows of the
            weights; None selects all rows in order.
        edge_index : (2, E) Tensor or sparse matrix
            Edges; or a :class:`sparsetir.distributed.DistGraph`, for its own edges; or the result
            of `ops.prepare(edge_index, size, edge_type=..., num_relations=...)`, without
            `edge_type`.
        edge_type : (E,) Tensor, optional
            Relation of each edge, from 0 to num_relations - 1.

        Returns
        -------
        (targets, out_channels) Tensor
        """
        if x is None:
            x = self._all_rows(edge_index)
        elif isinstance(x, (tuple, list)) and x[0] is None:
            x = (self._all_rows(edge_index), x[1])
        sources, targets = pair("RGCNConv", x, self.flow, (1, 2))
        targets = sources if targets is None else targets
        sources, edge_index = with_others("RGCNConv", sources, edge_index, len(targets), self.flow)
        graph = self._graph(edge_index, edge_type, len(sources), len(targets))
        if not sources.is_floating_point():
            out = self._from_rows(graph, sources, len(targets))
        elif self._sums:
            out = rgms(sources, self._full_weight(), *graph, None, self._reduce, len(targets))
        else:
            out = self._extrema(graph, sources, len(targets))
        if self.root is not None:
            by_features = targets.is_floating_point()
            if not by_features and targets is not sources:
                _check_rows(targets, len(self.root))
            if by_features and _owned(out, targets, self.root):
                out.addmm_(targets, self.root)
            else:
                out = _added(out, targets @ self.root if by_features else self.root[targets])
        return out if self.bias is None else _added(out, self.bias)

    def _all_rows(self, edge_index: Any) -> Tensor:
        if is_spread(edge_index):
            return edge_index.nodes
        return torch.arange(self.in_channels_l, device=self.weight.device)

    @property
    def _sums(self) -> bool:
        return self.aggr in LINEAR_NAMES

    @property
    def _reduce(self) -> str:
        return "mean" if self.aggr == "mean" else "sum"

    def _graph(
        self, edge_index: Any, edge_type: Tensor | None, n: int, m: int
    ) -> tuple[Tensor, Tensor]:
        """Edges from sources to targets, and their relations; the same tensors in each call."""
        if isinstance(edge_index, PreparedRelations):
            if edge_type is not None:
                raise TypeError(
                    "RGCNConv: argument 'edge_type': expected None for prepared relations"
                )
            if self.flow != "source_to_target":
                raise wrong(
                    "RGCNConv", "edge_index", f"edges with flow={self.flow!r}", f"{edge_index!r}"
                )
            return edge_index.edges_for("RGCNConv", n, m, self.num_relations)
        if not is_edges(edge_index):
            expected = "a (2, E) tensor of edges"
            raise wrong("RGCNConv", "edge_index", expected, type(edge_index).__name__, TypeError)
        if edge_type is not None and not _is_integers(edge_type):
            raise TypeError(
                "RGCNConv: argument 'edge_type': expected a tensor of integers, got "
                + (dtype_name(edge_type) if isinstance(edge_type, Tensor) else repr(edge_type))
            )
        if edge_type is None or edge_type.shape != edge_index.shape[1:]:
            got = None if edge_type is None else tuple(edge_type.shape)
            raise wrong("RGCNConv", "edge_type", f"shape {tuple(edge_index.shape[1:])}", got)
        edges = edge_index if self.flow == "source_to_target" else reversed_edges(edge_index)
        kind = edge_type
        if kind.dtype not in INDEX_DTYPES:
            kind = remembered((edge_type,), "long", edge_type.long)
        if torch.compiler.is_compiling():  # the operator checks the numbers
            return edges, kind
        edges, kind = edge_copies(edges, kind)
        count = self.num_relations

        def check() -> None:
            plain = plain_edges("RGCNConv", "edge_index", edges)[0]
            check_relations("RGCNConv", plain, kind, n, m, count)

        remembered((edges, kind), ("checked", n, m, count), check)
        return edges, kind

    def _extrema(
        self, graph: tuple[Tensor, Tensor], x: Tensor, m: int, of_table: bool = False
    ) -> Tensor:
        """Extrema in each relation, which are added at targets; x : features, or the table."""
        count = self.num_relations
        sizes = len(x) // count if of_table else len(x), m, count, of_table
        known = remembered(graph, ("extrema", *sizes), lambda: Extrema.of(*graph, *sizes))
        rows = known.to_targets.shape[1]
        at_rows = Graph.of("RGCNConv", known.to_rows, len(x), rows).aggregate(x, self.aggr)
        if not of_table:
            at_rows = self._by_relation(at_rows, known.count)
        return Graph.of("RGCNConv", known.to_targets, rows, m).aggregate(at_rows, "sum")

    def _from_rows(self, graph: tuple[Tensor, Tensor], index: Tensor, m: int) -> Tensor:
        """The result where messages are rows of the weights."""
        if self.num_blocks is not None:
            raise wrong("RGCNConv", "x", "features with 'num_blocks'", "integers")
        weight, rows = self.weight, self.in_channels_l
        if rows != len(index) or not _is_range(index):
            _check_rows(index, rows)
            weight, rows = weight[:, index], len(index)
        count = self.num_relations
        if self.comp is not None:
            if self._sums and ROWS_FOR_AN_EDGE * graph[1].numel() <= count * rows:
                return self._from_bases(graph, self.comp, weight, m)
            weight = (self.comp @ weight.flatten(1)).unflatten(1, weight.shape[1:])
        table = weight.reshape(count * rows, self.out_channels)
        if self._sums:
            edges, share = self._from_table(graph, rows, m)
            sums = Graph.of("RGCNConv", edges, len(table), m)
            return sums.aggregate(table, "sum", share if self.aggr == "mean" else None)
        return self._extrema(graph, table, m, of_table=True)

    def _from_bases(
        self, graph: tuple[Tensor, Tensor], comp: Tensor, weight: Tensor, m: int
    ) -> Tensor:
        """The result where messages are rows of weights that combine bases, (bases, rows, out).

        A relation's coefficients are multiplied by the bases' rows of the edge's source: this is
        RGMS itself, with sources in the role of relations, and relations in that of nodes. The rows
        of all relations, most of which no edge needs, are never computed.
        """

        def make() -> tuple[Tensor, Tensor, Tensor | None]:
            (source, target), kind = graph[0].long(), graph[1].long()
            order = torch.argsort(kind, stable=True)  # the kernels' order: none is moved again
            order = order[torch.argsort((source * m + target)[order], stable=True)]
            share = self._shares(graph, m).to(comp.dtype)[order] if self.aggr == "mean" else None
            return torch.stack([kind, target])[:, order], source[order], share

        key = ("bases", m, self.aggr, comp.dtype)
        edges, source, share = remembered(graph, key, make)
        return rgms(comp, weight.transpose(0, 1), edges, source, share, "sum", m)

    def _shares(self, graph: tuple[Tensor, Tensor], m: int) -> Tensor:
        """For each edge, one over its target's edges in the same relation, (E,) float64."""
        _, row = torch.unique(graph[1].long() * m + graph[0][1], return_inverse=True)
        return 1 / torch.bincount(row)[row].double()

    def _from_table(self, graph: tuple[Tensor, Tensor], n: int, m: int) -> tuple[Tensor, Tensor]:
        """Edges (2, E) from rows (relation * n + source) of a table to targets, and their shares in
        a mean, (E,)."""

        def make() -> tuple[Tensor, Tensor]:
            (source, target), kind = graph[0].long(), graph[1].long()
            return torch.stack([kind * n + source, target]), self._shares(graph, m)

        return remembered(graph, ("table", n, m), make)

    def _by_relation(self, x: Tensor, count: list[int]) -> Tensor:
        """Multiply each row by the weights of its relation; rows of a relation are contiguous."""
        weight = self._full_weight()
        parts = zip(x.split(count), weight.unbind(), strict=True)
        results = [self._times(part, w) for part, w in parts if len(part)]
        # Without edges: no rows, but computed from the weights, so that these have a gradient.
        return torch.cat(results or [self._times(x, weight[0])])

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.num_blocks is None:
            return x @ weight
        blocks = x.unflatten(1, (self.num_blocks, -1))
        return torch.einsum("abc,bcd->abd", blocks, weight).reshape(len(x), self.out_channels)

    def _full_weight(self) -> Tensor:
        """The weight of each relation: (in, out), or (blocks, in / blocks, out / blocks)."""
        if self.comp is None:
            return self.weight
        return (self.comp @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])

    def __repr__(self) -> str:
        return (
            f"RGCNConv({self.in_channels}, {self.out_channels}, num_relations={self.num_relations})"
        )


def _owned(out: Tensor, *terms: Tensor) -> bool:
    """Whether a layer may add to its result in place, as no gradient needs it."""
    return not torch.is_grad_enabled() and all(x.dtype is out.dtype for x in terms)


def _added(out: Tensor, term: Tensor) -> Tensor:
    """The sum, in place if `out` is the layer's own."""
    return out.add_(term) if _owned(out, term) else out + term


def _is_integers(x: object) -> bool:
    if not isinstance(x, Tensor) or x.dtype is torch.bool:
        return False
    return not x.is_floating_point() and not x.is_complex()


def _check_rows(index: Tensor, rows: int) -> None:
    """Raise unless the indices are rows of the weights."""
    if not _is_integers(index) or index.dim() != 1:
        expected = "features (nodes, in_channels) or integers (nodes,)"
        raise wrong("RGCNConv", "x", expected, f"{dtype_name(index)} of shape {tuple(index.shape)}")
    if index.numel() and not 0 <= index.min() <= index.max() < rows:
        expected = f"integers from 0 to {rows - 1}"
        raise wrong("RGCNConv", "x", expected, f"{int(index.min())} to {int(index.max())}")


def _is_range(index: Tensor) -> bool:
    """Whether the index is 0, 1, 2 and so on."""
    return torch.equal(index, torch.arange(len(index), dtype=index.dtype, device=index.device))
