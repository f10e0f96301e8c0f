"""Products of one process, with its edges between own nodes or those from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparsetir.ops import library
from sparsetir.ops.operands import Operand

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph

__all__ = ["dots", "rows_first", "sampled", "split", "times", "transposed"]


def times(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A x, with heads as :func:`_with_heads` has them."""
    values, x = _with_heads(values, x, heads)
    return library.spmm(A.rowptr, A.col, values, x, "sum")


def transposed(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A^T x; of heads that x had not before, the sum."""
    values, x = _with_heads(values, x, heads)
    found = library.spmm_transposed(A.rowptr, A.col, values, x, A.n)
    return found.sum(0) if heads < 0 else found


def dots(A: Operand, grad: Tensor, x: Tensor, values: Tensor) -> Tensor:
    """The gradient of values, of the shape they have."""
    if x.dim() < grad.dim():
        x = x.expand(grad.shape[0], *x.shape)
    found = sampled(A, grad, x)
    return found.sum(0) if found.dim() > values.dim() else found


def sampled(A: Operand, x: Tensor, y: Tensor) -> Tensor:
    """Products of rows of x and y, where A has elements."""
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


def split(graph: DistGraph, values: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Of edges between own nodes, and of those from others."""
    if values is None:
        return None, None
    inner = graph.local.col.shape[0]
    return values[..., :inner].contiguous(), values[..., inner:].contiguous()


def rows_first(x: Tensor) -> Tensor:
    """(rows, heads, feat) of (heads, rows, feat), and back."""
    return x.transpose(0, 1) if x.dim() == 3 else x
