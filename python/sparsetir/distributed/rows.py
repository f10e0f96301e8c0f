"""Tensors with a row for each node, between one process, all processes and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.distributed.collectives import in_time, swap, together
from sparsetir.distributed.partition import check_each_once
from sparsetir.ops.tensors import INDEX_DTYPES
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


def scatter(graph: DistGraph, x: Tensor | None, source: int = 0) -> Tensor:
    """See :meth:`DistGraph.scatter`."""
    who, group = "DistGraph.scatter", graph.group
    here = _is_here(graph, who, "source", source)

    def check() -> object:
        if here:
            _check_rows(who, x, graph.num_nodes, "node of the graph")
        elif x is not None:
            raise wrong(who, "x", f"None but on process {source}", type(x).__name__)
        return source

    together(group, who, check)
    told: list[Any] = [None] * dist.get_world_size(group)
    with in_time(group, who):
        said = None if x is None else (x.dtype, tuple(x.shape[1:]))
        dist.all_gather_object(told, said, group=group)
    dtype, shape = told[source]
    # Whose rows are whose: `source` has memory for a number of each node.
    nodes, counts = _at(graph, who, graph.nodes, source)
    send = counts if here else [0] * len(counts)
    if x is None:
        x = torch.empty((0, *shape), dtype=dtype, device=graph.nodes.device)
    return swap(group, who, x.detach()[nodes] if here else x, send)[0]


def gather(graph: DistGraph, x: Tensor, to: int | None = 0) -> Tensor | None:
    """See :meth:`DistGraph.gather`."""
    who, group = "DistGraph.gather", graph.group
    place = 0 if to is None else to
    here = _is_here(graph, who, "to", place)

    def check() -> object:
        _check_rows(who, x, graph.own, "own node")
        return dtype_name(x), tuple(x.shape[1:]), to

    together(group, who, check)
    nodes, counts = _at(graph, who, graph.nodes, place)
    rows, _ = _at(graph, who, x.detach(), place, counts if here else [0] * len(counts))
    if to is not None and not here:
        return None
    found = rows.new_empty((graph.num_nodes, *x.shape[1:]))
    if here:
        found[nodes] = rows
    if to is None and found.numel():
        with in_time(group, who):
            raw = found.view(-1).view(torch.uint8)
            dist.broadcast(raw, dist.get_global_rank(group, place), group=group)
    return found


def arrange(graph: DistGraph, nodes: Tensor, x: Tensor, who: str = "DistGraph.arrange") -> Tensor:
    """See :meth:`DistGraph.arrange`."""
    group, partition = graph.group, graph.partition

    def check() -> object:
        if not isinstance(nodes, Tensor) or nodes.dtype not in INDEX_DTYPES:
            got = nodes.dtype if isinstance(nodes, Tensor) else type(nodes).__name__
            raise TypeError(f"{who}: argument 'nodes': expected int32 or int64, got {got}")
        if nodes.dim() != 1:
            raise wrong(who, "nodes", "one dimension", tuple(nodes.shape))
        if len(nodes) and not (0 <= int(nodes.min()) and int(nodes.max()) < graph.num_nodes):
            expected = f"0 to {graph.num_nodes - 1}"
            raise wrong(who, "nodes", expected, f"{int(nodes.min())} to {int(nodes.max())}")
        _check_rows(who, x, len(nodes), "node of 'nodes'")
        return dtype_name(x), tuple(x.shape[1:])

    together(group, who, check)
    new = partition.renumbered(who, nodes.long())
    owners = partition.owners(new)
    order = torch.argsort(owners, stable=True)
    send = torch.bincount(owners, minlength=dist.get_world_size(group)).tolist()
    places, got = swap(group, who, new[order], send)
    rows, _ = swap(group, who, x.detach()[order], send, got)
    places = places - partition.start

    check_each_once(who, "nodes", group, places, graph.nodes)
    return torch.empty_like(rows).index_copy_(0, places, rows)


def to_dtensor(graph: DistGraph, x: Tensor) -> Any:
    """See :meth:`DistGraph.to_dtensor`."""
    from torch.distributed.tensor import DTensor, Shard

    who, group, blocks = "DistGraph.to_dtensor", graph.group, graph.partition.blocks

    def check() -> object:
        _check_rows(who, x, graph.own, "own node")
        return dtype_name(x), tuple(x.shape[1:])

    together(group, who, check)
    send = blocks.split(graph.nodes)
    ids, got = swap(group, who, graph.nodes, send)
    rows, _ = swap(group, who, x.detach(), send, got)
    shard = torch.empty_like(rows).index_copy_(0, ids - blocks.start, rows)
    shape = torch.Size((graph.num_nodes, *x.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, _mesh(graph), [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def from_dtensor(graph: DistGraph, x: Any) -> Tensor:
    """See :meth:`DistGraph.from_dtensor`."""
    from torch.distributed.tensor import DTensor, Shard

    who, blocks = "DistGraph.from_dtensor", graph.partition.blocks

    def check() -> object:
        if not isinstance(x, DTensor):
            raise TypeError(f"{who}: argument 'x': expected a DTensor, got {type(x).__name__}")
        if tuple(x.placements) != (Shard(0),) or x.dim() < 1 or x.shape[0] != graph.num_nodes:
            expected = f"{graph.num_nodes} rows in shards of rows"
            raise wrong(who, "x", expected, f"{tuple(x.shape)} placed as {tuple(x.placements)}")
        return tuple(x.shape)

    together(graph.group, who, check)
    return arrange(graph, blocks.nodes(graph.nodes.device), x.to_local(), who)


def _mesh(graph: DistGraph) -> Any:
    """The group as DTensors know it, made once."""
    from torch.distributed.device_mesh import DeviceMesh

    device = graph.nodes.device.type
    return graph.kept("mesh", lambda: DeviceMesh.from_group(graph.group, device))


def _at(
    graph: DistGraph, who: str, x: Tensor, process: int, receive: list[int] | None = None
) -> tuple[Tensor, list[int]]:
    """Rows of all processes, in order, on one of them, and how many are of each; none elsewhere."""
    send = [0] * dist.get_world_size(graph.group)
    send[process] = len(x)
    return swap(graph.group, who, x, send, receive)


def _is_here(graph: DistGraph, who: str, name: str, process: object) -> bool:
    count = dist.get_world_size(graph.group)
    if isinstance(process, bool) or not isinstance(process, int) or not 0 <= process < count:
        raise wrong(who, name, f"a process from 0 to {count - 1}", f"{process!r}")
    return dist.get_rank(graph.group) == process


def _check_rows(who: str, x: object, rows: int, what: str) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{who}: argument 'x': expected a dense tensor, got {got}")
    if x.dim() < 1 or len(x) != rows:
        raise wrong(who, "x", f"{rows} rows, one for each {what}", f"shape {tuple(x.shape)}")
