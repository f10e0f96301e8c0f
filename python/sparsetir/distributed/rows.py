"""Transfer of tensors with a row per node between one process, all processes and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.distributed.collectives import all_to_all, backend_errors, check_on_all
from sparsetir.distributed.partition import Partition, check_each_once
from sparsetir.ops.tensors import INDEX_DTYPES, check_strided
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

T = TypeVar("T")


class Rows:
    """The methods of :class:`sparsetir.distributed.DistGraph` about rows of its nodes."""

    group: dist.ProcessGroup
    partition: Partition
    num_nodes: int
    own: int
    nodes: Tensor
    _made: dict[object, Any]

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """Data made once per key and kept as long as the graph.

        Collective if `make` is: nothing is ever dropped, as processes might drop different things.

        Parameters
        ----------
        key : hashable
            The key of the data.
        make : callable
            Makes the data.

        Returns
        -------
        object
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def scatter(self, x: Tensor | None, source: int = 0) -> Tensor:
        """Distribute a tensor that one process has to the owners of its rows; collective.

        Parameters
        ----------
        x : (num_nodes, ...) Tensor or None
            The tensor on process `source`, in the order of the nodes; elsewhere None.
        source : int
            The process that has the tensor.

        Returns
        -------
        (own, ...) Tensor
        """
        caller, group = "DistGraph.scatter", self.group
        here = _is_this_rank(self, caller, "source", source)

        def check() -> object:
            if here:
                _check_rows(caller, x, self.num_nodes, "node of the graph")
            elif x is not None:
                raise wrong(caller, "x", f"None but on process {source}", type(x).__name__)
            return source

        check_on_all(group, caller, check)
        kinds: list[Any] = [None] * dist.get_world_size(group)
        with backend_errors(group, caller):
            kind = None if x is None else (x.dtype, tuple(x.shape[1:]))
            dist.all_gather_object(kinds, kind, group=group)
        dtype, shape = kinds[source]
        # The owner of each row: `source` has memory for a number per node.
        nodes, counts = _at(self, caller, self.nodes, source)
        send = counts if here else [0] * len(counts)
        if x is None:
            x = torch.empty((0, *shape), dtype=dtype, device=self.nodes.device)
        return all_to_all(group, caller, x.detach()[nodes] if here else x, send)[0]

    def gather(self, x: Tensor, to: int | None = 0) -> Tensor | None:
        """Rows of all nodes in their order; collective.

        Parameters
        ----------
        x : (own, ...) Tensor
            Rows of own nodes.
        to : int or None
            The process that receives them; None for all.

        Returns
        -------
        (num_nodes, ...) Tensor or None
            None on the other processes.
        """
        caller, group = "DistGraph.gather", self.group
        place = 0 if to is None else to
        here = _is_this_rank(self, caller, "to", place)

        def check() -> object:
            _check_rows(caller, x, self.own, "own node")
            return dtype_name(x), tuple(x.shape[1:]), to

        check_on_all(group, caller, check)
        nodes, counts = _at(self, caller, self.nodes, place)
        rows, _ = _at(self, caller, x.detach(), place, counts if here else [0] * len(counts))
        if to is not None and not here:
            return None
        every = rows.new_empty((self.num_nodes, *x.shape[1:]))
        if here:
            every[nodes] = rows
        if to is None and every.numel():
            with backend_errors(group, caller):
                raw = every.view(-1).view(torch.uint8)
                dist.broadcast(raw, dist.get_global_rank(group, place), group=group)
        return every

    def arrange(self, nodes: Tensor, x: Tensor) -> Tensor:
        """Send rows that any processes have to the owners of their nodes; collective.

        Parameters
        ----------
        nodes : (k,) Tensor, int32 or int64
            Nodes whose rows this process has; together each node once.
        x : (k, ...) Tensor
            These rows.

        Returns
        -------
        (own, ...) Tensor
        """
        return self._arranged("DistGraph.arrange", nodes, x)

    def _arranged(self, caller: str, nodes: Tensor, x: Tensor) -> Tensor:
        group, partition = self.group, self.partition

        def check() -> object:
            if not isinstance(nodes, Tensor) or nodes.dtype not in INDEX_DTYPES:
                kind = nodes.dtype if isinstance(nodes, Tensor) else type(nodes).__name__
                raise wrong(caller, "nodes", "int32 or int64", kind, TypeError)
            if nodes.dim() != 1:
                raise wrong(caller, "nodes", "one dimension", tuple(nodes.shape))
            if len(nodes) and not (0 <= int(nodes.min()) and int(nodes.max()) < self.num_nodes):
                expected = f"0 to {self.num_nodes - 1}"
                raise wrong(caller, "nodes", expected, f"{int(nodes.min())} to {int(nodes.max())}")
            _check_rows(caller, x, len(nodes), "node of 'nodes'")
            return dtype_name(x), tuple(x.shape[1:])

        check_on_all(group, caller, check)
        new = partition.renumbered(caller, nodes.long())
        owners = partition.owners(new)
        order = torch.argsort(owners, stable=True)
        send = torch.bincount(owners, minlength=dist.get_world_size(group)).tolist()
        places, receive = all_to_all(group, caller, new[order], send)
        rows, _ = all_to_all(group, caller, x.detach()[order], send, receive)
        places = places - partition.start
        check_each_once(caller, "nodes", group, places, self.nodes)
        return torch.empty_like(rows).index_copy_(0, places, rows)

    def to_dtensor(self, x: Tensor) -> Any:
        """A DTensor in the order of the nodes, in shards of rows; collective.

        It is the same tensor for any partition and number of processes, so that
        `torch.distributed.checkpoint` can load it on other processes than saved it. Without
        gradients.

        Parameters
        ----------
        x : (own, ...) Tensor
            Rows of own nodes.

        Returns
        -------
        (num_nodes, ...) DTensor
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        caller, group, blocks = "DistGraph.to_dtensor", self.group, self.partition.blocks

        def check() -> object:
            _check_rows(caller, x, self.own, "own node")
            return dtype_name(x), tuple(x.shape[1:])

        check_on_all(group, caller, check)
        send = blocks.split(self.nodes)
        ids, receive = all_to_all(group, caller, self.nodes, send)
        rows, _ = all_to_all(group, caller, x.detach(), send, receive)
        shard = torch.empty_like(rows).index_copy_(0, ids - blocks.start, rows)
        shape = torch.Size((self.num_nodes, *x.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        device = self.nodes.device.type
        mesh = self.kept("mesh", lambda: DeviceMesh.from_group(group, device))
        return DTensor.from_local(
            shard, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def from_dtensor(self, x: Any) -> Tensor:
        """Rows of own nodes, from a DTensor like that of :meth:`to_dtensor`; collective.

        Parameters
        ----------
        x : (num_nodes, ...) DTensor
            A DTensor in shards of rows.

        Returns
        -------
        (own, ...) Tensor
        """
        from torch.distributed.tensor import DTensor, Shard

        caller, blocks = "DistGraph.from_dtensor", self.partition.blocks

        def check() -> object:
            if not isinstance(x, DTensor):
                raise wrong(caller, "x", "a DTensor", type(x).__name__, TypeError)
            if tuple(x.placements) != (Shard(0),) or x.dim() < 1 or x.shape[0] != self.num_nodes:
                expected = f"{self.num_nodes} rows in shards of rows"
                raise wrong(
                    caller, "x", expected, f"{tuple(x.shape)} placed as {tuple(x.placements)}"
                )
            return tuple(x.shape)

        check_on_all(self.group, caller, check)
        return self._arranged(caller, blocks.nodes(self.nodes.device), x.to_local())


def _at(
    graph: Rows, caller: str, x: Tensor, process: int, receive: list[int] | None = None
) -> tuple[Tensor, list[int]]:
    """All rows in order, and their number by process, on one process; none on the others."""
    send = [0] * dist.get_world_size(graph.group)
    send[process] = len(x)
    return all_to_all(graph.group, caller, x, send, receive)


def _is_this_rank(graph: Rows, caller: str, name: str, process: object) -> bool:
    count = dist.get_world_size(graph.group)
    if isinstance(process, bool) or not isinstance(process, int) or not 0 <= process < count:
        raise wrong(caller, name, f"a process from 0 to {count - 1}", f"{process!r}")
    return dist.get_rank(graph.group) == process


def _check_rows(caller: str, x: object, rows: int, kind_of_row: str) -> None:
    x = check_strided(caller, "x", x, "a dense tensor")
    if x.dim() < 1 or len(x) != rows:
        raise wrong(
            caller, "x", f"{rows} rows, one for each {kind_of_row}", f"shape {tuple(x.shape)}"
        )
