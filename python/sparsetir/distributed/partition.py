"""Assignments of nodes to processes: by balanced work, by the user, or by METIS."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.distributed.collectives import all_to_all, check_on_all, total
from sparsetir.extras import need
from sparsetir.ops.tensors import INDEX_DTYPES
from sparsetir.runtime.refusals import wrong

NAMED = ("rows", "metis")


class Blocks:
    """Nodes in equal parts, by their numbers alone, like `torch.chunk` and DTensors.

    Each process keeps data about its block that none could keep about all nodes.

    group, n : the processes, and the number of nodes
    size : number of nodes of each process, except the last ones
    start, stop : the block of this process
    """

    group: dist.ProcessGroup
    n: int
    rank: int
    count: int
    start: int
    stop: int

    def __init__(self, group: dist.ProcessGroup, n: int) -> None:
        self.group, self.n = group, n
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.size: int = max(1, -(-n // self.count))
        self.start: int = min(n, self.rank * self.size)
        self.stop: int = min(n, self.start + self.size)

    def nodes(self, device: torch.device) -> Tensor:
        """The nodes of this process's block, (stop - start,) int64."""
        return torch.arange(self.start, self.stop, device=device)

    def split(self, ids: Tensor) -> list[int]:
        """The number of these sorted nodes that each process owns."""
        return torch.bincount(ids // self.size, minlength=self.count).tolist()

    def counted(self, caller: str, ids: Tensor) -> Tensor:
        """Counts of each node of the block in `ids` of all processes, (stop - start,) int64."""
        named, counts = torch.unique(ids, return_counts=True)
        send = self.split(named)
        requested, receive = all_to_all(self.group, caller, named, send)
        counts, _ = all_to_all(self.group, caller, counts, send, receive)
        counted = torch.zeros(self.stop - self.start, dtype=torch.int64, device=ids.device)
        return counted.index_add_(0, requested - self.start, counts)


class Partition:
    """New numbers of the nodes: process p has those from starts[p] to starts[p + 1].

    On each process they are in the order of the old ones. No process keeps all of them.

    starts : (processes + 1,) numbers
    nodes : (own,) int64, ascending: the old numbers of this process's nodes
    new : (stop - start,) int64 new numbers of the block's nodes; None if they equal the old ones
    """

    blocks: Blocks
    starts: list[int]
    nodes: Tensor
    new: Tensor | None
    start: int
    stop: int

    def __init__(self, blocks: Blocks, starts: list[int], nodes: Tensor, new: Tensor | None = None):
        self.blocks, self.starts, self.nodes, self.new = blocks, starts, nodes, new
        self.start, self.stop = starts[blocks.rank], starts[blocks.rank + 1]

    def renumbered(self, caller: str, ids: Tensor) -> Tensor:
        """New numbers of any nodes, (k,) int64; collective."""
        if self.new is None:
            return ids
        blocks = self.blocks
        named, places = torch.unique(ids, return_inverse=True)
        send = blocks.split(named)
        requested, receive = all_to_all(blocks.group, caller, named, send)
        answers, _ = all_to_all(
            blocks.group, caller, self.new[requested - blocks.start], receive, send
        )
        return answers[places]

    def owners(self, new: Tensor) -> Tensor:
        """The process of each of these new numbers, (k,)."""
        ends = torch.tensor(self.starts[1:-1], dtype=new.dtype, device=new.device)
        return torch.bucketize(new.contiguous(), ends, right=True)  # it warns of others


def check_partition(caller: str, how: Any, n: int, processes: int) -> object:
    """Raise unless `partition` divides n nodes; return a value to be equal on all processes."""
    if isinstance(how, str):
        if how not in NAMED:
            raise wrong(
                caller, "partition", "'rows', 'metis', a tensor or a pair of them", f"{how!r}"
            )
        if how == "metis":
            need(caller, "pymetis", "metis")
        return how
    shares = isinstance(how, tuple | list)
    parts = how[-1] if shares else how
    for x in how if shares else (how,):
        if not isinstance(x, Tensor) or x.dtype not in INDEX_DTYPES or x.dim() != 1:
            kind = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise wrong(caller, "partition", "int32 or int64 of one dimension", kind, TypeError)
    if shares and (len(how) != 2 or len(how[0]) != len(how[1])):
        expected = "a pair of nodes and their processes, of one length"
        raise wrong(caller, "partition", expected, [len(x) for x in how])
    if not shares and len(parts) != n:
        raise wrong(
            caller, "partition", f"shape ({n},), a process for each node", tuple(parts.shape)
        )
    ranges = [("processes", parts, processes)]
    if shares:
        ranges.append(("nodes", how[0], n))
    for argument, x, end in ranges:
        if len(x) and not (0 <= int(x.min()) and int(x.max()) < end):
            expected = f"{argument} from 0 to {end - 1}"
            raise wrong(caller, "partition", expected, f"{int(x.min())} to {int(x.max())}")
    if shares:
        return "shares"
    # Sums that differ, in practice, if processes got different tensors.
    places = torch.arange(1, n + 1, device=parts.device)
    return "given", int(parts.sum()), int((places * parts).sum())


def make_partition(
    caller: str, group: dist.ProcessGroup, n: int, sources: Tensor, targets: Tensor, how: Any
) -> Partition:
    """Divide nodes; collective. Takes checked arguments of :meth:`DistGraph.from_edges`."""
    blocks = Blocks(group, n)
    if isinstance(how, str) and how == "rows":
        return _balanced(caller, blocks, targets)
    if isinstance(how, str):
        parts = _by_metis(caller, blocks, sources, targets)
    elif isinstance(how, Tensor):
        parts = how[blocks.start : blocks.stop].long().to(targets.device)
    else:
        parts = _collect_parts(caller, blocks, *(x.long().to(targets.device) for x in how))
    return _by_parts(caller, blocks, parts)


def _balanced(caller: str, blocks: Blocks, targets: Tensor) -> Partition:
    """Rows in their order, in parts of about equal work: a row's elements, and one for itself."""
    work = blocks.counted(caller, targets) + 1
    sums = torch.zeros(blocks.count, dtype=torch.int64, device=targets.device)
    sums[blocks.rank] = work.sum()
    sums = total(blocks.group, caller, sums)
    until = work.cumsum(0) + sums[: blocks.rank].sum()
    shares = torch.arange(1, blocks.count, device=targets.device)
    goals = int(sums.sum()) * shares // blocks.count
    ends = total(blocks.group, caller, torch.searchsorted(until, goals, right=True))
    starts = [0, *ends.tolist(), blocks.n]
    nodes = torch.arange(starts[blocks.rank], starts[blocks.rank + 1], device=targets.device)
    return Partition(blocks, starts, nodes)


def _by_parts(caller: str, blocks: Blocks, parts: Tensor) -> Partition:
    """The partition by the process of each node in this process's block."""
    counts = torch.bincount(parts, minlength=blocks.count)
    table = torch.zeros(blocks.count, blocks.count, dtype=torch.int64, device=parts.device)
    table[blocks.rank] = counts
    table = total(blocks.group, caller, table)  # nodes by block and process
    starts = [0, *table.sum(0).cumsum(0).tolist()]
    order = torch.argsort(parts, stable=True)
    first = torch.tensor(starts[:-1], device=parts.device) + table[: blocks.rank].sum(0)
    before = counts.cumsum(0) - counts
    of = parts[order]
    new = torch.empty_like(parts)
    new[order] = (first - before)[of] + torch.arange(len(parts), device=parts.device)
    ids = blocks.nodes(parts.device)[order]
    nodes, _ = all_to_all(blocks.group, caller, ids, counts.tolist())
    return Partition(blocks, starts, nodes, new)


def _collect_parts(caller: str, blocks: Blocks, nodes: Tensor, parts: Tensor) -> Tensor:
    """The process of each of the block's nodes; each process contributes the nodes it knows of."""
    order = torch.argsort(nodes, stable=True)
    send = blocks.split(nodes)
    ids, receive = all_to_all(blocks.group, caller, nodes[order], send)
    parts_here, _ = all_to_all(blocks.group, caller, parts[order], send, receive)
    check_each_once(caller, "partition", blocks.group, ids - blocks.start, blocks.nodes(ids.device))
    return torch.empty_like(parts_here).index_copy_(0, ids - blocks.start, parts_here)


def check_each_once(
    caller: str, name: str, group: dist.ProcessGroup, places: Tensor, nodes: Tensor
) -> None:
    """Raise unless `places` are the positions of `nodes`, each once; collective."""

    def check() -> None:
        times = torch.bincount(places, minlength=len(nodes))
        wrong = (times != 1).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise ValueError(
                f"{caller}: argument '{name}': expected each node once, got node "
                f"{int(nodes[place])} {int(times[place])} times"
            )

    check_on_all(group, caller, check)


def _by_metis(caller: str, blocks: Blocks, sources: Tensor, targets: Tensor) -> Tensor:
    """Parts with few edges between them, found by process 0, which needs the whole pattern."""
    edges = torch.stack([sources, targets], 1)
    first = [len(edges)] + [0] * (blocks.count - 1)
    edges, _ = all_to_all(blocks.group, caller, edges, first)
    parts = torch.empty(0, dtype=torch.int64, device=edges.device)
    if blocks.rank == 0:
        part_of = _metis(blocks.n, blocks.count, edges.cpu().numpy())
        parts = torch.from_numpy(part_of).to(edges.device)
    share = torch.arange(blocks.n if blocks.rank == 0 else 0)
    parts, _ = all_to_all(blocks.group, caller, parts, blocks.split(share))
    return parts


def _metis(n: int, parts: int, edges: np.ndarray) -> np.ndarray:
    """(n,) int64 part of each node, of about equal work in each."""
    if parts == 1 or n <= parts:  # METIS would make empty parts, with a message
        return np.arange(n) % parts
    ones = np.ones(len(edges), np.int32)
    pattern = sp.csr_array((ones, (edges[:, 1], edges[:, 0])), shape=(n, n))
    work = 1 + np.bincount(edges[:, 1], minlength=n)
    both = sp.csr_array(pattern + pattern.T)
    both.setdiag(0)
    both.eliminate_zeros()
    pymetis: Any = import_module("pymetis")
    _, part_of = pymetis.part_graph(
        parts, xadj=both.indptr, adjncy=both.indices, vweights=work.tolist()
    )
    return np.asarray(part_of, np.int64)
