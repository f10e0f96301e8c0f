"""Sparse products over the processes of a graph, with gradients.

Each process has the rows of its own nodes. Rows of other nodes that its edges need come by one
message from each process that has some; while they are under way the edges between own nodes are
multiplied.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from sparsetir.arrays import dtype_name
from sparsetir.distributed.collectives import together
from sparsetir.ops import functional, library, messages, messages_library
from sparsetir.ops.checks import check_reduce, check_tensor
from sparsetir.ops.operands import Operand

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph

__all__ = ["attention", "sddmm", "softmax", "spmm", "with_halo"]

# So many of the first calls on a graph are compared among processes, so that a wrong argument of
# one of them is an error of all. Later calls are like these, as a rule.
COMPARED_CALLS = 16


def spmm(graph: DistGraph, x: Tensor, reduce: str = "sum", values: Tensor | None = None) -> Tensor:
    """C[i, k] = reduce over the edges (j, i) of value * x[j, k]; collective.

    graph : a :class:`DistGraph`
    x : (own, feat) or (heads, own, feat) features of own nodes; float16, bfloat16, float32 or
        float64, of as many features on all processes
    reduce : "sum", "mean", "max" or "min", as :func:`sparsetir.ops.spmm` has them
    values : (nnz,) or (heads, nnz) of own edges in the graph's order; by default the graph's, or
        ones

    Gives (own, feat) or (heads, own, feat). Differentiable once with respect to x and the values;
    gradients of rows of other processes go back to them. Sums differ from those of one process by
    rounding alone, as own and other nodes are added up apart; of "max" and "min", and of means of
    16 bits, all are there first.

    Raises TypeError and ValueError that name the argument; where only another process was given
    something wrong, or has ended, DistributedError.
    """

    def check() -> Any:
        check_reduce("spmm", reduce)
        _check_rows("spmm", "x", x, graph.own, (2, 3))
        v = graph.values if values is None else values
        if v is not None and values is not None:
            _check_values("spmm", v, x, graph.nnz)
        return reduce, *_likeness(x), *_likeness(v, -1)

    _compared(graph, "spmm", check)
    if values is None and graph.values is not None:
        values = graph.values.to(x.dtype)
    x, values = _cast(x, values)
    if reduce in ("max", "min") or (reduce == "mean" and x.dtype.itemsize == 2):
        rows = with_halo(graph, x.transpose(0, -2)).transpose(0, -2)
        return functional.spmm(graph.whole, rows, reduce, values)
    found = _Spmm.apply(graph, x, values)
    return found / graph.degrees[:, None].to(x.dtype) if reduce == "mean" else found


def sddmm(graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
    """OUT[e] = sum over k of X[i, k] * Y[j, k] for each own edge e = (j, i); collective.

    X, Y : (own, feat) or (heads, own, feat) of own nodes as targets and as sources

    Gives (nnz,) or (heads, nnz) in the order of the graph's edges. Differentiable once. Raises as
    :func:`spmm`.
    """

    def check() -> Any:
        _check_rows("sddmm", "X", X, graph.own, (2, 3))
        _check_rows("sddmm", "Y", Y, graph.own, (2, 3), X)
        if X.shape != Y.shape:
            raise ValueError(
                f"sddmm: argument 'Y': expected shape {tuple(X.shape)} as 'X', got {tuple(Y.shape)}"
            )
        return _likeness(X)

    _compared(graph, "sddmm", check)
    X, Y = _cast(X, Y)
    return _Sddmm.apply(graph, X, Y)


def softmax(graph: DistGraph, values: Tensor) -> Tensor:
    """Softmax over the edges into each own node, as :func:`sparsetir.ops.sparse_softmax`.

    values : (nnz,) or (heads, nnz) in the order of the graph's edges

    Gives values of the same shape. All edges into a node are on its process, so nothing is sent.
    """
    return messages.sparse_softmax(graph.whole, values)


def attention(
    graph: DistGraph, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """Out[i] = sum over edges (j, i) of softmax(scale * q[i] . k[j]) * v[j]; collective.

    q, k : (own, feat) or (own, heads, feat)
    v : (own, width) or (own, heads, width)
    scale : by default 1 / sqrt(feat)

    Gives (own, width) or (own, heads, width); a node without edges gives zeros. k and v come in one
    message; weights of edges, (heads, nnz), are kept for the backward pass. 16-bit operands are
    multiplied in float32. Differentiable once. Raises as :func:`spmm`.
    """

    def check() -> Any:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor("attention", name, x, q)
            if x.dim() not in (2, 3) or x.shape[1:-1] != q.shape[1:-1] or len(x) != graph.own:
                raise ValueError(
                    f"attention: argument '{name}': expected shape ({graph.own}, features) or "
                    f"({graph.own}, heads, features) as 'q', got {tuple(x.shape)}"
                )
        if k.shape != q.shape:
            raise ValueError(
                f"attention: argument 'k': expected shape {tuple(q.shape)} as 'q', got "
                f"{tuple(k.shape)}"
            )
        if scale is not None and not isinstance(scale, numbers.Real):
            raise TypeError(
                f"attention: argument 'scale': expected a number, got {type(scale).__name__}"
            )
        return scale, dtype_name(q), tuple(q.shape[1:]), tuple(v.shape[1:])

    _compared(graph, "attention", check)
    if scale is None:
        scale = 1 / math.sqrt(max(1, q.shape[-1]))
    q, k, v = _cast(q, k, v)
    if q.dim() == 2:
        return _Attention.apply(graph, *(x[:, None] for x in (q, k, v)), float(scale))[:, 0]
    return _Attention.apply(graph, q, k, v, float(scale))


def with_halo(graph: DistGraph, x: Tensor) -> Tensor:
    """Features of all nodes that own edges come from: own ones, then the others; collective.

    x : (own, ...) of any floating dtype

    Gives (own + halo, ...), by which `graph.edge_index` counts sources. Differentiable once: the
    gradients of other nodes are added to those on their processes.
    """

    def check() -> Any:
        check_tensor("with_halo", "x", x)
        if x.dim() < 1 or len(x) != graph.own:
            raise ValueError(
                f"with_halo: argument 'x': expected {graph.own} rows, one for each own node, got "
                f"shape {tuple(x.shape)}"
            )
        return dtype_name(x), tuple(x.shape[1:])

    _compared(graph, "with_halo", check)
    return _WithHalo.apply(graph, x)


# -- with gradients -------------------------------------------------------------------------------


class _Spmm(torch.autograd.Function):
    """Sums; x (own, feat) or (heads, own, feat), values (nnz,), (heads, nnz) or None."""

    @staticmethod
    def forward(ctx: Any, graph: DistGraph, x: Tensor, values: Tensor | None) -> Tensor:
        ctx.graph = graph
        inner, outer = _split(graph, values)
        heads = x.shape[0] if x.dim() == 3 else 0 if values is None or values.dim() == 1 else -1
        rows = _rows_first(x)
        halo_rows = rows.new_empty((graph.halo, *rows.shape[1:]))
        arriving = graph.exchange.begin("spmm", rows, graph.exchange_dtype, halo_rows)
        with record_function("sparsetir: local product"):
            out = _times(graph.local, inner, x, heads)
        halo = _rows_first(arriving.wait())
        with record_function("sparsetir: remote product"):
            if graph.halo:
                out += _times(graph.remote, outer, halo, heads)
        kept = values is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(values, x if kept else None, halo if kept else None)
        ctx.heads = heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        graph, heads = ctx.graph, ctx.heads
        values, x, halo = ctx.saved_tensors
        inner, outer = _split(graph, values)
        grad = grads[0].contiguous()
        returning = of_x = of_values = None
        if ctx.needs_input_grad[1]:
            with record_function("sparsetir: remote product"):
                of_halo = _transposed(graph.remote, outer, grad, heads)
            returning = graph.exchange.begin_back(
                "spmm", _rows_first(of_halo), graph.exchange_dtype
            )
        with record_function("sparsetir: local product"):
            if returning is not None:
                of_x = _transposed(graph.local, inner, grad, heads)
            if ctx.needs_input_grad[2]:
                parts = ((graph.local, x), (graph.remote, halo))
                of_values = torch.cat([_dots(A, grad, y, values) for A, y in parts], -1)
        if returning is not None:
            returning.add_to(_rows_first(of_x))
        return None, of_x, of_values


class _Sddmm(torch.autograd.Function):
    """X, Y : (own, feat) or (heads, own, feat)."""

    @staticmethod
    def forward(ctx: Any, graph: DistGraph, X: Tensor, Y: Tensor) -> Tensor:
        ctx.graph = graph
        rows = _rows_first(Y)
        halo_rows = rows.new_empty((graph.halo, *rows.shape[1:]))
        arriving = graph.exchange.begin("sddmm", rows, graph.exchange_dtype, halo_rows)
        with record_function("sparsetir: local product"):
            inner = _sddmm(graph.local, X, Y)
        halo = _rows_first(arriving.wait())
        with record_function("sparsetir: remote product"):
            outer = _sddmm(graph.remote, X, halo)
        ctx.save_for_backward(X, Y, halo)
        return torch.cat([inner, outer], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        graph = ctx.graph
        X, Y, halo = ctx.saved_tensors
        inner, outer = _split(graph, grads[0])
        heads = X.shape[0] if X.dim() == 3 else 0
        returning = of_x = of_y = None
        if ctx.needs_input_grad[2]:
            with record_function("sparsetir: remote product"):
                of_halo = _transposed(graph.remote, outer, X, heads)
            returning = graph.exchange.begin_back(
                "sddmm", _rows_first(of_halo), graph.exchange_dtype
            )
        with record_function("sparsetir: local product"):
            if ctx.needs_input_grad[1]:
                of_x = _times(graph.local, inner, Y, heads)
                if graph.halo:
                    of_x += _times(graph.remote, outer, halo, heads)
            if returning is not None:
                of_y = _transposed(graph.local, inner, X, heads)
        if returning is not None:
            returning.add_to(_rows_first(of_y))
        return None, of_x, of_y


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
        Q, K, V = (_rows_first(x.to(wide)).contiguous() for x in (q, k, v))
        with record_function("sparsetir: local product"):
            inner = _sddmm(graph.local, Q, K)
        halo = _rows_first(arriving.wait().to(wide))
        with record_function("sparsetir: remote product"):
            K2, V2 = (x.contiguous() for x in (halo[..., :feat], halo[..., feat:]))
            scores = torch.cat([inner, _sddmm(graph.remote, Q, K2)], -1) * scale
        with record_function("sparsetir: local product"):
            rowptr, col, _, n, _ = graph.whole
            weights = messages_library.segment_softmax(rowptr, col, scores[..., None], n)[..., 0]
            inner, outer = _split(graph, weights)
            out = _times(graph.local, inner, V, len(Q))
            if graph.halo:
                out += _times(graph.remote, outer, V2, len(Q))
        ctx.graph, ctx.scale, ctx.dtype = graph, scale, q.dtype
        ctx.save_for_backward(Q, K, V, K2, V2, weights)
        return out.transpose(0, 1).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        graph = ctx.graph
        Q, K, V, K2, V2, weights = ctx.saved_tensors
        grad = _rows_first(grads[0].to(Q.dtype)).contiguous()
        heads = len(Q)
        with record_function("sparsetir: local product"):
            of_weights = torch.cat([_sddmm(graph.local, grad, V), _sddmm(graph.remote, grad, V2)], -1)
            rowptr, col, _, n, _ = graph.whole
            of_scores = messages_library.segment_softmax_backward(
                rowptr, col, weights[..., None], of_weights[..., None], n
            )[..., 0]
            of_scores = of_scores * ctx.scale
        (w1, w2), (s1, s2) = _split(graph, weights), _split(graph, of_scores)
        with record_function("sparsetir: remote product"):
            of_halo = [_transposed(graph.remote, s2, Q, heads), _transposed(graph.remote, w2, grad, heads)]
            back = _rows_first(torch.cat(of_halo, -1)).to(ctx.dtype)
        returning = graph.exchange.begin_back("attention", back, graph.exchange_dtype)
        with record_function("sparsetir: local product"):
            of_q = _times(graph.local, s1, K, heads)
            if graph.halo:
                of_q += _times(graph.remote, s2, K2, heads)
            of_kv = [_transposed(graph.local, s1, Q, heads), _transposed(graph.local, w1, grad, heads)]
            own = _rows_first(torch.cat(of_kv, -1)).contiguous()
        returning.add_to(own)
        of_k, of_v = own.to(ctx.dtype).split([Q.shape[-1], V.shape[-1]], -1)
        return None, of_q.transpose(0, 1).to(ctx.dtype), of_k, of_v, None


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
    def backward(ctx: Any, *grads: Tensor) -> Any:
        graph, (grad,) = ctx.graph, grads
        returning = graph.exchange.begin_back(
            "with_halo", grad[graph.own :], graph.exchange_dtype
        )
        return None, returning.add_to(grad[: graph.own].clone(memory_format=torch.contiguous_format))


# -- products of one process ----------------------------------------------------------------------


def _times(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    values, x = _with_heads(values, x, heads)
    return library.spmm(A.rowptr, A.col, values, x, "sum")


def _transposed(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A^T x; of heads that x had not before, the sum."""
    values, x = _with_heads(values, x, heads)
    found = library.spmm_transposed(A.rowptr, A.col, values, x, A.n)
    return found.sum(0) if heads < 0 else found


