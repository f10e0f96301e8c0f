"""Maxima and minima over edges from own nodes and from others, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from sparsetir.distributed.exchange import Passage
from sparsetir.distributed.parts import rows_first, split, with_heads
from sparsetir.ops.message_kernels import gspmm
from sparsetir.ops.messages_library import as_messages, gradients_of_product, heads_first
from sparsetir.ops.operands import Operand
from sparsetir.ops.products import SPMM
from sparsetir.ops.registry import wants_gradient
from sparsetir.ops.structure import structure_of

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


def extremum(
    graph: DistGraph,
    passage: Passage,
    rows: Tensor,
    values: Tensor | None,
    largest: bool,
    heads: int,
) -> Tensor:
    """Greatest or least products of rows (own, feat) or (heads, own, feat) and values (nnz,),
    (heads, nnz) or None; float32 or float64, in which products are compared.

    passage : the exchange that has sent own rows
    heads : the argument of :func:`sparsetir.distributed.parts.with_heads`
    """
    placed = wants_gradient(rows, values)
    inner, outer = split(graph, None if values is None else values.detach())
    with torch.no_grad(), record_function("sparsetir: local product"):
        out, place = _extremum(graph.local, inner, rows, largest, heads, placed)
    halo = rows_first(passage.receive())
    with torch.no_grad(), record_function("sparsetir: remote product"):
        before = graph.local.col.shape[0]
        for first, start, A in graph.remote_blocks:
            some = None if outer is None else outer[..., start : start + len(A.col)]
            remote, at_best = _extremum(A, some, halo, largest, heads, placed)
            mine = out[..., first : first + A.m, :]
            better = (remote > mine) if largest else (remote < mine)
            better |= remote.isnan() & ~mine.isnan()
            better |= _empty(graph.local, first, A.m)
            better &= ~_empty(A, 0, A.m)
            mine.copy_(torch.where(better, remote, mine))
            if place is not None and at_best is not None:
                of = place[..., first : first + A.m, :]
                of.copy_(torch.where(better, at_best + (before + start), of))
    return out if place is None else _Chosen.apply(graph, rows, halo, values, out, place, heads)


class _Chosen(torch.autograd.Function):
    """Known extrema, with the edges that they come from, made differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: DistGraph,
        rows: Tensor,
        halo: Tensor,
        values: Tensor | None,
        out: Tensor,
        place: Tensor,
        heads: int,
    ) -> Tensor:
        kept = [rows, halo] if values is not None and ctx.needs_input_grad[3] else [None, None]
        ctx.save_for_backward(values, place, *kept)
        ctx.graph, ctx.heads, ctx.shape = graph, heads, rows.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        graph, heads, (grad,) = ctx.graph, ctx.heads, grads
        values, place, own, halo = ctx.saved_tensors
        shape = (*ctx.shape[:-2], graph.own + graph.halo, ctx.shape[-1])
        # Only gradients of values need the features themselves; others need their shape.
        every = grad.new_empty(()).expand(shape) if own is None else torch.cat([own, halo], -2)
        wide, every = with_heads(values, every, heads)
        gradients = gradients_of_product(graph.edge_index, wide, every, place, grad)
        of_own = of_halo = of_values = None
        if values is not None and ctx.needs_input_grad[3]:
            of_values = gradients["values"]()
            of_values = of_values.sum(0) if of_values.dim() > values.dim() else of_values
        if ctx.needs_input_grad[1]:
            of_x = gradients["b"]()
            of_x = of_x.sum(0) if heads < 0 else of_x
            of_own, of_halo = of_x.split([graph.own, graph.halo], -2)
        return None, of_own, of_halo, of_values, None, None, None


def _extremum(
    A: Operand, values: Tensor | None, x: Tensor, largest: bool, heads: int, placed: bool
) -> tuple[Tensor, Tensor | None]:
    """The extrema over A's elements, and, if `placed`, the element that each comes from."""
    values, x = with_heads(values, x, heads)
    values = None if values is None else values.contiguous()
    if not placed:
        return SPMM(A.rowptr, A.col, values, x, "max" if largest else "min"), None
    u, e, op = as_messages(values, x)
    structure = structure_of(A.rowptr, A.col, A.n)
    out, place = gspmm(structure, u, e, op, "max" if largest else "min", arg=True)
    return heads_first(out, x), None if place is None else heads_first(place, x)


def _empty(A: Operand, first: int, rows: int) -> Tensor:
    """Whether each row from `first` on has no elements, (rows, 1)."""
    starts = A.rowptr[first : first + rows + 1]
    return (starts[1:] == starts[:-1])[:, None]
