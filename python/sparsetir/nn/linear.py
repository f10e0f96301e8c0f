"""Linear maps with PyG's parameters, including maps of sparse features."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter, UninitializedParameter

from sparsetir.ops.cache import cacheable, kept
from sparsetir.ops.operands import Operand
from sparsetir.ops.products import spmm
from sparsetir.ops.registry import is_plain


class Linear(torch.nn.Module):
    """y = x W^T + b.

    in_channels : -1 to take it from the first input
    glorot : whether to initialise W as Glorot and Bengio propose, not as in `torch.nn.Linear`
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
        """Draw the parameters anew, like PyG's layers from the same seed."""
        if self.in_channels <= 0:
            return
        if self.glorot:
            glorot(self.weight)
        else:
            _uniform(self.weight, 1 / math.sqrt(self.in_channels))
        if self.bias is not None:
            _uniform(self.bias, 1 / math.sqrt(self.in_channels))

    def materialize(self, in_channels: int) -> None:
        """Create the parameters, if the number of features was unknown so far."""
        if isinstance(self.weight, UninitializedParameter):
            self.in_channels = in_channels
            self.weight.materialize((self.out_channels, in_channels))
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in_channels), dense or sparse, to (..., out_channels)."""
        self.materialize(x.shape[-1])
        return linear(self.converted(x), self.weight, self.bias)

    def converted(self, x: Tensor) -> Tensor | Operand:
        """Convert the input to the form in which it is multiplied."""
        return as_sparse(x) if self.sparse_features else x

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not isinstance(self.weight, UninitializedParameter):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        # The parameter cannot be detached, as the base class would do.
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and not isinstance(weight, UninitializedParameter):
            self.materialize(weight.shape[-1])
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


class _Converted(NamedTuple):
    """Features converted to a sparse matrix, with their version.

    sums : (n,) a checksum of each row
    matrix : the sparse matrix; None for features that are not finite
    """

    version: int
    sums: Tensor
    matrix: Operand | None

    def is_unchanged(self, x: Tensor) -> bool:
        """Whether features are unchanged."""
        return self.version == x._version and torch.equal(_sums(x), self.sums)


def as_sparse(x: Tensor) -> Tensor | Operand:
    """Convert features (n, d) to a sparse matrix, made when first seen and kept in the operators'
    cache, at most while the features live.

    Writes to them are noticed, even those that torch does not see, such as through NumPy, unless
    rounding hides them: each row is compared by a weighted sum, as a full comparison takes as long
    as the dense product. Zeros are dropped, so that results differ by rounding, and where weights
    are infinite. These stay dense: features on a GPU, where the dense product is fast; of types
    other than float32 and float64; with gradients; in compiled code or inference mode; not finite.
    """
    if not _may_be_sparse(x):
        return x
    seen: _Converted | None = kept.find("features", x)
    if seen is None:
        sums = _sums(x)
        seen = _Converted(x._version, sums, _matrix(x, sums))
        kept.put("features", seen, (x,), (seen.is_unchanged,))
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


@cacheable
def _sums(x: Tensor) -> Tensor:
    """Weighted sums of rows, (n,); few combinations of the weights have equal sums."""
    return x.mv(torch.arange(2, x.shape[1] + 2, dtype=x.dtype).sqrt())


@cacheable
def _matrix(x: Tensor, sums: Tensor) -> Operand | None:
    if not sums.isfinite().all():
        return None
    rows, cols = x.nonzero().unbind(1)
    counts = torch.bincount(rows, minlength=x.shape[0])
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Operand(rowptr, cols.contiguous(), x.shape[0], x.shape[1], x[rows, cols])
