"""Linear maps with the parameters of PyG's, also of sparse features."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter, UninitializedParameter

from sparsetir.nn.features import as_sparse
from sparsetir.ops.functional import spmm
from sparsetir.ops.operands import Operand


class Linear(torch.nn.Module):
    """y = x W^T + b.

    in_channels : -1 if the first input is to tell
    glorot : whether W begins as Glorot and Bengio want, and not as in `torch.nn.Linear`
    sparse_features : whether inputs are nearly all zero; see :mod:`sparsetir.nn.features`
    """

    in_channels: int
    out_channels: int
    glorot: bool
    weight: UninitializedParameter | Parameter

    def __init__(
        self, in_channels: int, out_channels: int, bias: bool = True, glorot: bool = False,
        sparse_features: bool = False,
    ) -> None:  # fmt: skip
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
