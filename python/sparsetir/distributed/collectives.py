"""Collective steps by `torch.distributed`: send rows, agree, fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.runtime.file_errors import first_line
from sparsetir.runtime.refusals import wrong

T = TypeVar("T")


class DistributedError(RuntimeError):
    """Raised if another process of the group ended, hangs, or got invalid input."""


def group_of(caller: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, by default all processes; RuntimeError if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{caller}: expected a group of processes: run under torchrun and call "
            "torch.distributed.init_process_group first"
        )
    joined = dist.group.WORLD if group is None else group
    assert joined is not None
    return joined


def check_device(caller: str, name: str, group: dist.ProcessGroup, x: Tensor) -> None:
    """Raise unless the group's backend sends tensors on x's device."""
    engine = str(dist.get_backend(group))
    wanted = {"nccl": "cuda", "gloo": "cpu", "mpi": "cpu"}.get(engine, x.device.type)
    if x.device.type != wanted:
        raise wrong(
            caller, name, f"to be on {wanted}, as processes are joined by {engine}", x.device
        )


@contextmanager
def backend_errors(group: dist.ProcessGroup, caller: str) -> Iterator[None]:
    """Turn the backend's errors about processes that ended or hang into DistributedError."""
    try:
        yield
    except DistributedError:
        raise
    except RuntimeError as error:  # base class of torch.distributed's errors
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise DistributedError(
            f"{caller}: process {rank} of {size}: another process has ended, was not there in "
            f"time, or does something else ({first_line(error)})"
        ) from error


def check_on_all(group: dist.ProcessGroup, caller: str, check: Callable[[], T]) -> T:
    """Run `check` on all processes, or fail on all; collective, as is all below.

    check : raises ValueError, TypeError, OSError or ImportError for an error of this process, and
        returns a value that must be equal on all

    Raises that error on its process and DistributedError, with its text, on the others;
    DistributedError on all if results differ.
    """
    error, value_here = None, None
    try:
        value_here = check()
    except (ValueError, TypeError, OSError, ImportError) as caught:
        error = caught
    text = None if error is None else f"{type(error).__name__}: {error}"
    answers: list[Any] = [None] * dist.get_world_size(group)
    with backend_errors(group, caller):
        dist.all_gather_object(answers, (text, value_here), group=group)
    if error is not None:
        raise error
    for rank, (text, value) in enumerate(answers):
        if text is not None:
            raise DistributedError(f"{caller}: process {rank} of {len(answers)}: {text}")
        if value != answers[0][1]:
            raise DistributedError(
                f"{caller}: expected the same on all processes, got {answers[0][1]} on process 0 "
                f"and {value} on process {rank}"
            )
    return value_here  # type: ignore[return-value]


def total(group: dist.ProcessGroup, caller: str, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a small tensor over the processes by `op`, in place."""
    with backend_errors(group, caller):
        dist.all_reduce(x, op, group=group)
    return x


def split_sizes(
    group: dist.ProcessGroup, caller: str, send: Sequence[int], device: torch.device
) -> list[int]:
    """The number of rows from each process, given the number of rows to each."""
    sent = torch.tensor(send, dtype=torch.int64, device=device)
    received = torch.empty_like(sent)
    with backend_errors(group, caller):
        dist.all_to_all_single(received, sent, group=group)
    return received.tolist()


def all_to_all(
    group: dist.ProcessGroup,
    caller: str,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int] | None = None,
) -> tuple[Tensor, list[int]]:
    """Send rows of x, in order: `send[p]` of them to process p.

    x : (rows, ...) of any dtype; only the number of rows may differ between processes
    receive : number of rows from each process; without it, one more message is exchanged

    Returns the received rows in the order of their processes, and the number from each.
    """
    sizes = list(receive) if receive is not None else split_sizes(group, caller, send, x.device)
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if x.shape[1:].numel():
        with backend_errors(group, caller):
            dist.all_to_all_single(as_bytes(out), as_bytes(x), sizes, list(send), group=group)
    return out, sizes


def as_bytes(x: Tensor) -> Tensor:
    """View x as (rows, bytes), as backends lack some dtypes; rows must not be empty."""
    rows = x.contiguous().view(x.shape[0], x.shape[1:].numel())
    return rows.view(torch.uint8)
