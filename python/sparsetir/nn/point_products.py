"""Sums over the offsets of a kernel: y[i] = sum of x[j] W[r] over pairs (i, j) of offsets r.

Offsets are relations of relational gather-matmul-scatter, whose kernels compute them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsetir.nn.points import KernelMap, Places, transposed
from sparsetir.ops.relations import RelationRows, Relations
from sparsetir.ops.rgms_kernels import of_nodes, of_weights

__all__ = ["products"]


def products(x: Tensor, weight: Tensor, pairs: KernelMap, inputs: Places) -> Tensor:
    """(m, feat), of x (n, feat_in) and weight (offsets, feat_in, feat), with gradients for both.

    inputs : the places of x
    """
    relations = pairs.remembered("relations", lambda found: _MapRelations(found, inputs))
    return _Products.apply(x, weight, relations)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, relations: Relations) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.relations = relations
        return of_nodes(relations, x, weight, None, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), relations, (grad,) = ctx.saved_tensors, ctx.relations, grads
        for_x, for_weight, *_ = ctx.needs_input_grad
        return (
            of_nodes(relations, grad, weight.mT, None, True) if for_x else None,
            of_weights(relations, x, grad, None) if for_weight else None,
            None,
        )


class _MapRows(RelationRows):
    """Of a map: each row has one element."""

    def __init__(self, pairs: KernelMap) -> None:
        self.row_ptr, self.rows = pairs.row_ptr, pairs.rows
        self.indptr, self.indices = pairs.indptr, pairs.indices
        self.order, self.computed = None, {}


class _MapRelations(Relations):
    """The pairs of a map as edges; `inputs` : the places of its inputs."""

    def __init__(self, pairs: KernelMap, inputs: Places) -> None:
        self.n, self.m, self.count = pairs.n, pairs.m, pairs.offsets
        self.edges, self.device = len(pairs.rows), pairs.rows.device
        self.by_target, self._pairs, self._inputs = _MapRows(pairs), pairs, inputs

    @cached_property
    def by_source(self) -> RelationRows:
        """The same with inputs for outputs."""
        return _MapRows(transposed(self._pairs, self._inputs))
