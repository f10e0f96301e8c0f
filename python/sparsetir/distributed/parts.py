"""Products of one process, with its edges between own nodes or those from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from sparsetir.distributed.exchange import Passage
from sparsetir.ops.message_kernels import gspmm
from sparsetir.ops.messages_library import as_messages, gradients_of_product, heads_first
from sparsetir.ops.operands import Operand, resolve
from sparsetir.ops.products import SDDMM, SPMM, SPMM_TRANSPOSED
from sparsetir.ops.registry import wants_gradient
from sparsetir.ops.structure import structure_of

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


# Rows whose products are added at a time: few of all, but enough to make a kernel's call cheap.
BLOCK_ROWS = 8192
MAX_BLOCKS = 64  # a kernel is planned for each


class Block(NamedTuple):
    """Rows of a matrix, from `first` on, whose elements begin at `start`."""

    first: int
    start: int
    A: Operand


def times(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A x, with heads as for :func:`with_heads`."""
    values, x = with_heads(values, x, heads)
    return SPMM(A.rowptr, A.col, values, x, "sum")


def blocks_of(A: Operand) -> list[Block]:
    """Rows of A in pieces, without those that have no elements."""
    size = max(BLOCK_ROWS, -(-A.m // MAX_BLOCKS))
    blocks = []
    for first in range(0, A.m, size):
        rowptr = A.rowptr[first : first + size + 1]
        start, stop = int(rowptr[0]), int(rowptr[-1])
        if stop > start:
            part = Operand(rowptr - start, A.col[start:stop], len(rowptr) - 1, A.n)
            blocks.append(Block(first, start, resolve(part, caller="blocks_of")))
    return blocks


def add_times(
    blocks: list[Block], values: Tensor | None, x: Tensor, heads: int, out: Tensor
) -> None:
    """Add A x to out (m, feat) or (heads, m, feat), in place; a piece of it at a time.

    blocks : the blocks of A
    """
    for first, start, A in blocks:
        some = None if values is None else values[..., start : start + len(A.col)].contiguous()
        out[..., first : first + A.m, :] += times(A, some, x, heads)


def transposed(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A^T x, summed over heads that x lacked."""
    values, x = with_heads(values, x, heads)
    product = SPMM_TRANSPOSED(A.rowptr, A.col, values, x, A.n)
    return product.sum(0) if heads < 0 else product


def dots(A: Operand, grad: Tensor, x: Tensor, values: Tensor) -> Tensor:
    """The gradient of values, in their shape."""
    if x.dim() < grad.dim():
        x = x.expand(grad.shape[0], *x.shape)
    sums = sampled(A, grad, x)
    return sums.sum(0) if sums.dim() > values.dim() else sums


def sampled(A: Operand, x: Tensor, y: Tensor) -> Tensor:
    """Products of rows of x and y at A's elements."""
    return SDDMM(A.rowptr, A.col, x, y)


def with_heads(values: Tensor | None, x: Tensor, heads: int) -> tuple[Tensor | None, Tensor]:
    """Both operands with heads, if one of them has heads.

    heads : heads of x; 0 if there are none, -1 if values alone have some
    """
    if values is not None and heads > 0 and values.dim() == 1:
        values = values.expand(heads, -1)
    if values is not None and heads < 0 and x.dim() == 2:
        x = x.expand(values.shape[0], *x.shape)
    return values, x


def split(graph: DistGraph, values: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The values of edges between own nodes, and of those from others."""
    if values is None:
        return None, None
    inner, outer = values.split([len(A.col) for A in graph.parts], -1)
    return inner.contiguous(), outer.contiguous()


def rows_first(x: Tensor) -> Tensor:
    """Transpose (heads, rows, feat) to (rows, heads, feat), or back."""
    return x.transpose(0, 1) if x.dim() == 3 else x


def local_product(graph: DistGraph, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """The product of edges between own nodes with x; with gradients, as all below.

    heads : the argument of :func:`with_heads`
    """
    return _Product.apply(graph, values, x, heads, None)


def add_remote(
    graph: DistGraph, values: Tensor | None, halo: Tensor, heads: int, out: Tensor
) -> Tensor:
    """Add the product of edges from other nodes to one of :func:`local_product`, in place."""
    return _Product.apply(graph, values, halo, heads, out)


class _Product(torch.autograd.Function):
    """A product that keeps x only if values need a gradient."""

    @staticmethod
    def forward(
        ctx: Any, graph: DistGraph, values: Tensor | None, x: Tensor, heads: int, out: Tensor | None
    ) -> Tensor:
        ctx.name, ctx.A = ("local", graph.local) if out is None else ("remote", graph.remote)
        with record_function(f"sparsetir: {ctx.name} product"):
            if out is None:
                out = times(graph.local, values, x, heads)
            else:
                add_times(graph.remote_blocks, values, x, heads, out)
                ctx.mark_dirty(out)
        kept = values is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(values, x if kept else None)
        ctx.heads = heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        values, x = ctx.saved_tensors
        grad, of_values, of_x = grads[0].contiguous(), None, None
        with record_function(f"sparsetir: {ctx.name} product"):
            if ctx.needs_input_grad[1]:
                of_values = dots(ctx.A, grad, x, values)
            if ctx.needs_input_grad[2]:
                of_x = transposed(ctx.A, values, grad, ctx.heads)
        return None, of_values, of_x, None, grad if ctx.needs_input_grad[4] else None


class Sampled:
    """Products of rows at edges, with gradients: :meth:`local`, then :meth:`remote`."""

    def __init__(self, graph: DistGraph, X: Tensor) -> None:
        """Take rows of targets, (own, feat) or (heads, own, feat)."""
        self.graph, self.X = graph, X
        # The part of X's gradient from edges of other nodes. It is added, a piece at a time, to
        # that from own nodes, which is computed later.
        self.later: tuple[Tensor, Tensor] | None = None

    def local(self, y: Tensor) -> Tensor:
        """The products at edges between own nodes, from rows of these."""
        return _Sampled.apply(self, self.X, y, None)

    def remote(self, inner: Tensor, y: Tensor) -> Tensor:
        """The products at all own edges; inner : those of :meth:`local`, y : rows of the others."""
        return _Sampled.apply(self, self.X.detach(), y, inner)


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: Sampled, X: Tensor, y: Tensor, inner: Tensor | None) -> Tensor:
        ctx.of, ctx.is_local = of, inner is None
        ctx.save_for_backward(X, y)
        with record_function(f"sparsetir: {'local' if ctx.is_local else 'remote'} product"):
            if inner is None:
                return sampled(of.graph.local, X, y)
            return torch.cat([inner, sampled(of.graph.remote, X, y)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        of, (X, y), (grad,) = ctx.of, ctx.saved_tensors, grads
        graph, heads = of.graph, len(X) if X.dim() == 3 else 0
        of_x = of_y = None
        if not ctx.is_local:
            inner, outer = split(graph, grad)
            assert outer is not None
            of.later = outer, y
            if ctx.needs_input_grad[2]:
                with record_function("sparsetir: remote product"):
                    of_y = transposed(graph.remote, outer, X, heads)
            return None, None, of_y, inner
        later, of.later = of.later, None
        with record_function("sparsetir: local product"):
            if ctx.needs_input_grad[1]:
                of_x = times(graph.local, grad, y, heads)
                if later is not None:
                    outer, halo = later
                    add_times(graph.remote_blocks, outer, halo, heads, of_x)
            if ctx.needs_input_grad[2]:
                of_y = transposed(graph.local, grad, X, heads)
        return None, of_x, of_y, None


# -- maxima and minima -----------------------------------------------------------------------------


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
    heads : the argument of :func:`with_heads`
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
