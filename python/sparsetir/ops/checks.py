"""What is refused as the dense operands and values of an operator."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from sparsetir.ops.launch import DTYPES
from sparsetir.ops.structure import Structure
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong


def check_tensor(
    who: str, name: str, x: object, like: Tensor | None = None, other: str = "the other operand"
) -> Tensor:
    """x; raises unless it is a dense tensor of a dtype there are kernels for.

    like : an operand checked before, whose dtype it is to have but where autocast sees to that
    other : that operand, in words
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: argument '{name}': expected a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{who}: argument '{name}': expected a dense tensor, got {x.layout}")
    if x.is_nested:
        raise TypeError(f"{who}: argument '{name}': expected a dense tensor, got a nested one")
    if x.dtype not in DTYPES:
        raise wrong(who, name, ", ".join(DTYPES.values()), dtype_name(x), TypeError)
    if like is not None and x.dtype != like.dtype and not torch.is_autocast_enabled(x.device.type):
        raise wrong(who, name, f"{dtype_name(like)} as {other}", dtype_name(x), TypeError)
    return x


def check_rows(
    who: str,
    name: str,
    x: Tensor,
    device: torch.device,
    rows: int,
    said: str = "to fit the sparse matrix",
) -> None:
    """Raise unless x is where a sparse matrix is, and has as many rows; said : why, in words."""
    if x.device != device:
        raise wrong(who, name, f"to be on {device} as the sparse matrix", x.device)
    if x.shape[0] != rows:
        second = "; heads are the second dimension" if x.dim() == 3 and x.shape[1] == rows else ""
        raise wrong(who, name, f"{rows} rows {said}", f"shape {tuple(x.shape)}{second}")


def check_dense(
    who: str, name: str, x: Tensor, structure: Structure, rows: int, like: Tensor | None = None
) -> None:
    """Raise unless x is (rows, feat) or (heads, rows, feat), of a dtype there are kernels for.

    like : an operand checked before, whose dtype and other sizes it is to have
    """
    check_tensor(who, name, x)
    if x.device != structure.device:
        raise wrong(who, name, f"to be on {structure.device} as the pattern", x.device)
    if x.dim() not in (2, 3) or x.shape[-2] != rows:
        raise ValueError(
            f"{who}: argument '{name}': expected shape ({rows}, feat) or (heads, {rows}, feat) for "
            f"a pattern of shape {structure.shape}, got {tuple(x.shape)}"
        )
    if like is None:
        return
    if x.dtype != like.dtype:
        raise wrong(who, name, dtype_name(like), dtype_name(x), TypeError)
    if x.dim() != like.dim() or x.shape[:-2] != like.shape[:-2] or x.shape[-1] != like.shape[-1]:
        raise wrong(who, name, f"shape {(*like.shape[:-2], rows, like.shape[-1])}", tuple(x.shape))


def check_values(who: str, values: Tensor, dense: Tensor, structure: Structure) -> None:
    """Raise unless values are (nnz,), or (heads, nnz) where the dense operand has heads."""
    expected = (*dense.shape[:-2], structure.nnz)
    if values.layout is not torch.strided:
        raise TypeError(f"{who}: argument 'values': expected a dense tensor, got {values.layout}")
    if values.dtype != dense.dtype:
        as_dense = f"{dtype_name(dense)} as the dense operand"
        raise wrong(who, "values", as_dense, dtype_name(values), TypeError)
    if values.device != structure.device:
        raise wrong(who, "values", f"to be on {structure.device} as the pattern", values.device)
    if tuple(values.shape) != expected:
        raise wrong(who, "values", f"shape {expected}", tuple(values.shape))


def scale_of(who: str, scale: object, feat: int) -> float:
    """What scores of attention are multiplied with; TypeError for what is no number."""
    if scale is None:
        return 1 / math.sqrt(max(1, feat))
    if not isinstance(scale, numbers.Real):
        raise wrong(who, "scale", "a number", type(scale).__name__, TypeError)
    return float(scale)
