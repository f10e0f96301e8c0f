"""Graphs as arguments of layers, and reductions over neighbours."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsetir.ops.cache import kept, private, same
from sparsetir.ops.messages import softmax_by_heads
from sparsetir.ops.operands import Operand, Prepared, resolve
from sparsetir.ops.products import spmm_by_heads
from sparsetir.ops.registry import is_transformed
from sparsetir.ops.tensors import check_strided
from sparsetir.reductions import REDUCTION_NAMES
from sparsetir.runtime.refusals import wrong

T = TypeVar("T")
FLOWS = ("source_to_target", "target_to_source")


class Graph:
    """Messages from n sources to m targets.

    operand : the adjacency matrix for operators, without values
    weight : (E,) weights of the edges, or None for ones
    """

    def __init__(self, operand: Operand) -> None:
        self.operand, self.weight = operand._replace(values=None), operand.values
        self.m, self.n, self.col = operand.m, operand.n, operand.col

    @classmethod
    def of(
        cls, caller: str, edge_index: Any, sources: int, targets: int, flow: str = FLOWS[0]
    ) -> Graph:
        """Make a graph from the argument `edge_index` of a layer; caller : the layer's name.

        Raises ValueError for other sizes, and the errors of :func:`resolve`.
        """
        if is_spread(edge_index):
            return edge_index.graph_of_layer(caller, sources, targets, flow)
        if is_edges(edge_index):
            edge_index = edge_index if flow == FLOWS[0] else reversed_edges(edge_index)
            return cls(resolve((edge_index, (sources, targets)), caller=caller, name="edge_index"))
        if flow != FLOWS[0]:
            raise wrong(
                caller, "edge_index", f"edges (2, E) with flow={flow!r}", type(edge_index).__name__
            )
        operand = resolve(edge_index, caller=caller, name="edge_index")
        if (operand.m, operand.n) != (targets, sources):
            expected = f"a matrix of {targets} targets x {sources} sources as the features have"
            raise wrong(caller, "edge_index", expected, f"{operand.m} x {operand.n}")
        return cls(operand)

    @property
    def sources(self) -> Tensor:
        """The source of each edge, (E,)."""
        return self.col[0] if self.col.dim() == 2 else self.col

    @property
    def targets(self) -> Tensor:
        """The target of each edge, (E,)."""
        if self.col.dim() == 2:
            return self.col[1]
        rowptr, edges = self.operand.rowptr, self.col.shape[0]
        rows = torch.arange(self.m, dtype=rowptr.dtype, device=rowptr.device)
        return torch.repeat_interleave(rows, rowptr[1:] - rowptr[:-1], output_size=edges)

    def edges(self) -> Tensor:
        """Sources and targets, (2, E); always the same tensor for the same pattern."""
        if self.col.dim() == 2:
            return self.col
        tensors = (self.col, self.operand.rowptr)
        return remembered(tensors, "edges", lambda: torch.stack([self.sources, self.targets]))

    def aggregate(self, x: Tensor, aggr: str, weight: Tensor | None = None) -> Tensor:
        """Reduce the messages at each target, (m, feat); zero without messages.

        x : (n, feat) features of sources; or (heads, n, feat)
        weight : (E,) or (heads, E) factors of the messages
        """
        return self.reduce(x, aggr, weight)

    def source_features(self, x: Tensor) -> Tensor:
        """Features in the numbering of :attr:`sources`, from x (n, ...): if nodes are spread over
        processes, including those of others."""
        return x

    def reduce(self, x: Tensor, aggr: str, weight: Tensor | None = None) -> Tensor:
        """Reduce like :meth:`aggregate`, for features from :meth:`source_features`."""
        weight = None if weight is None else weight.to(x.dtype)
        return spmm_by_heads(self.operand, x, REDUCTION_NAMES[aggr], weight)

    def remembered(
        self, key: object, make: Callable[[], T], compared: tuple[Tensor, ...] = ()
    ) -> T:
        """:func:`remembered` for this graph's pattern."""
        return remembered((self.operand.rowptr, self.col), key, make, compared)

    def with_loops(self, nodes: int) -> tuple[Graph, Tensor]:
        """The graph with exactly one loop at each of the first nodes, after the other edges; and
        the positions of the remaining edges, (E',)."""
        key = ("loops", self.m, self.n, nodes)

        def make() -> tuple[Operand, Tensor]:
            edges, kept = self.loops_added(nodes)
            return resolve((edges, (self.n, self.m)), caller="loops"), kept

        operand, kept = self.remembered(key, make)
        return Graph(operand), kept

    def loops_added(self, nodes: int) -> tuple[Tensor, Tensor]:
        """Edges of :meth:`with_loops`, (2, E'), and the positions of the remaining edges."""
        edges = self.edges()
        kept = (edges[0] != edges[1]).nonzero()[:, 0]
        loops = torch.arange(nodes, dtype=edges.dtype, device=edges.device)
        return torch.cat([edges[:, kept], loops.expand(2, -1)], 1), kept

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax of x (heads, E) over the edges of each target."""
        return softmax_by_heads(self.operand, x)


def is_edges(edge_index: object) -> bool:
    """Whether it is a dense tensor of edges, or edges spread over processes, not a matrix."""
    dense = isinstance(edge_index, Tensor) and edge_index.layout is torch.strided
    return dense or is_spread(edge_index)


def with_others(
    caller: str, x: Tensor, edge_index: object, targets: int, flow: str
) -> tuple[Tensor, object]:
    """Features of all sources, and edges in their numbering; collective if nodes are spread over
    processes, to add the features of others."""
    if not is_spread(edge_index):
        return x, edge_index
    graph = Graph.of(caller, edge_index, len(x), targets, flow)
    return graph.source_features(x), graph.edges()


def is_spread(edge_index: object) -> bool:
    """Whether it is a :class:`sparsetir.distributed.DistGraph`, without importing that."""
    return hasattr(edge_index, "graph_of_layer")


def has_edges(edge_index: object) -> bool:
    """Whether it is edges, or was prepared from edges, and so is in the caller's order."""
    prepared = isinstance(edge_index, Prepared)
    return edge_index.col.dim() == 2 if prepared else is_edges(edge_index)


