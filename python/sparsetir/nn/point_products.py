"""Sums over the offsets of a kernel: y[i] = sum of x[j] W[r] over pairs (i, j) of offsets r.

Offsets are relations of relational gather-matmul-scatter, whose kernels run on a CPU; elsewhere
pairs are gathered, multiplied and scattered offset by offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsetir.compiled import compiled
from sparsetir.lower import lower_template
from sparsetir.nn.points import KernelMap, Places, transposed
from sparsetir.ops import rgms_kernels
from sparsetir.ops.relations import RelationRows, Relations
from sparsetir.ops.structure import DTYPES, target_of
from sparsetir.request import default_threads
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.search.choose_rgms import choose_rgms
from sparsetir.schedules.templates import rgms as template

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
    @once_differentiable
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
    feat, dtype = weight.shape[2], x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    x, weight = (a.detach().to(wide).contiguous() for a in (x, weight))
    if x.device.type != "cpu" or not len(pairs.rows):
        out = x.new_zeros(pairs.m, feat)
        for r, rows, indices in _by_offset(pairs):
            out.index_add_(0, rows, x[indices] @ weight[r])
        return out.to(dtype)
    out, target = x.new_empty(pairs.m, feat), target_of(x.device)
    idtype = "int64" if pairs.rows.dtype == torch.int64 else "int32"
    problem = Rgms(DTYPES[wide], idtype, weighted=False)
    count, feat_in = len(pairs.rows), x.shape[1]
    config = choose_rgms(problem, count, feat_in, feat, target, default_threads())
    kernel = compiled(
        (problem, config), target, lambda: lower_template(template, problem, config, target)
    )
    given = {
        "x": x, "w": weight, "out": out, "row_ptr": pairs.row_ptr, "rows": pairs.rows,
        "indptr": pairs.indptr, "indices": pairs.indices, "relations": pairs.offsets,
        "m": pairs.m, "n": pairs.n, "nnz_rows": count, "nnz": count, "feat_in": feat_in,
        "feat": feat,
    }  # fmt: skip
    kernel(**{name: given[name] for name in kernel.signature.names})
    return out.to(dtype)


class _Rows(RelationRows):
    """Of a map, each row with one element."""

    def __init__(self, pairs: KernelMap) -> None:
        self.row_ptr, self.rows = pairs.row_ptr, pairs.rows
        self.indptr, self.indices = pairs.indptr, pairs.indices
        self.order = None


class _Relations(Relations):
    """The pairs of a map as edges."""

    def __init__(self, pairs: KernelMap) -> None:
        self.n, self.m, self.count = pairs.n, pairs.m, pairs.offsets
        self.edges, self.device = len(pairs.rows), pairs.rows.device
        self.by_target = _Rows(pairs)


def _outer(x: Tensor, grad: Tensor, pairs: KernelMap) -> Tensor:
    """(offsets, feat_in, feat) sums of x[j] by grad[i] over pairs."""
    if x.device.type == "cpu":
        return rgms_kernels.of_weights(pairs.remembered("relations", _Relations), x, grad, None)
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
