"""Graphs on many processes in the form that layers of :mod:`sparsetir.nn` use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from sparsetir.distributed import products
from sparsetir.nn.graph import FLOWS, Graph
from sparsetir.ops.operands import Operand, resolve
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


T = TypeVar("T")


class SpreadGraph(Graph):
    """Messages to own nodes, some of which come from other processes.

    graph : the :class:`DistGraph`
    weight : (nnz,) weights of its edges, or None for ones
    others : other edges to the same nodes, (own, own + halo), instead of the graph's
    """

    def __init__(
        self, graph: DistGraph, weight: Tensor | None, others: Operand | None = None
    ) -> None:
        self.graph, self.weight, self._others = graph, weight, others
        self.m = self.n = graph.own  # rows of features, which have no halo

    @property
    def operand(self) -> Operand:
        """The matrix (own, own + halo), without values; made on first use."""
        return self.graph.whole if self._others is None else self._others

    @property
    def col(self) -> Tensor:
        """The edges, (2, E)."""
        return self.graph.edge_index if self._others is None else self._others.col

    @classmethod
    def for_layer(
        cls, graph: DistGraph, caller: str, sources: int, targets: int, flow: str
    ) -> SpreadGraph:
        """See :meth:`DistGraph.graph_of_layer`."""
        if flow != FLOWS[0]:
            raise ValueError(
                f"{caller}: argument 'edge_index': expected edges (2, E) with flow={flow!r}, got a "
                "DistGraph, whose edges are where their targets are"
            )
        for ends, count in (("sources", sources), ("targets", targets)):
            if count != graph.own:
                expected = f"a DistGraph of {count} own nodes as the features of {ends} have rows"
                raise wrong(caller, "edge_index", expected, graph.own)
        return cls(graph, graph.values)

    def source_features(self, x: Tensor) -> Tensor:
        """Features (own + halo, ...) from x (own, ...); collective."""
        if not x.is_floating_point():  # such as numbers of nodes, below 2^53
            return products.with_halo(self.graph, x.double()).to(x.dtype)
        return products.with_halo(self.graph, x)

    def aggregate(self, x: Tensor, aggr: str, weight: Tensor | None = None) -> Tensor:
        """Reductions (own, feat) of x (own, feat), or (heads, own, feat); collective."""
        if self._others is not None:
            rows = self.source_features(x.transpose(0, -2)).transpose(0, -2)
            return self.reduce(rows, aggr, weight)
        weight = None if weight is None else weight.to(x.dtype)
        if weight is None and self.weight is not None:
            weight = torch.ones(self.graph.nnz, dtype=x.dtype, device=x.device)
        return products.spmm_by_heads(self.graph, x, aggr, weight)

    def remembered(
        self, key: object, make: Callable[[], T], compared: tuple[Tensor, ...] = ()
    ) -> T:
        """`make()`, cached by the graph; called each time if it depends on `compared`."""
        return make() if compared else self.graph.kept(key, make)

    def with_loops(self, nodes: int) -> tuple[Graph, Tensor]:
        """See :meth:`Graph.with_loops`; not collective."""

        def make() -> tuple[Operand, Tensor]:
            edges, kept = self.loops_added(nodes)
            size = (self.graph.own + self.graph.halo, self.graph.own)
            return resolve((edges, size)), kept

        operand, kept = self.graph.kept(("loops", nodes), make)
        return SpreadGraph(self.graph, None, operand), kept
