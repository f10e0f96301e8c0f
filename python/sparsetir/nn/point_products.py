"""Sums over the offsets of a kernel: y[i] = sum of x[j] W[r] over pairs (i, j) of offsets r."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetir.nn.points import KernelMap, Places, transposed

__all__ = ["products"]


def products(x: Tensor, weight: Tensor, pairs: KernelMap, inputs: Places) -> Tensor:
    """(m, feat), of x (n, feat_in) and weight (offsets, feat_in, feat), with gradients for both.

    inputs : the places of x
    """
    return _Products.apply(x, weight, pairs, inputs)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pairs: KernelMap, inputs: Places) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pairs, ctx.inputs = pairs, inputs
        return _sums(x, weight, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), pairs, (grad,) = ctx.saved_tensors, ctx.pairs, grads
        for_x, for_weight, *_ = ctx.needs_input_grad
        return (
            _sums(grad, weight.mT, transposed(pairs, ctx.inputs)) if for_x else None,
            _outer(x, grad, pairs) if for_weight else None,
            None,
            None,
        )


def _sums(x: Tensor, weight: Tensor, pairs: KernelMap) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(pairs.m, weight.shape[2], dtype=wide, device=x.device)
    for r, (rows, indices) in _by_offset(pairs):
        out.index_add_(0, rows, x[indices].to(wide) @ weight[r].to(wide))
    return out.to(x.dtype)


def _outer(x: Tensor, grad: Tensor, pairs: KernelMap) -> Tensor:
    """(offsets, feat_in, feat) sums of x[j] by grad[i] over pairs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(pairs.offsets, x.shape[1], grad.shape[1], dtype=wide, device=x.device)
    for r, (rows, indices) in _by_offset(pairs):
        torch.mm(x[indices].to(wide).T, grad[rows].to(wide), out=out[r])
    return out.to(x.dtype)


def _by_offset(pairs: KernelMap) -> Any:
    sizes = pairs.row_ptr.diff().tolist()
    both = zip(pairs.rows.split(sizes), pairs.indices.split(sizes), strict=True)
    return [(r, pair) for r, pair in enumerate(both) if sizes[r]]
