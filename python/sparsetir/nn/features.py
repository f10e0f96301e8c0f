"""Dense features that are nearly all zero, such as words of papers, multiplied as sparse ones."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsetir.ops.cache import lasting
from sparsetir.ops.operands import Operand
from sparsetir.ops.registry import is_plain

__all__ = ["sparse_where_known"]

# A product with a sparse matrix of this density takes about half the time of the dense one.
MAX_DENSITY = 0.05
MIN_ELEMENTS = 1 << 18
DTYPES = (torch.float32, torch.float64)


@dataclass
class _Seen:
    """What is known of features as of a version.

    layers : that have multiplied them, by id
    sums : (n,) a number for each row, which others hardly have; None before zeros are counted
    matrix : the same as a sparse matrix, None where that is not worth it
    """

    version: int
    layers: set[int] = field(default_factory=set)
    sums: Tensor | None = None
    matrix: Operand | None = None


_seen = WeakTensorKeyDictionary()
_lock = threading.Lock()


def sparse_where_known(x: Tensor, layer: object) -> Tensor | Operand:
    """Features (n, d), or the same as a sparse matrix where a product with that is faster.

    Zeros are counted when the same tensor, not written to since, comes to the same layer again:
    what a layer sees once, such as after dropout, is not worth it. Gradients for `x` there must be
    none. Whoever writes to it unseen by torch, through NumPy, is noticed: each row is compared by a
    weighted sum. The first product and later ones differ by rounding, and where weights are
    infinite: zeros are left out.
    """
    if not _may_be_sparse(x):
        return x
    with _lock:
        seen = _seen.get(x)
        if seen is None or seen.version != x._version:
            seen = _seen[x] = _Seen(x._version)
        if seen.sums is None and id(layer) not in seen.layers:
            seen.layers.add(id(layer))
            return x
        if seen.sums is not None and seen.matrix is None:
            return x
        found = _sums(x)
        if seen.sums is None or not torch.equal(found, seen.sums):
            seen.sums, seen.matrix = found, _matrix(x, found)
        return x if seen.matrix is None else seen.matrix


def _may_be_sparse(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.layout is torch.strided
        and x.dim() == 2
        and x.dtype in DTYPES
        and x.numel() >= MIN_ELEMENTS
        and x.device.type == "cpu"  # on a GPU the dense product is fast and counting is not
        and not x.requires_grad
        and not x.is_inference()
        and is_plain(x)
    )


@lasting
def _sums(x: Tensor) -> Tensor:
    """(n,) sums of rows with weights of which no few add up to others."""
    return x.mv(torch.arange(2, x.shape[1] + 2, dtype=x.dtype).sqrt())


@lasting
def _matrix(x: Tensor, found: Tensor) -> Operand | None:
    """The sparse matrix; None of features that are no numbers, or of too many that are not zero."""
    if not found.isfinite().all() or x.count_nonzero() > MAX_DENSITY * x.numel():
        return None
    rows, cols = x.nonzero().unbind(1)
    counts = torch.bincount(rows, minlength=x.shape[0])
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Operand(rowptr, cols.contiguous(), x.shape[0], x.shape[1], x[rows, cols])
