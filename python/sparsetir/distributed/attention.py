"""Attention over the processes of a graph, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsetir.distributed.arguments import cast, compared, untraced
from sparsetir.distributed.exchange import Passage
from sparsetir.distributed.parts import Sampled, add_remote, local_product, rows_first, split
from sparsetir.ops.checks import check_tensor, scale_of
from sparsetir.ops.messages import softmax_by_heads
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
    wide = torch.promote_types(q.dtype, torch.float32)
    passage = Passage(graph.exchange, "attention", graph.exchange_dtype or q.dtype)
    own = passage.leave(torch.cat([k, v], -1).to(wide))
    Q = rows_first(q.to(wide)).contiguous()
    feat, heads = q.shape[-1], len(Q) if q.dim() == 3 else 0

    def keys_and_values(both: Tensor) -> tuple[Tensor, Tensor]:
        K, V = rows_first(both).split([feat, v.shape[-1]], -1)
        return K.contiguous(), V.contiguous()

    pairs = Sampled(graph, Q)
    K, V = keys_and_values(own)
    inner = pairs.local(K)
    K, V_of_halo = keys_and_values(passage.arrive())
    scores = pairs.remote(inner, K) * scale
    inner, outer = split(graph, softmax_by_heads(graph.whole, scores))
    out = local_product(graph, inner, V, heads)
    out = add_remote(graph, outer, V_of_halo, heads, out)
    return rows_first(out).to(q.dtype)
