"""Rows that processes need of each other: who sends which is found once, then sent as often as
features change, and gradients go the same way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from sparsetir.distributed.collectives import as_bytes, in_time, split_sizes, swap, total


class Exchange:
    """The rows that each process sends to each, and gets of each: its halo.

    group : of the processes
    own : rows of this process
    sent : (k,) int64 own rows in the order in which they go; one that several processes need is
        there several times
    send, receive : for each process, how many rows go to it and come from it
    halo : rows that come, the sum of `receive`, in the order of their processes
    bytes_sent : to other processes so far, but for what the engine adds
    """

    group: dist.ProcessGroup
    own: int
    halo: int
    bytes_sent: int

    def __init__(
        self, group: dist.ProcessGroup, who: str, own: int, start: int, halo: Tensor, owners: Tensor
    ) -> None:
        """Ask for rows; collective.

        start : the new number of the first own row
        halo : (halo,) new numbers of the rows that are needed, ascending
        owners : (halo,) their processes
        """
        count = dist.get_world_size(group)
        self.group, self.own, self.halo = group, own, len(halo)
        self.receive: list[int] = torch.bincount(owners, minlength=count).tolist()
        self.send: list[int] = split_sizes(group, who, self.receive, halo.device)
        asked, _ = swap(group, who, halo, self.receive, self.send)
        self.sent: Tensor = asked - start
        self.bytes_sent = 0
        rows = total(group, who, torch.tensor([self.halo], device=halo.device))
        self._any = bool(int(rows))  # else no process sends anything, nor begins to

    def begin(self, who: str, x: Tensor, dtype: torch.dtype | None, out: Tensor) -> Arriving:
        """Send own rows to those who need them.

        x : (own, ...)
        dtype : that they have on their way, by default x's
        out : (halo, ...) of x's dtype, contiguous, where they come
        """
        with record_function("sparsetir: pack"):
            packed = x.detach().index_select(0, self.sent)
            packed = packed if dtype is None else packed.to(dtype)
            into = out if packed.dtype == out.dtype else torch.empty_like(out, dtype=packed.dtype)
            work = self._start(who, into, packed, self.receive, self.send)
        return Arriving(self, who, work, packed, into, out)

    def begin_back(self, who: str, grad: Tensor, dtype: torch.dtype | None) -> Returning:
        """Send gradients of the halo, (halo, ...), back to whose rows they are."""
        with record_function("sparsetir: pack"):
            packed = (grad if dtype is None else grad.to(dtype)).contiguous()
            into = packed.new_empty((len(self.sent), *packed.shape[1:]))
            work = self._start(who, into, packed, self.send, self.receive)
        return Returning(self, who, work, packed, into)

    def _start(
        self, who: str, into: Tensor, packed: Tensor, receive: list[int], send: list[int]
    ) -> object:
        if not self._any or not packed.shape[1:].numel():
            return None
        self.bytes_sent += packed.nbytes  # rows go to other processes alone
        with in_time(self.group, who):
            return dist.all_to_all_single(
                as_bytes(into), as_bytes(packed), receive, send, group=self.group, async_op=True
            )

    def _wait(self, who: str, work: Any) -> None:
        with record_function("sparsetir: wait"), in_time(self.group, who):
            if work is not None:
                work.wait()

    def add_returned(self, rows: Tensor, to: Tensor) -> None:
        """Add (len(sent), ...) rows to the own rows that they are of, (own, ...), in place.

        Sums are in one order, and those of 16-bit numbers in float32.
        """
        if to.dtype.itemsize == 2:
            wide = to.float()
            self.add_returned(rows, wide)
            to.copy_(wide)
            return
        # Heads one by one where each has memory of its own, as torch then adds whole rows.
        each = [to] if to.is_contiguous() else list(to.unbind(1))
        given = [rows] if to.is_contiguous() else rows.unbind(1)
        # Threads of a GPU add in any order, but for the rows of one process, which differ.
        sizes = self.send if to.is_cuda else [len(self.sent)]
        for into, some in zip(each, given, strict=True):
            parts = zip(self.sent.split(sizes), some.split(sizes), strict=True)
            for places, part in parts:
                into.index_add_(0, places, part.to(to.dtype).contiguous())


class Arriving:
    """Rows of a halo under way."""

    def __init__(
        self, exchange: Exchange, who: str, work: object, packed: Tensor, into: Tensor, out: Tensor
    ) -> None:
        self._exchange, self._who, self._work = exchange, who, work
        self._packed, self._into, self._out = packed, into, out  # alive until they have gone

    def wait(self) -> Tensor:
        """(halo, ...) when all of them are there."""
        self._exchange._wait(self._who, self._work)
        into, out = self._into, self._out
        del self._packed, self._into, self._out
        return out if into is out else out.copy_(into)


class Returning:
    """Gradients of halos on their way to whose rows they are."""

    def __init__(
        self, exchange: Exchange, who: str, work: object, packed: Tensor, into: Tensor
    ) -> None:
        self._exchange, self._who, self._work = exchange, who, work
        self._packed, self._into = packed, into

    def add_to(self, grad: Tensor) -> Tensor:
        """Wait for them and add them to the gradients of own rows, (own, ...), in place."""
        self._exchange._wait(self._who, self._work)
        del self._packed
        with record_function("sparsetir: unpack"):
            self._exchange.add_returned(self._into, grad)
        return grad
