"""A graph whose nodes, with their edges and features, are spread over the processes of a group."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.distributed import products
from sparsetir.distributed.collectives import (
    all_to_all,
    check_device,
    check_on_all,
    group_of,
    total,
)
from sparsetir.distributed.exchange import Exchange
from sparsetir.distributed.files import Share, read_share
from sparsetir.distributed.partition import Partition, check_partition, make_partition
from sparsetir.distributed.parts import Block, blocks_of
from sparsetir.distributed.rows import Rows
from sparsetir.ops.cache import cacheable, cached_result
from sparsetir.ops.compress import INT32_MAX, sorted_by
from sparsetir.ops.operands import Operand, resolve
from sparsetir.ops.tensors import DTYPES, check_kind, check_size
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

NAME = "DistGraph.from_edges"


class DistGraph(Rows):
    """A graph whose edges are spread over processes by target; layers accept it as edges.

    Get one with :meth:`from_edges` or :meth:`from_file`. Each process owns some nodes, and has all
    edges into them. Features and other data of nodes are tensors with a row for each own node, in
    the order of `nodes`. Methods are collective unless they state otherwise: all processes of the
    group call them, in the same order.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The processes.
    partition : Partition
        The assignment of nodes to processes.
    sources, targets : (nnz,) Tensor
        The ends of own edges.
    values : (nnz,) Tensor or None
        Weights of own edges.
    edge_data : mapping of str to (nnz, ...) Tensor
        Further data of own edges, in their order.
    num_edges : int
        Number of edges of the whole graph.

    Attributes
    ----------
    num_nodes : int
        Number of nodes of the whole graph.
    own, halo : int
        Numbers of own nodes, and of other nodes with edges to own ones.
    nnz : int
        Number of edges into own nodes.
    nodes : (own,) Tensor, int64
        The own nodes, ascending.
    local, remote : Operand
        Edges between own nodes, and those from the halo, as matrices (own, own) and (own, halo);
        own edges are in this order.
    exchange_dtype : torch.dtype or None
        The type of features and gradients while they are sent.
    exchange : Exchange
        The rows to send and to receive.
    """

    num_edges: int
    nnz: int
    local: Operand
    remote: Operand
    degrees: Tensor

    def __init__(
        self, group: dist.ProcessGroup, partition: Partition, sources: Tensor, targets: Tensor,
        values: Tensor | None, edge_data: Mapping[str, Tensor], num_edges: int,
    ) -> None:  # fmt: skip
        """Take own edges: sources by new numbers, targets by own ones; collective."""
        self.group, self.partition = group, partition
        self.num_nodes, self.num_edges = partition.blocks.n, num_edges
        self.nodes, self.nnz = partition.nodes, len(targets)
        self.own: int = len(self.nodes)
        self.exchange_dtype: torch.dtype | None = None
        self.compared = 0  # calls whose arguments were compared with those of other processes
        self.seen: set[Any] = set()  # likenesses of the compared arguments
        self._made = {}
        self._split(sources, targets)
        order = self._order
        self.values: Tensor | None = None if values is None else values[order]
        self.edge_data: dict[str, Tensor] = {name: x[order] for name, x in edge_data.items()}
        del self._order

    @classmethod
    def from_edges(
        cls,
        edge_index: Tensor,
        num_nodes: int | None = None,
        values: Tensor | None = None,
        edge_data: Mapping[str, Tensor] | None = None,
        partition: Any = "rows",
        coalesce: bool = False,
        exchange_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> DistGraph:
        """Make a graph of the edges that all processes pass, each a part of them; collective.

        Parameters
        ----------
        edge_index : (2, E) Tensor, int32 or int64
            Sources and targets; E may differ between processes, and be 0. On the device of the
            group's backend: a GPU for NCCL, the CPU for gloo.
        num_nodes : int, optional
            The number of nodes, by default up to the largest one that has an edge.
        values : (E,) Tensor, optional
            Weights; float16, bfloat16, float32 or float64.
        edge_data : mapping of str to (E, ...) Tensor, optional
            Further data that is sent with the edges.
        partition : str, Tensor or pair of Tensor
            The assignment of nodes to processes:

            - "rows": nodes in their order, with about equal work on each process: the number of its
              nodes and of the edges into them
            - (num_nodes,) int32 or int64, the process of each node, the same tensor on all; or a
              pair (nodes, processes) for the nodes that this process knows, together each node once
            - "metis": few edges between processes, by the package pymetis. Process 0 computes it,
              and needs memory for all edges

        coalesce : bool
            Merge equal edges, adding their values, or ones.
        exchange_dtype : torch.dtype, optional
            torch.float16 or torch.bfloat16, for features and gradients while they are sent.
        group : optional
            A group of torch.distributed, by default all processes.

        Returns
        -------
        DistGraph

        Raises
        ------
        TypeError, ValueError
            On processes with an invalid argument, which the message names.
        DistributedError
            On the others.

        Notes
        -----
        No process needs more than its share: nodes are looked up by sending their numbers to
        processes that know them.
        """
        group = group_of(NAME, group)
        edge_data = dict(edge_data or {})

        def check() -> object:
            _check_edges(edge_index, values, edge_data)
            check_device(NAME, "edge_index", group, edge_index)
            if num_nodes is not None:
                check_size(NAME, "num_nodes", num_nodes)
            _check_exchange_dtype(exchange_dtype)
            if coalesce and edge_data:
                raise wrong(NAME, "coalesce", "False with 'edge_data'", "True")
            data = {name: (dtype_name(x), tuple(x.shape[1:])) for name, x in edge_data.items()}
            kind = None if values is None else dtype_name(values)
            return num_nodes, kind, data, coalesce, exchange_dtype, edge_index.device.type

        check_on_all(group, NAME, check)
        ends = edge_index.long()
        n = int(num_nodes) if num_nodes is not None else _least_nodes(group, ends)

        def check_more() -> object:
            if ends.numel() and not (0 <= int(ends.min()) and int(ends.max()) < n):
                got = int(ends.min()) if int(ends.min()) < 0 else int(ends.max())
                raise wrong(NAME, "edge_index", f"nodes from 0 to {n - 1}", got)
            return check_partition(NAME, partition, n, dist.get_world_size(group))

        check_on_all(group, NAME, check_more)
        of_edges = [x.detach() for x in (values, *edge_data.values()) if x is not None]
        divided, ends, of_edges = _redistribute(group, n, ends, of_edges, partition)
        weights = of_edges.pop(0) if values is not None else None
        sources, targets = ends
        if coalesce:
            sources, targets, weights = _coalesced(group, sources, targets, weights)
        count = torch.tensor([len(targets)], device=targets.device)
        edges = int(total(group, NAME, count))
        data = dict(zip(edge_data, of_edges, strict=True))
        graph = cls(group, divided, sources, targets - divided.start, weights, data, edges)
        graph.exchange_dtype = exchange_dtype
        return graph

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        num_nodes: int | None = None,
        partition: Any = "rows",
        exchange_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        device: Any = "cpu",
    ) -> DistGraph:
        """Make a graph from a file, of which each process reads a part; collective.

        Parameters
        ----------
        path : str or Path
            As for :func:`sparsetir.graphs.load_graph`, but only .npz files of one matrix (or
            `file.npz:layer`) in CSR or coordinates, and uncompressed edge lists; the suffix ":T"
            transposes. Rows are targets and columns sources.
        num_nodes : int, optional
            The number of nodes, at least that of the file, which is the default.
        partition, exchange_dtype, group
            The same as for :meth:`from_edges`.
        device : torch.device or str
            The device of the graph.

        Returns
        -------
        DistGraph
            The graph that `load_graph` returns: equal edges are merged, adding their values. It has
            values unless all are one.

        Raises
        ------
        GraphError
            A ValueError, for an invalid file; also the errors of :meth:`from_edges`.
        """
        caller = "DistGraph.from_file"
        group = group_of(caller, group)
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        read: list[Share] = []

        def check_file() -> object:
            read.append(read_share(path, rank, count))
            return read[0].nodes if read[0].told else None

        check_on_all(group, caller, check_file)
        share = read.pop()
        ones = torch.tensor([int(share.values is not None)], device=device)
        some = int(total(group, caller, ones))
        ends = torch.stack([torch.from_numpy(x) for x in (share.sources, share.targets)])
        values = None
        if some and share.values is not None:
            values = torch.from_numpy(share.values).to(device)
        elif some:
            values = torch.ones(ends.shape[1], device=device)
        if values is not None:
            wide = torch.tensor([int(values.dtype == torch.float64)], device=device)
            values = values.to(torch.float64 if int(total(group, caller, wide)) else torch.float32)
        nodes = torch.tensor([max(share.nodes, num_nodes or 0)], device=device)
        n = int(total(group, caller, nodes, dist.ReduceOp.MAX))

        def check() -> None:
            if num_nodes is not None:
                check_size(caller, "num_nodes", num_nodes, n)

        check_on_all(group, caller, check)
        del share
        return cls.from_edges(
            ends.to(device),
            n,
            values,
            partition=partition,
            coalesce=True,
            exchange_dtype=exchange_dtype,
            group=group,
        )

    def _split(self, sources: Tensor, targets: Tensor) -> None:
        """Split edges into those between own nodes and those from others, by rows."""
        start, stop, device = self.partition.start, self.partition.stop, targets.device
        inside = (sources >= start) & (sources < stop)
        places = inside.nonzero()[:, 0], (~inside).nonzero()[:, 0]
        far = sources[places[1]]
        halo, columns = torch.unique(far, return_inverse=True)
        owners = self.partition.owners(halo)
        self.exchange: Exchange = Exchange(self.group, NAME, self.own, start, halo, owners)
        self.halo: int = len(halo)
        small = max(self.own + self.halo, self.nnz) < INT32_MAX
        dtype = torch.int32 if small else torch.int64
        parts, orders = [], []
        for here, cols, n in zip(
            places, (sources[places[0]] - start, columns), (self.own, self.halo), strict=True
        ):
            rowptr, order = sorted_by(targets[here].to(dtype), self.own)
            part = Operand(rowptr.to(dtype), cols.to(dtype)[order], self.own, n)
            parts.append(resolve(part, caller=NAME))
            orders.append(here[order])
        self.local, self.remote = parts
        self._order = torch.cat(orders)
        counted = (A.rowptr[1:] - A.rowptr[:-1] for A in parts)
        none = torch.zeros(self.own, dtype=dtype, device=device)
        self.degrees = torch.clamp(sum(counted, none), min=1)

    # -- arguments of operators and layers -----------------------------------------------------

    @property
    def edge_index(self) -> Tensor:
        """Own edges, (2, nnz); sources count own nodes and then the halo, targets own nodes."""
        return self.kept("edge_index", self._edge_index)

    @cacheable
    def _edge_index(self) -> Tensor:
        sources = torch.cat([self.local.col, self.remote.col + self.own])
        nodes = torch.arange(self.own, dtype=sources.dtype, device=sources.device)
        targets = [nodes.repeat_interleave(A.rowptr[1:] - A.rowptr[:-1]) for A in self.parts]
        return torch.stack([sources, torch.cat(targets)])

    @property
    def parts(self) -> tuple[Operand, Operand]:
        """`local` and `remote`."""
        return self.local, self.remote

    @property
    def remote_blocks(self) -> list[Block]:
        """`remote` in pieces, whose products are added to those of `local`; not collective."""
        return self.kept("blocks", lambda: cached_result(blocks_of, self.remote))

    @property
    def whole(self) -> Operand:
        """Own edges as an (own, own + halo) matrix, for :func:`with_halo`; not collective."""
        size = self.own + self.halo, self.own
        return self.kept("whole", lambda: resolve((self.edge_index, size)))

    def exchanging(self, dtype: torch.dtype | None) -> DistGraph:
        """The same graph, exchanging rows and gradients in this dtype; not collective.

        Parameters
        ----------
        dtype : torch.float16, torch.bfloat16 or None
            None for their own.

        Returns
        -------
        DistGraph
        """
        _check_exchange_dtype(dtype)
        graph = copy.copy(self)
        graph.exchange_dtype = dtype
        return graph

    def __matmul__(self, x: Tensor) -> Tensor:
        """:func:`sparsetir.distributed.spmm`."""
        return products.spmm(self, x)

    def graph_of_layer(self, caller: str, sources: int, targets: int, flow: str) -> Any:
        """The graph as layers of :mod:`sparsetir.nn` use it; not collective.

        Parameters
        ----------
        caller : str
            The caller's name, for errors.
        sources, targets : int
            Numbers of rows of the layer's features.
        flow : str
            The flow of PyG's `MessagePassing`.

        Returns
        -------
        object
        """
        from sparsetir.distributed.layers import SpreadGraph

        return SpreadGraph.for_layer(self, caller, sources, targets, flow)

    def __repr__(self) -> str:
        return (
            f"<sparsetir.distributed.DistGraph of {self.num_nodes} nodes and {self.num_edges} "
            f"edges, here {self.own} nodes, {self.nnz} edges, {self.halo} nodes of others>"
        )


def _redistribute(
    group: dist.ProcessGroup, n: int, ends: Tensor, of_edges: list[Tensor], how: Any
) -> tuple[Partition, Tensor, list[Tensor]]:
    """The partition, (2, nnz) new numbers of the edges into own nodes, and these edges' data."""
    partition = make_partition(NAME, group, n, ends[0], ends[1], how)
    new = partition.renumbered(NAME, ends.reshape(-1)).view(2, -1)
    owners = partition.owners(new[1])
    order = torch.argsort(owners, stable=True)
    send = torch.bincount(owners, minlength=dist.get_world_size(group)).tolist()
    del owners
    pairs, receive = all_to_all(group, NAME, new.t()[order], send)
    del new, ends
    sent = [all_to_all(group, NAME, x[order], send, receive)[0] for x in of_edges]
    return partition, pairs.t(), sent


