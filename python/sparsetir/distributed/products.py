"""Sparse products over the processes of a graph, with gradients.

Each process has the rows of its own nodes. Rows of other nodes that its edges need come by one
message from each process that has some; while they are under way the edges between own nodes are
multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from sparsetir.distributed.arguments import (
    cast,
    check_rows,
    check_values,
    compared,
    likeness,
    shown,
    untraced,
)
from sparsetir.distributed.extrema import Extremum
from sparsetir.distributed.parts import (
    add_times,
    dots,
    rows_first,
    sampled,
    split,
    times,
    transposed,
)
from sparsetir.ops import messages
from sparsetir.ops.tensors import check_tensor
from sparsetir.planning.vocabulary import reduction
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


def spmm(graph: DistGraph, x: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """C[i, k] = reduce over the edges (j, i) of value * x[j, k]; collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    x : (own, feat) or (own, heads, feat) Tensor
        Features of own nodes; float16, bfloat16, float32 or float64, of as many features on all
        processes.
    reduce : {"sum", "mean", "max", "min"}
        As :func:`sparsetir.ops.spmm` has them.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Of own edges in the graph's order; by default the graph's, or ones.

    Returns
    -------
    (own, feat) or (own, heads, feat) Tensor
        Differentiable once with respect to x and the values; gradients of rows of other processes
        go back to them.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    DistributedError
        Where only another process was given something wrong, or has ended.

    Notes
    -----
    Sums differ from those of one process by rounding alone, as own and other nodes are added up
    apart.
    """

    found = spmm_by_heads(graph, _swapped(x), reduce, _swapped(values, 2))
    return found.transpose(0, 1) if found.dim() == 3 else found


@untraced
def spmm_by_heads(
    graph: DistGraph, x: Tensor, reduce: str = "sum", values: Tensor | None = None
) -> Tensor:
    """:func:`spmm` where heads come first: x (heads, own, feat), values (heads, nnz)."""

    def check() -> object:
        kind = reduction("spmm", reduce)
        check_rows("spmm", "x", x, graph.own, (2, 3))
        v = graph.values if values is None else values
        if v is not None and values is not None:
            check_values("spmm", v, x, graph.nnz)
        return kind, *likeness(x), *likeness(v, -1)

    compared(graph, "spmm", check)
    reduce = reduction("spmm", reduce)
    if values is None and graph.values is not None:
        values = graph.values.to(x.dtype)
    x, values = cast(x, values)
    heads = x.shape[0] if x.dim() == 3 else 0 if values is None or values.dim() == 1 else -1
    # Of 16 bits, terms of extrema are compared in float32, and sums of means may be past the end.
    wide = x.dtype if reduce == "sum" else torch.promote_types(x.dtype, torch.float32)
    weights = None if values is None else values.to(wide)
    product = Extremum if reduce in ("max", "min") else _Spmm
    sent = graph.exchange_dtype or x.dtype
    return product.apply(graph, x.to(wide), weights, reduce, heads, sent).to(x.dtype)


def sddmm(graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
    """OUT[e] = sum over k of X[i, k] * Y[j, k] for each own edge e = (j, i); collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    X, Y : (own, feat) or (own, heads, feat) Tensor
        Of own nodes as targets and as sources.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
        In the order of the graph's edges. Differentiable once.

    Raises
    ------
    TypeError, ValueError, DistributedError
        As :func:`spmm`.
    """

    found = _sampled(graph, _swapped(X), _swapped(Y))
    return found.t() if found.dim() == 2 else found


@untraced
def _sampled(graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
    """:func:`sddmm` where heads come first."""

    def check() -> object:
        check_rows("sddmm", "X", X, graph.own, (2, 3))
        check_rows("sddmm", "Y", Y, graph.own, (2, 3), X)
        if X.shape != Y.shape:
            raise wrong("sddmm", "Y", f"shape {shown(X)} as 'X'", shown(Y))
        return likeness(X)

    compared(graph, "sddmm", check)
    X, Y = cast(X, Y)
    return _Sddmm.apply(graph, X, Y)


def _swapped(x: object, least: int = 3) -> Any:
    """Heads first, of an operand whose second dimension they are; `least` dimensions with them."""
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.dim() == least else x


def softmax(graph: DistGraph, values: Tensor) -> Tensor:
    """Softmax over the edges into each own node, as :func:`sparsetir.ops.sparse_softmax`.

    All edges into a node are on its process, so nothing is sent.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    values : (nnz,) or (nnz, heads) Tensor
        In the order of the graph's edges.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
    """
    return messages.sparse_softmax(graph.whole, values)


@untraced
def with_halo(graph: DistGraph, x: Tensor) -> Tensor:
    """Features of all nodes that own edges come from: own ones, then the others; collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    x : (own, ...) Tensor
        Of any floating dtype.

    Returns
    -------
    (own + halo, ...) Tensor
        By which `graph.edge_index` counts sources. Differentiable once: the gradients of other
        nodes are added to those on their processes.
    """

    def check() -> object:
        check_tensor("with_halo", "x", x)
        if x.dim() < 1 or len(x) != graph.own:
            expected = f"{graph.own} rows, one for each own node"
            raise wrong("with_halo", "x", expected, f"shape {tuple(x.shape)}")
        return dtype_name(x), tuple(x.shape[1:])

    compared(graph, "with_halo", check)
    return _WithHalo.apply(graph, x)


# -- with gradients -------------------------------------------------------------------------------


class _Spmm(torch.autograd.Function):
    """Sums or means; x (own, feat) or (heads, own, feat), values (nnz,), (heads, nnz) or None."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: DistGraph,
        x: Tensor,
        values: Tensor | None,
        reduce: str,
        heads: int,
        sent: torch.dtype,
    ) -> Tensor:
        """See :func:`sparsetir.distributed.parts.with_heads` for heads; sent : on their way."""
        ctx.graph = graph
        inner, outer = split(graph, values)
        rows = rows_first(x)
        halo_rows = rows.new_empty((graph.halo, *rows.shape[1:]))
        arriving = graph.exchange.begin("spmm", rows, sent, halo_rows)
        with record_function("sparsetir: local product"):
            out = times(graph.local, inner, x, heads)
        halo = rows_first(arriving.wait())
        with record_function("sparsetir: remote product"):
            add_times(graph.remote_blocks, outer, halo, heads, out)
        if reduce == "mean":
            out /= graph.degrees[:, None].to(out.dtype)
        kept = values is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(values, x if kept else None, halo if kept else None)
        ctx.heads, ctx.sent, ctx.mean = heads, sent, reduce == "mean"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        graph, heads = ctx.graph, ctx.heads
        values, x, halo = ctx.saved_tensors
        inner, outer = split(graph, values)
        grad = grads[0].contiguous()
        if ctx.mean:
            grad = grad / graph.degrees[:, None].to(grad.dtype)
        returning, of_x, of_values = None, None, None
        if ctx.needs_input_grad[1]:
            with record_function("sparsetir: remote product"):
                of_halo = transposed(graph.remote, outer, grad, heads)
            returning = graph.exchange.begin_back("spmm", rows_first(of_halo), ctx.sent)
            del of_halo
        with record_function("sparsetir: local product"):
            if returning is not None:
                of_x = transposed(graph.local, inner, grad, heads)
            if ctx.needs_input_grad[2]:
                parts = ((graph.local, x), (graph.remote, halo))
                of_values = torch.cat([dots(A, grad, y, values) for A, y in parts], -1)
        if returning is not None and of_x is not None:
            returning.add_to(rows_first(of_x))
        return None, of_x, of_values, None, None, None


