"""Products of one process, with its edges between own nodes or those from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sparsetir.ops import library
from sparsetir.ops.operands import Operand, resolve

if TYPE_CHECKING:
    from sparsetir.distributed.graph import DistGraph


# Rows of which products are added at a time: few enough to be small beside all, many enough for a
# kernel's call to be little.
BLOCK_ROWS = 8192
MAX_BLOCKS = 64  # a kernel is planned for each


class Block(NamedTuple):
    """Rows of a matrix, from `first` on, whose elements begin at `start`."""

    first: int
    start: int
    A: Operand


def times(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A x, with heads as :func:`with_heads` has them."""
    values, x = with_heads(values, x, heads)
    return library.spmm(A.rowptr, A.col, values, x, "sum")


def blocks_of(A: Operand) -> list[Block]:
    """Rows of A in pieces, without those that have no elements."""
    size = max(BLOCK_ROWS, -(-A.m // MAX_BLOCKS))
    found = []
    for first in range(0, A.m, size):
        rowptr = A.rowptr[first : first + size + 1]
        start, stop = int(rowptr[0]), int(rowptr[-1])
        if stop > start:
            part = Operand(rowptr - start, A.col[start:stop], len(rowptr) - 1, A.n)
            found.append(Block(first, start, resolve(part, who="blocks_of")))
    return found


def add_times(
    blocks: list[Block], values: Tensor | None, x: Tensor, heads: int, out: Tensor
) -> None:
    """Add A x to out (m, feat) or (heads, m, feat), in place; a piece of it at a time.

    blocks : of A
    """
    for first, start, A in blocks:
        some = None if values is None else values[..., start : start + len(A.col)].contiguous()
        out[..., first : first + A.m, :] += times(A, some, x, heads)


def transposed(A: Operand, values: Tensor | None, x: Tensor, heads: int) -> Tensor:
    """A^T x; of heads that x had not before, the sum."""
    values, x = with_heads(values, x, heads)
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


def with_heads(values: Tensor | None, x: Tensor, heads: int) -> tuple[Tensor | None, Tensor]:
    """Both with heads, where one of them has.

    heads : of x; 0 where nothing has any, -1 where values alone have
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
    inner = graph.local.col.shape[0]
    return values[..., :inner].contiguous(), values[..., inner:].contiguous()


def rows_first(x: Tensor) -> Tensor:
    """(rows, heads, feat) of (heads, rows, feat), and back."""
    return x.transpose(0, 1) if x.dim() == 3 else x
