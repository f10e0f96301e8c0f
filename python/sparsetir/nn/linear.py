"""Linear maps with the parameters of PyG's, also of sparse features."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter, UninitializedParameter

from sparsetir.ops.cache import kept, lasting
from sparsetir.ops.operands import Operand
from sparsetir.ops.products import spmm
from sparsetir.ops.registry import is_plain


class Linear(torch.nn.Module):
    """y = x W^T + b.

    in_channels : -1 if the first input is to tell
    glorot : whether W begins as Glorot and Bengio want, and not as in `torch.nn.Linear`
    sparse_features : whether inputs are nearly all zero; see :mod:`sparsetir.nn.linear`
    """

    in_channels: int
    out_channels: int
    glorot: bool
    weight: UninitializedParameter | Parameter

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        bias: bool = True,
        glorot: bool = False,
        sparse_features: bool = False,
    ) -> None:
        super().__init__()
        self.sparse_features = sparse_features
        self.in_channels, self.out_channels, self.glorot = in_channels, out_channels, glorot
        known = in_channels > 0
        weight = torch.empty(out_channels, in_channels) if known else None
        self.weight = UninitializedParameter() if weight is None else Parameter(weight)
        self.bias: Parameter | None = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as PyG's layers do from the same seed."""
        if self.in_channels <= 0:
            return
        if self.glorot:
            glorot(self.weight)
        else:
            _uniform(self.weight, 1 / math.sqrt(self.in_channels))
        if self.bias is not None:
            _uniform(self.bias, 1 / math.sqrt(self.in_channels))

    def materialize(self, in_channels: int) -> None:
        """Make the parameters, if the number of features was not known before."""
        if isinstance(self.weight, UninitializedParameter):
            self.in_channels = in_channels
            self.weight.materialize((self.out_channels, in_channels))
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(..., out_channels), of x (..., in_channels), dense or sparse."""
        self.materialize(x.shape[-1])
        return linear(self.seen(x), self.weight, self.bias)

    def seen(self, x: Tensor) -> Tensor | Operand:
        """The input as it is multiplied."""
        return as_sparse(x) if self.sparse_features else x

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not isinstance(self.weight, UninitializedParameter):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        # Cannot be detached, which the other way to save would do.
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.get(prefix + "weight")
        if given is not None and not isinstance(given, UninitializedParameter):
            self.materialize(given.shape[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        bias = self.bias is not None
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, bias={bias})"


def linear(x: Tensor | Operand, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + b, where x may be a sparse matrix."""
    if isinstance(x, Tensor) and x.layout is torch.strided:
        return F.linear(x, weight, bias)
    out = spmm(x, weight.t())
    return out if bias is None else out + bias


def glorot(x: Tensor | None) -> None:
    """Fill with uniform numbers of the variance that Glorot and Bengio propose."""
    if x is not None:
        _uniform(x, math.sqrt(6 / (x.shape[-2] + x.shape[-1])))


def zeros(x: Tensor | None) -> None:
    """Fill with zeros."""
    if x is not None:
        torch.nn.init.zeros_(x)


def _uniform(x: Tensor, bound: float) -> None:
    with torch.no_grad():
        x.uniform_(-bound, bound)


DTYPES = (torch.float32, torch.float64)


class _Seen(NamedTuple):
    """Features as they were at a version.

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
