"""Sparse products and attention over the processes of a graph, with gradients.

Each process has the rows of its own nodes. Rows of other nodes that its edges need come in one
message from each process that has some; meanwhile the edges between own nodes are multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsetir.distributed.arguments import (
    cast,
    check_rows,
    check_values,
    compared,
    likeness,
    shown,
    untraced,
)
from sparsetir.distributed.exchange import Passage
from sparsetir.distributed.parts import (
    Sampled,
    add_remote,
    extremum,
    local_product,
    rows_first,
    split,
)
from sparsetir.ops.messages import softmax_by_heads, sparse_softmax
from sparsetir.ops.tensors import check_tensor, scale_of
from sparsetir.planning.request import reduction
from sparsetir.reductions import EXTREMA, LINEAR, REDUCERS
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
        Features of own nodes; float16, bfloat16, float32 or float64, equally many on all
        processes.
    reduce : {"sum", "mean", "max", "min"}
        The reductions of :func:`sparsetir.ops.spmm`.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Weights of own edges in the graph's order; by default the graph's, or ones.

    Returns
    -------
    (own, feat) or (own, heads, feat) Tensor
        Differentiable once with respect to x and the values; gradients of rows of other processes
        go back to them.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument, which the message names.
    DistributedError
        If only another process got an invalid argument, or one has ended.

    Notes
    -----
    Sums differ from those of one process by rounding alone, as own and other nodes are summed
    separately.
    """

    out = spmm_by_heads(graph, _swapped(x), reduce, _swapped(values, 2))
    return out.transpose(0, 1) if out.dim() == 3 else out


@untraced
def spmm_by_heads(
    graph: DistGraph, x: Tensor, reduce: str = "sum", values: Tensor | None = None
) -> Tensor:
    """:func:`spmm` with heads first: x (heads, own, feat), values (heads, nnz)."""

    def check() -> object:
        kind = reduction("spmm", reduce, (*LINEAR, *EXTREMA))
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
    # Terms of extrema of 16 bits are compared in float32, and sums of means may overflow 16 bits.
    wide = x.dtype if reduce == "sum" else torch.promote_types(x.dtype, torch.float32)
    weights = None if values is None else values.to(wide)
    passage = Passage(graph.exchange, "spmm", graph.exchange_dtype or x.dtype)
    rows = rows_first(passage.send(rows_first(x.to(wide))))
    if reduce in EXTREMA:
        return extremum(graph, passage, rows, weights, reduce == "max", heads).to(x.dtype)
    inner, outer = split(graph, weights)
    out = local_product(graph, inner, rows, heads)
    out = add_remote(graph, outer, rows_first(passage.receive()), heads, out)
    if REDUCERS[reduce].is_scaled:
        out /= graph.degrees[:, None].to(wide)
    return out.to(x.dtype)