class _Sddmm(torch.autograd.Function):
    """X, Y : (own, feat) or (heads, own, feat)."""

    @staticmethod
    def forward(ctx: Any, graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
        ctx.graph = graph
        rows = rows_first(Y)
        halo_rows = rows.new_empty((graph.halo, *rows.shape[1:]))
        arriving = graph.exchange.begin("sddmm", rows, graph.exchange_dtype, halo_rows)
        with record_function("sparsetir: local product"):
            inner = sampled(graph.local, X, Y)
        halo = rows_first(arriving.wait())
        with record_function("sparsetir: remote product"):
            outer = sampled(graph.remote, X, halo)
        ctx.save_for_backward(X, Y, halo)
        return torch.cat([inner, outer], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        graph = ctx.graph
        X, Y, halo = ctx.saved_tensors
        inner, outer = split(graph, grads[0])
        heads = X.shape[0] if X.dim() == 3 else 0
        returning = of_x = of_y = None
        if ctx.needs_input_grad[2]:
            with record_function("sparsetir: remote product"):
                of_halo = transposed(graph.remote, outer, X, heads)
            returning = graph.exchange.begin_back(
                "sddmm", rows_first(of_halo), graph.exchange_dtype
            )
        with record_function("sparsetir: local product"):
            if ctx.needs_input_grad[1]:
                of_x = times(graph.local, inner, Y, heads)
                add_times(graph.remote_blocks, outer, halo, heads, of_x)
            if returning is not None:
                of_y = transposed(graph.local, inner, X, heads)
        if returning is not None and of_y is not None:
            returning.add_to(rows_first(of_y))
        return None, of_x, of_y


class _WithHalo(torch.autograd.Function):
    """x : (own, ...)."""

    @staticmethod
    def forward(ctx: Any, graph: DistGraph, x: Tensor) -> Tensor:
        ctx.graph = graph
        out = x.new_empty((graph.own + graph.halo, *x.shape[1:]))
        arriving = graph.exchange.begin("with_halo", x, graph.exchange_dtype, out[graph.own :])
        out[: graph.own] = x
        arriving.wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        graph, (grad,) = ctx.graph, grads
        returning = graph.exchange.begin_back("with_halo", grad[graph.own :], graph.exchange_dtype)
        return None, returning.add_to(
            grad[: graph.own].clone(memory_format=torch.contiguous_format)
        )
