"""Sums over the offsets of a kernel: y[i] = sum of x[j] W[r] over pairs (i, j) of offsets r.

Offsets are relations of relational gather-matmul-scatter, whose kernels run on a CPU; elsewhere
pairs are gathered, multiplied and scattered offset by offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsetir.nn.points import KernelMap, Places, transposed
from sparsetir.ops import rgms_kernels
from sparsetir.ops.relations import RelationRows, Relations

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
        return _sums(x, weight, pairs, inputs, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), pairs, (grad,) = ctx.saved_tensors, ctx.pairs, grads
        for_x, for_weight, *_ = ctx.needs_input_grad
        return (
            _sums(grad, weight.mT, pairs, ctx.inputs, True) if for_x else None,
            _outer(x, grad, pairs, ctx.inputs) if for_weight else None,
            None,
            None,
        )


class _Rows(RelationRows):
    """Of a map, each row with one element."""

    def __init__(self, pairs: KernelMap) -> None:
        self.row_ptr, self.rows = pairs.row_ptr, pairs.rows
        self.indptr, self.indices = pairs.indptr, pairs.indices
        self.order = None


class _Relations(Relations):
    """The pairs of a map as edges; `inputs` : the places of its inputs."""

    def __init__(self, pairs: KernelMap, inputs: Places) -> None:
        self.n, self.m, self.count = pairs.n, pairs.m, pairs.offsets
        self.edges, self.device = len(pairs.rows), pairs.rows.device
        self._pairs, self._inputs = pairs, inputs

    @cached_property
    def by_target(self) -> RelationRows:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _Rows(self._pairs)

    @cached_property
    def by_source(self) -> RelationRows:
        return _Rows(transposed(self._pairs, self._inputs))


def _sums(x: Tensor, weight: Tensor, pairs: KernelMap, inputs: Places, back: bool) -> Tensor:
    """back : x belongs to the outputs of the map, the result to its inputs."""
    if x.device.type == "cpu":
        return rgms_kernels.of_nodes(_Relations(pairs, inputs), x, weight, None, back)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(pairs.n if back else pairs.m, weight.shape[2], dtype=wide, device=x.device)
    for r, rows, indices in _by_offset(pairs):
        rows, indices = (indices, rows) if back else (rows, indices)
        out.index_add_(0, rows, x[indices].to(wide) @ weight[r].to(wide))
    return out.to(x.dtype)


def _outer(x: Tensor, grad: Tensor, pairs: KernelMap, inputs: Places) -> Tensor:
    """(offsets, feat_in, feat) sums of x[j] by grad[i] over pairs."""
    if x.device.type == "cpu":
        return rgms_kernels.of_weights(_Relations(pairs, inputs), x, grad, None)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(pairs.offsets, x.shape[1], grad.shape[1], dtype=wide, device=x.device)
    for r, rows, indices in _by_offset(pairs):
        torch.mm(x[indices].to(wide).T, grad[rows].to(wide), out=out[r])
    return out.to(x.dtype)


def _by_offset(pairs: KernelMap) -> Iterator[tuple[int, Tensor, Tensor]]:
    sizes = pairs.row_ptr.diff().tolist()
    both = zip(pairs.rows.split(sizes), pairs.indices.split(sizes), strict=True)
    for r, (rows, indices) in enumerate(both):
        if sizes[r]:
            yield r, rows, indices