def sddmm(graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
    """OUT[e] = sum over k of X[i, k] * Y[j, k] for each own edge e = (j, i); collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    X, Y : (own, feat) or (own, heads, feat) Tensor
        Features of own nodes as targets and as sources.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
        Values in the order of the graph's edges. Differentiable once.

    Raises
    ------
    TypeError, ValueError, DistributedError
        As for :func:`spmm`.
    """

    out = _sampled(graph, _swapped(X), _swapped(Y))
    return out.t() if out.dim() == 2 else out


@untraced
def _sampled(graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
    """:func:`sddmm` with heads first."""

    def check() -> object:
        check_rows("sddmm", "X", X, graph.own, (2, 3))
        check_rows("sddmm", "Y", Y, graph.own, (2, 3), X)
        if X.shape != Y.shape:
            raise wrong("sddmm", "Y", f"shape {shown(X)} as 'X'", shown(Y))
        return likeness(X)

    compared(graph, "sddmm", check)
    X, Y = cast(X, Y)
    passage = Passage(graph.exchange, "sddmm", graph.exchange_dtype or Y.dtype)
    rows = rows_first(passage.send(rows_first(Y)))
    pairs = Sampled(graph, X)
    inner = pairs.local(rows)
    return pairs.remote(inner, rows_first(passage.receive()))


@untraced
def attention(
    graph: DistGraph, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """Attention: out[i] = sum over edges (j, i) of softmax(scale * q[i] . k[j]) * v[j]; collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    q, k : (own, feat) or (own, heads, feat) Tensor
        Queries of targets and keys of sources, of own nodes.
    v : (own, width) or (own, heads, width) Tensor
        Values of sources.
    scale : float, optional
        The factor of scores; by default 1 / sqrt(feat).

    Returns
    -------
    (own, width) or (own, heads, width) Tensor
        A node without edges gives zeros. Differentiable once.

    Raises
    ------
    TypeError, ValueError, DistributedError
        As for :func:`spmm`.

    Notes
    -----
    k and v are sent in one message; weights of edges, (heads, nnz), are kept for the backward pass.
    16-bit operands are multiplied in float32.
    """

    def check() -> object:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor("attention", name, x, q)
            if x.dim() not in (2, 3) or x.shape[1:-1] != q.shape[1:-1] or len(x) != graph.own:
                expected = f"shape ({graph.own}, features) or ({graph.own}, heads, features) as 'q'"
                raise wrong("attention", name, expected, tuple(x.shape))
        if k.shape != q.shape:
            raise wrong("attention", "k", f"shape {tuple(q.shape)} as 'q'", tuple(k.shape))
        number = scale_of("attention", scale, q.shape[-1])
        return number, dtype_name(q), tuple(q.shape[1:]), tuple(v.shape[1:])

    compared(graph, "attention", check)
    scale = scale_of("attention", scale, q.shape[-1])
    q, k, v = cast(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    passage = Passage(graph.exchange, "attention", graph.exchange_dtype or q.dtype)
    rows = passage.send(torch.cat([k, v], -1).to(wide))
    Q = rows_first(q.to(wide)).contiguous()
    feat, heads = q.shape[-1], len(Q) if q.dim() == 3 else 0

    def keys_and_values(both: Tensor) -> tuple[Tensor, Tensor]:
        K, V = rows_first(both).split([feat, v.shape[-1]], -1)
        return K.contiguous(), V.contiguous()

    pairs = Sampled(graph, Q)
    K, V = keys_and_values(rows)
    inner = pairs.local(K)
    K, V_of_halo = keys_and_values(passage.receive())
    scores = pairs.remote(inner, K) * scale
    inner, outer = split(graph, softmax_by_heads(graph.whole, scores))
    out = local_product(graph, inner, V, heads)
    out = add_remote(graph, outer, V_of_halo, heads, out)
    return rows_first(out).to(q.dtype)


def _swapped(x: object, least: int = 3) -> Any:
    """The operand, with its heads first if it has any; least : its rank with heads."""
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.dim() == least else x


def softmax(graph: DistGraph, values: Tensor) -> Tensor:
    """Softmax over the edges into each own node, like :func:`sparsetir.ops.sparse_softmax`.

    All edges into a node are on its process, so nothing is sent.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    values : (nnz,) or (nnz, heads) Tensor
        Values in the order of the graph's edges.

    Returns
    -------
    (nnz,) or (nnz, heads) Tensor
    """
    return sparse_softmax(graph.whole, values)


@untraced
def with_halo(graph: DistGraph, x: Tensor) -> Tensor:
    """Features of all nodes that own edges come from: own ones, then the others; collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    x : (own, ...) Tensor
        Features of own nodes, of any floating dtype.

    Returns
    -------
    (own + halo, ...) Tensor
        Rows in the numbering of `graph.edge_index`'s sources. Differentiable once: the gradients of
        other nodes are added to those on their processes.
    """

    def check() -> object:
        check_tensor("with_halo", "x", x)
        if x.dim() < 1 or len(x) != graph.own:
            expected = f"{graph.own} rows, one for each own node"
            raise wrong("with_halo", "x", expected, f"shape {tuple(x.shape)}")
        return dtype_name(x), tuple(x.shape[1:])

    compared(graph, "with_halo", check)
    passage = Passage(graph.exchange, "with_halo", graph.exchange_dtype or x.dtype)
    return torch.cat([passage.send(x), passage.receive()])