def reversed_edges(edge_index: Tensor) -> Tensor:
    """Reversed edges; always the same tensor for the same edges."""
    return remembered((edge_index,), "reversed", lambda: edge_index.flip(0))


def check_aggr(caller: str, aggr: object) -> str:
    """Check the name of an aggregation and return it; ValueError if there is no kernel for it."""
    return one_of(caller, "aggr", aggr, tuple(REDUCTION_NAMES))


def check_of_edges(
    caller: str, name: str, x: object, graph: Graph, dims: tuple[int, ...] = (1,)
) -> None:
    """Raise unless x is a dense tensor of `dims` dimensions with one row per edge."""
    x = check_strided(caller, name, x, "a dense tensor")
    edges = graph.col.shape[-1]
    if x.dim() not in dims or x.shape[0] != edges:
        shape = f"({edges},)" if dims == (1,) else f"({edges},) or ({edges}, features)"
        raise wrong(caller, name, f"shape {shape}", tuple(x.shape))


def one_of(caller: str, name: str, value: object, expected: tuple[str, ...]) -> str:
    """Return the value if it is one of those expected; raise ValueError otherwise."""
    if not isinstance(value, str) or value not in expected:
        raise wrong(caller, name, f"{', '.join(map(repr, expected))}", f"{value!r}")
    return value


def remembered(
    tensors: tuple[Tensor, ...],
    key: Hashable,
    make: Callable[[], T],
    compared: tuple[Tensor, ...] = (),
) -> T:
    """`make()`, or its cached result for the same tensors with the same contents.

    key : distinguishes uses
    compared : further tensors that `make` uses. Only the result for their last contents is cached,
        whichever tensors hold these

    Nothing is cached while calls are traced (torch.compile) or transformed (torch.func).
    """
    if torch.compiler.is_compiling() or is_transformed():
        return make()
    full = (__name__, key, *((x.dtype, x.device, x.shape) for x in compared))
    cached = kept.find(full, *tensors)
    if cached is not None:
        result, copies = cached
        if all(map(same, compared, copies)):
            return result
    copies = [private(x) for x in compared]
    return kept.remember(full, lambda: (make(), copies), *tensors)[0]
