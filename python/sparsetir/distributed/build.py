"""Exchange of edges, from the processes that read them to those that own them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.distributed.collectives import all_to_all, total
from sparsetir.distributed.partition import Partition, make_partition
from sparsetir.ops.tensors import DTYPES, check_kind
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

NAME = "DistGraph.from_edges"


def redistribute(
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


def coalesced(
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


def least_nodes(group: dist.ProcessGroup, ends: Tensor) -> int:
    """The least number of nodes that includes the ends of all edges; collective."""
    most = ends.max() if ends.numel() else torch.tensor(-1, device=ends.device)
    return int(total(group, NAME, most.view(1).clone(), dist.ReduceOp.MAX)) + 1


def check_edges(edge_index: Any, values: Any, edge_data: Mapping[str, Any]) -> None:
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


def check_exchange_dtype(dtype: object) -> None:
    """Raise unless rows can be rounded to the dtype while they are sent."""
    if dtype not in (None, torch.float16, torch.bfloat16):
        expected = "torch.float16, torch.bfloat16 or None"
        raise wrong("DistGraph", "exchange_dtype", expected, f"{dtype!r}")
