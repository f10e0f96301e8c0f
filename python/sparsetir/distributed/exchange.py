"""Rows that processes need from each other: the senders are determined once, rows are sent as
often as features change, and gradients are sent back the same way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from sparsetir.distributed.collectives import (
    all_to_all,
    as_bytes,
    backend_errors,
    split_sizes,
    total,
)


class Exchange:
    """The rows that each process sends to others, and those it receives, its halo.

    group : the processes
    own : number of rows of this process
    sent : (k,) int64 own rows in the order of sending; one that several processes need occurs
        several times
    send, receive : number of rows to each process, and from each
    halo : number of received rows, in the order of their processes
    any : whether any process receives rows
    bytes_sent : bytes sent to other processes so far, without the backend's overhead
    """

    group: dist.ProcessGroup
    own: int
    halo: int
    any: bool
    bytes_sent: int

    def __init__(
        self,
        group: dist.ProcessGroup,
        caller: str,
        own: int,
        start: int,
        halo: Tensor,
        owners: Tensor,
    ) -> None:
        """Ask for rows; collective.

        start : the new number of the first own row
        halo : (halo,) new numbers of the needed rows, ascending
        owners : (halo,) their processes
        """
        count = dist.get_world_size(group)
        self.group, self.own, self.halo = group, own, len(halo)
        self.receive: list[int] = torch.bincount(owners, minlength=count).tolist()
        self.send: list[int] = split_sizes(group, caller, self.receive, halo.device)
        requested, _ = all_to_all(group, caller, halo, self.receive, self.send)
        self.sent: Tensor = requested - start
        self.bytes_sent = 0
        rows = total(group, caller, torch.tensor([self.halo], device=halo.device))
        self.any = bool(int(rows))  # else no process communicates

    def begin(self, caller: str, x: Tensor, dtype: torch.dtype) -> Transfer:
        """Begin to send own rows, (own, ...), to where they are needed, and receive (halo, ...).

        dtype : type of the rows while they are sent
        """
        with record_function("sparsetir: pack"):
            packed = x.detach().index_select(0, self.sent).to(dtype)
            return Transfer(self, caller, packed, self.receive, self.send)

    def begin_gradients(self, caller: str, grad: Tensor, dtype: torch.dtype) -> Transfer:
        """Begin to send gradients of the halo, (halo, ...), back, and receive (len(sent), ...)."""
        with record_function("sparsetir: pack"):
            return Transfer(self, caller, grad.to(dtype).contiguous(), self.send, self.receive)

    def add_returned(self, rows: Tensor, to: Tensor) -> None:
        """Add rows (len(sent), ...) to the own rows in `sent`, (own, ...), in place.

        The order of sums is fixed.
        """
        # Heads one by one if each is contiguous, as torch then adds whole rows.
        apart = to.dim() == 3 and not to.is_contiguous()
        each = zip(to.unbind(1), rows.unbind(1), strict=True) if apart else [(to, rows)]
        # Threads of a GPU add in any order, so add by process, whose rows are distinct.
        sizes = self.send if to.is_cuda else [len(self.sent)]
        for into, some in each:
            parts = zip(self.sent.split(sizes), some.split(sizes), strict=True)
            for places, part in parts:
                into.index_add_(0, places, part.to(to.dtype).contiguous())


class Transfer:
    """Rows in transfer.

    packed : rows to send, (sum(send), ...), in the order of their destinations
    """

    def __init__(
        self, exchange: Exchange, caller: str, packed: Tensor, receive: list[int], send: list[int]
    ) -> None:
        self._group, self._prefix = exchange.group, caller
        self._packed = packed  # kept alive until it is sent
        self._into = packed.new_empty((sum(receive), *packed.shape[1:]))
        self._work: dist.Work | None = None
        if exchange.any and packed.shape[1:].numel():
            exchange.bytes_sent += packed.nbytes  # no rows are sent to itself
            into, rows = as_bytes(self._into), as_bytes(packed)
            with backend_errors(self._group, caller):
                self._work = dist.all_to_all_single(
                    into, rows, receive, send, group=self._group, async_op=True
                )

    def wait(self) -> Tensor:
        """Wait until all rows have arrived; return them, (sum(receive), ...)."""
        with record_function("sparsetir: wait"), backend_errors(self._group, self._prefix):
            if self._work is not None:
                self._work.wait()
        del self._packed
        return self._into


class Passage:
    """An exchange of rows that overlaps with computation, as does that of their gradients.

    Own rows are processed between :meth:`send` and :meth:`receive`. Autograd runs in reverse: the
    gradient of the halo is sent once it is known, and is in transfer while that of own rows is
    computed.

    caller : name of the caller, for errors
    dtype : type of rows and gradients while they are sent
    """

    def __init__(self, exchange: Exchange, caller: str, dtype: torch.dtype) -> None:
        self.exchange, self.caller, self.dtype = exchange, caller, dtype
        self.transfer: Transfer | None = None

    def send(self, x: Tensor) -> Tensor:
        """Begin to send x, (own, ...); return it, to compute with until others' rows arrive."""
        rows, self._sent = _Send.apply(self, x)
        return rows

    def receive(self) -> Tensor:
        """Rows of the halo, (halo, ...)."""
        return _Receive.apply(self, self._sent)

    def wait(self) -> Tensor:
        """The rows in transfer, once they have arrived."""
        transfer, self.transfer = self.transfer, None
        assert transfer is not None
        return transfer.wait()


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, x: Tensor) -> tuple[Tensor, Tensor]:
        passage.transfer = passage.exchange.begin(passage.caller, x, passage.dtype)
        ctx.passage = passage
        return x, x.new_empty(0)  # shows autograd that the halo depends on x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        grad, passage = grads[0], ctx.passage
        # A copy, as others may hold the gradient, too; made while rows are in transfer. 16-bit
        # numbers are summed in float32.
        own_grad = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        returned = passage.wait()
        with record_function("sparsetir: unpack"):
            passage.exchange.add_returned(returned, own_grad)
        return None, own_grad.to(grad.dtype)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, sent: Tensor) -> Tensor:
        ctx.passage = passage
        return passage.wait().to(sent.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (halo,), passage = grads, ctx.passage
        passage.transfer = passage.exchange.begin_gradients(passage.caller, halo, passage.dtype)
        return None, halo.new_empty(0)
