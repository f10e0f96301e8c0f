"""The mean loss of several processes, for torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetir.distributed.arguments import untraced
from sparsetir.distributed.collectives import group_of, total


@untraced
def mean(losses: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean of the losses of all processes, for DistributedDataParallel; collective.

    Parameters
    ----------
    losses : Tensor
        Losses of own nodes, of any shape; there may be none.
    group : optional
        By default all processes.

    Returns
    -------
    Tensor
        A number, the same on all processes; NaN if there are no losses at all.

    Notes
    -----
    Its gradient for each loss is processes / losses: DistributedDataParallel divides sums of the
    gradients of weights by the number of processes, which then gives the gradient of the mean, as
    on one process with the whole graph. Separate means of the processes would give more weight to
    nodes of processes that have few.
    """
    return _Mean.apply(losses, group_of("distributed.mean", group))


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide = torch.promote_types(losses.dtype, torch.float32)
        both = torch.stack(
            [losses.sum(dtype=wide).double(), losses.new_tensor(losses.numel()).double()]
        )
        sums = total(group, "distributed.mean", both)
        ctx.shape, ctx.scale = losses.shape, dist.get_world_size(group) / max(1.0, float(sums[1]))
        return (sums[0] / sums[1]).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> object:
        return (grads[0] * ctx.scale).expand(ctx.shape), None
