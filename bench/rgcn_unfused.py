"""The relational layer before it was one kernel: sparse sums, and a product for each relation.

What `sparsetir.nn.RGCNConv` computed its sums and means with. It stores a row of features for each
node of each relation that has edges there, twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsetir import nn, ops


class Patterns(NamedTuple):
    """Edges (2, k) that sums go by, and the rows of each relation.

    by_source, by_target : (rows of relations, ..): nodes at one end, and how many in each relation
    sent, gathered : edges from rows of sources to nodes, and from nodes to rows of targets
    table : edges from rows of a table (relation * nodes + node) to rows of targets
    joined : edges from rows of targets to nodes
    share : (E,) one in as many edges as the row of an edge's target has
    """

    by_source: tuple[Tensor, list[int]]
    by_target: tuple[Tensor, list[int]]
    sent: Tensor
    gathered: Tensor
    table: Tensor
    joined: Tensor
    share: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, edge_type: Tensor, nodes: int, relations: int) -> Patterns:
        """Of a square graph."""
        found = []
        for end in edge_index:
            key, place = torch.unique(edge_type * nodes + end, return_inverse=True)
            count = torch.bincount(key // nodes, minlength=relations).tolist()
            found.append((key % nodes, count, place))
        (sources, in_sources, of_source), (targets, in_targets, of_target) = found
        source, target = edge_index
        return cls(
            (sources, in_sources), (targets, in_targets), torch.stack([of_source, target]),
            torch.stack([source, of_target]),
            torch.stack([edge_type * nodes + source, of_target]),
            torch.stack([torch.arange(len(targets)), targets]),
            1 / torch.bincount(of_target)[of_target].float(),
        )  # fmt: skip


class Unfused(nn.RGCNConv):
    """Means in each relation; features of sources and targets are the same."""

    patterns: Patterns | None = None

    def forward(self, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
        """As :class:`sparsetir.nn.RGCNConv`, always for the same graph."""
        weight = self._full_weight()
        count, rows, _ = weight.shape
        nodes = rows if x is None else len(x)
        if self.patterns is None:
            self.patterns = Patterns.of(edge_index, edge_type, nodes, count)
        found = self.patterns
        if x is None:
            sums = _sums(found.table, weight.flatten(0, 1), len(found.by_target[0]), "mean")
            return _sums(found.joined, sums, nodes) + self.root + self.bias
        trained = 2 if torch.is_grad_enabled() and x.requires_grad else 1
        both = 2 if torch.is_grad_enabled() else 1
        if self.out_channels * both <= x.shape[1] * trained:  # fewer features pass over the edges
            sent = _by_relation(x[found.by_source[0]], found.by_source[1], weight)
            out = _sums(found.sent, sent, nodes, values=found.share)
        else:
            sums = _sums(found.gathered, x, len(found.by_target[0]), "mean")
            out = _sums(found.joined, _by_relation(sums, found.by_target[1], weight), nodes)
        return out + x @ self.root + self.bias


def _sums(edges: Tensor, x: Tensor, targets: int, reduce: str = "sum", values: Any = None) -> Any:
    return ops.spmm((edges, (len(x), targets)), x, reduce, values)


def _by_relation(x: Tensor, count: list[int], weight: Tensor) -> Tensor:
    parts = zip(x.split(count), weight.unbind(), strict=True)
    return torch.cat([part @ w for part, w in parts if len(part)])