def _coalesced(
    group: dist.ProcessGroup, sources: Tensor, targets: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Distinct edges by targets and sources, with sums of values; None if all are one."""
    order = torch.argsort(sources, stable=True)
    order = order[torch.argsort(targets[order], stable=True)]
    sources, targets = sources[order], targets[order]
    first = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    first[1:] = (sources[1:] != sources[:-1]) | (targets[1:] != targets[:-1])
    repeated = torch.tensor([int(not first.all())], device=targets.device)
    if values is None and not int(total(group, NAME, repeated)):
        return sources, targets, None
    if values is None:
        values = torch.ones(len(targets), device=targets.device)
    place = first.cumsum(0) - 1
    summed = values.new_zeros(int(first.sum())).index_add_(0, place, values[order])
    return sources[first], targets[first], summed


def _least_nodes(group: dist.ProcessGroup, ends: Tensor) -> int:
    """The least number of nodes that includes the ends of all edges; collective."""
    most = ends.max() if ends.numel() else torch.tensor(-1, device=ends.device)
    return int(total(group, NAME, most.view(1).clone(), dist.ReduceOp.MAX)) + 1


def _check_edges(edge_index: Any, values: Any, edge_data: Mapping[str, Any]) -> None:
    """Raise unless the arguments are the edges of a process, and data for each of them."""
    check_kind(NAME, "edge_index", edge_index)
    if edge_index.dim() != 2 or len(edge_index) != 2:
        raise wrong(NAME, "edge_index", "shape (2, E)", tuple(edge_index.shape))
    edges = edge_index.shape[1]
    for name, x in (*([("values", values)] * (values is not None)), *edge_data.items()):
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            raise wrong(NAME, name, "a dense tensor", type(x).__name__, TypeError)
        if x.dim() < 1 or len(x) != edges or (x is values and x.dim() != 1):
            more = "" if x is values else " ..."
            raise wrong(NAME, name, f"shape ({edges},{more})", tuple(x.shape))
        if x.device != edge_index.device:
            raise wrong(NAME, name, f"to be on {edge_index.device} as the edges", x.device)
    if values is not None and values.dtype not in DTYPES:
        raise wrong(NAME, "values", ", ".join(DTYPES.values()), dtype_name(values), TypeError)


def _check_exchange_dtype(dtype: object) -> None:
    """Raise unless rows can be rounded to the dtype while they are sent."""
    if dtype not in (None, torch.float16, torch.bfloat16):
        expected = "torch.float16, torch.bfloat16 or None"
        raise wrong("DistGraph", "exchange_dtype", expected, f"{dtype!r}")
