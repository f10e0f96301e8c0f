"""Attention over the processes of a graph, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from sparsetir.distributed.arguments import cast, compared, untraced
from sparsetir.distributed.parts import add_times, rows_first, sampled, split, times, transposed
from sparsetir.ops import messages_library
from sparsetir.ops.tensors import check_tensor, scale_of
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


@untraced
def attention(
    graph: DistGraph, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """Out[i] = sum over edges (j, i) of softmax(scale * q[i] . k[j]) * v[j]; collective.

    Parameters
    ----------
    graph : DistGraph
        The edges.
    q, k : (own, feat) or (own, heads, feat) Tensor
        Queries of targets and keys of sources, of own nodes.
    v : (own, width) or (own, heads, width) Tensor
        Values of sources.
    scale : float, optional
        By default 1 / sqrt(feat).

    Returns
    -------
    (own, width) or (own, heads, width) Tensor
        A node without edges gives zeros. Differentiable once.

    Raises
    ------
    TypeError, ValueError, DistributedError
        As :func:`spmm`.

    Notes
    -----
    k and v come in one message; weights of edges, (heads, nnz), are kept for the backward pass.
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
    if q.dim() == 2:
        return _Attention.apply(graph, *(x[:, None] for x in (q, k, v)), scale)[:, 0]
    return _Attention.apply(graph, q, k, v, scale)


class _Attention(torch.autograd.Function):
    """q, k (own, heads, feat), v (own, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any, graph: DistGraph, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        both = torch.cat([k, v], -1)
        halo_rows = both.new_empty((graph.halo, *both.shape[1:]))
        arriving = graph.exchange.begin("attention", both, graph.exchange_dtype, halo_rows)
        feat = q.shape[-1]
        wide = torch.promote_types(q.dtype, torch.float32)
        Q, K, V = (rows_first(x.to(wide)).contiguous() for x in (q, k, v))
        with record_function("sparsetir: local product"):
            inner = sampled(graph.local, Q, K)
        halo = rows_first(arriving.wait().to(wide))
        with record_function("sparsetir: remote product"):
            K2, V2 = (x.contiguous() for x in (halo[..., :feat], halo[..., feat:]))
            scores = torch.cat([inner, sampled(graph.remote, Q, K2)], -1) * scale
        with record_function("sparsetir: local product"):
            rowptr, col, _, n, _ = graph.whole
            weights = messages_library.segment_softmax(rowptr, col, scores[..., None], n)[..., 0]
            inner, outer = split(graph, weights)
            out = times(graph.local, inner, V, len(Q))
            add_times(graph.remote_blocks, outer, V2, len(Q), out)
        ctx.graph, ctx.scale, ctx.dtype = graph, scale, q.dtype
        ctx.save_for_backward(Q, K, V, K2, V2, weights)
        return out.transpose(0, 1).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> object:
        graph = ctx.graph
        Q, K, V, K2, V2, weights = ctx.saved_tensors
        grad = rows_first(grads[0].to(Q.dtype)).contiguous()
        heads = len(Q)
        with record_function("sparsetir: local product"):
            of_weights = torch.cat(
                [sampled(graph.local, grad, V), sampled(graph.remote, grad, V2)], -1
            )
            rowptr, col, _, n, _ = graph.whole
            of_scores = messages_library.segment_softmax_backward(
                rowptr, col, weights[..., None], of_weights[..., None], n
            )[..., 0]
            of_scores = of_scores * ctx.scale
        (w1, w2), (s1, s2) = split(graph, weights), split(graph, of_scores)
        with record_function("sparsetir: remote product"):
            of_halo = [
                transposed(graph.remote, s2, Q, heads),
                transposed(graph.remote, w2, grad, heads),
            ]
            back = rows_first(torch.cat(of_halo, -1)).to(ctx.dtype)
        returning = graph.exchange.begin_back("attention", back, graph.exchange_dtype)
        with record_function("sparsetir: local product"):
            of_q = times(graph.local, s1, K, heads)
            add_times(graph.remote_blocks, s2, K2, heads, of_q)
            of_kv = [
                transposed(graph.local, s1, Q, heads),
                transposed(graph.local, w1, grad, heads),
            ]
            own = rows_first(torch.cat(of_kv, -1)).contiguous()
        returning.add_to(own)
        of_k, of_v = own.to(ctx.dtype).split([Q.shape[-1], V.shape[-1]], -1)
        return None, of_q.transpose(0, 1).to(ctx.dtype), of_k, of_v, None