def _dots(A: Operand, grad: Tensor, x: Tensor, values: Tensor) -> Tensor:
    """The gradient of values, of the shape they have."""
    if x.dim() < grad.dim():
        x = x.expand(grad.shape[0], *x.shape)
    found = _sddmm(A, grad, x)
    return found.sum(0) if found.dim() > values.dim() else found


def _sddmm(A: Operand, x: Tensor, y: Tensor) -> Tensor:
    return library.sddmm(A.rowptr, A.col, x, y)


def _with_heads(values: Tensor | None, x: Tensor, heads: int) -> tuple[Tensor | None, Tensor]:
    """Both with heads, where one of them has.

    heads : of x; 0 where nothing has any, -1 where values alone have
    """
    if values is not None and heads > 0 and values.dim() == 1:
        values = values.expand(heads, -1)
    if values is not None and heads < 0 and x.dim() == 2:
        x = x.expand(values.shape[0], *x.shape)
    return values, x


def _split(graph: DistGraph, values: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Of edges between own nodes, and of those from others."""
    if values is None:
        return None, None
    inner = graph.local.col.shape[0]
    return values[..., :inner].contiguous(), values[..., inner:].contiguous()


def _rows_first(x: Tensor) -> Tensor:
    """(rows, heads, feat) of (heads, rows, feat), and back."""
    return x.transpose(0, 1) if x.dim() == 3 else x


# -- arguments ------------------------------------------------------------------------------------


def _compared(graph: DistGraph, who: str, check: Callable[[], Any]) -> None:
    """Look at arguments; those of the first calls on all processes together."""
    if graph.compared < COMPARED_CALLS:
        graph.compared += 1
        together(graph.group, who, lambda: (who, check()))
    else:
        check()


def _likeness(x: Tensor | None, rows: int = -2) -> tuple[Any, ...]:
    """What a tensor is to have in common with those of other processes; rows : their dimension."""
    if x is None:
        return (None,)
    shape = list(x.shape)
    shape[rows] = -1
    return dtype_name(x), tuple(shape)


def _check_rows(
    who: str, name: str, x: Any, rows: int, dims: tuple[int, ...], like: Tensor | None = None
) -> None:
    check_tensor(who, name, x, like)
    if x.dim() not in dims or x.shape[-2] != rows:
        raise ValueError(
            f"{who}: argument '{name}': expected shape ({rows}, feat) or (heads, {rows}, feat), a "
            f"row for each own node, got {tuple(x.shape)}"
        )


def _check_values(who: str, values: Any, x: Tensor, nnz: int) -> None:
    check_tensor(who, "values", values, x)
    fits = values.dim() in (1, 2) and values.shape[-1] == nnz
    if not fits or (values.dim() == 2 and x.dim() == 3 and len(values) != len(x)):
        raise ValueError(
            f"{who}: argument 'values': expected shape ({nnz},) or (heads, {nnz}), a number for "
            f"each own edge, got {tuple(values.shape)}"
        )


def _cast(*given: Any) -> tuple[Any, ...]:
    """Of autocast's dtype, where that is on."""
    device = next(x for x in given if x is not None).device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.dtype.itemsize < 8 else x for x in given)
