"""Dense features that are nearly all zero, such as words of papers, multiplied as sparse ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsetir.ops.cache import kept, lasting
from sparsetir.ops.operands import Operand
from sparsetir.ops.registry import is_plain

DTYPES = (torch.float32, torch.float64)


class _Seen(NamedTuple):
    """What features were as of a version.

    sums : (n,) a number for each row, which others hardly have
    matrix : the same as a sparse matrix; None of features that are not finite
    """

    version: int
    sums: Tensor
    matrix: Operand | None

    def is_of(self, x: Tensor) -> bool:
        """Whether features are these still."""
        return self.version == x._version and torch.equal(_sums(x), self.sums)


def as_sparse(x: Tensor) -> Tensor | Operand:
    """Features (n, d) as a sparse matrix, made when they are first seen and kept in the cache
    of the operators, at most while they live.

    Whoever writes to them is noticed, unseen by torch, through NumPy, too, but for what rounding
    hides: each row is compared by a weighted sum, as to compare all takes as long as the dense
    product. Zeros are left out, so results differ by rounding, and where weights are
    infinite. What stays dense: features on a GPU, where the dense product is fast; of other types
    than float32 and float64; with gradients, in compiled or inference mode's tensors; not finite.
    """
    if not _may_be_sparse(x):
        return x
    seen: _Seen | None = kept.find("features", x)
    if seen is None:
        sums = _sums(x)
        seen = _Seen(x._version, sums, _matrix(x, sums))
        kept.put("features", seen, (x,), (seen.is_of,))
    return x if seen.matrix is None else seen.matrix


def _may_be_sparse(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.layout is torch.strided
        and x.dim() == 2
        and x.dtype in DTYPES
        and x.device.type == "cpu"
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
    if not found.isfinite().all():
        return None
    rows, cols = x.nonzero().unbind(1)
    counts = torch.bincount(rows, minlength=x.shape[0])
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Operand(rowptr, cols.contiguous(), x.shape[0], x.shape[1], x[rows, cols])
