"""What is refused as the dense operands, values and pattern of an operator."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from sparsetir.ops.launch import DTYPES
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.errors import StructureError, StructureIndexError, StructureTypeError

if TYPE_CHECKING:
    from sparsetir.ops.structure import Structure


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


INDEX_DTYPES = (torch.int32, torch.int64)
SIZES = (int, torch.SymInt, np.integer)


def check_size(who: str, name: str, size: object) -> int:
    """A number of rows or columns; TypeError and ValueError for what is none."""
    if type(size) is int and size >= 0:  # the short way
        return size
    if isinstance(size, bool) or not isinstance(size, SIZES):
        raise TypeError(f"{who}: argument '{name}': expected integers as sizes, got {size!r}")
    # Compiled code may not know the size.
    if not torch.compiler.is_compiling() and size < 0:
        raise ValueError(f"{who}: argument '{name}': expected sizes of 0 or more, got {size}")
    return int(size) if isinstance(size, np.integer) else cast(int, size)


def check_csr(
    who: str, rowptr: Tensor, col: Tensor, n: int, names: tuple[str, ...] = ("rowptr", "col")
) -> None:
    """Raise unless rowptr (m + 1,) and col (nnz,) are compressed rows of an (m, n) matrix."""
    pointers, indices = names
    check_kind(who, pointers, rowptr)
    check_kind(who, indices, col)
    _check_together(who, rowptr, col, names)
    if rowptr.dim() != 1 or not len(rowptr):
        raise wrong(who, pointers, "shape (m + 1,)", tuple(rowptr.shape), StructureError)
    if col.dim() != 1:
        raise wrong(
            who, indices, "shape (nnz,), or (2, nnz) for edges", tuple(col.shape), StructureError
        )
    first, last = int(rowptr[0]), int(rowptr[-1])
    if first != 0 or last != len(col):
        raise wrong(
            who, pointers, f"to go from 0 to nnz = {len(col)}", f"{first} to {last}", StructureError
        )
    falls = torch.nonzero(rowptr[1:] < rowptr[:-1])
    if len(falls):
        row = int(falls[0])
        raise StructureError(
            f"{who}: argument '{pointers}': expected not to decrease, got {int(rowptr[row])} at "
            f"{row} and {int(rowptr[row + 1])} at {row + 1}"
        )
    check_range(who, indices, "index", col, n)


def check_edges(who: str, edges: Tensor, m: int, n: int, name: str = "edges") -> None:
    """Raise unless `edges` are (2, nnz) columns and rows of an (m, n) matrix."""
    check_pairs(who, edges, name)
    check_range(who, name, "source", edges[0], n)
    check_range(who, name, "target", edges[1], m)


def check_pairs(who: str, edges: Tensor, name: str = "edges") -> None:
    """Raise unless `edges` are (2, nnz) integers."""
    check_kind(who, name, edges)
    if edges.dim() != 2 or len(edges) != 2:
        raise wrong(who, name, "shape (2, nnz)", tuple(edges.shape), StructureError)


def check_kind(who: str, name: str, x: Tensor) -> None:
    """Raise unless x is a dense tensor of int32 or int64."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise StructureTypeError(f"{who}: argument '{name}': expected a dense tensor, got {got}")
    if x.requires_grad:
        raise StructureTypeError(
            f"{who}: argument '{name}': expected int32 or int64, got {dtype_name(x)} that "
            "requires a gradient: a pattern has none, its values may"
        )
    if x.dtype not in INDEX_DTYPES:
        raise wrong(who, name, "int32 or int64", dtype_name(x), StructureTypeError)


def _check_together(who: str, rowptr: Tensor, col: Tensor, names: tuple[str, ...]) -> None:
    pointers, indices = names
    if rowptr.device != col.device:
        raise wrong(
            who, indices, f"to be on {rowptr.device} as '{pointers}'", col.device, StructureError
        )
    if rowptr.dtype != col.dtype:
        expected = f"{dtype_name(rowptr)} as '{pointers}'"
        raise wrong(who, indices, expected, dtype_name(col), StructureTypeError)


def check_range(who: str, name: str, what: str, x: Tensor, size: int) -> None:
    """Raise unless each of x is from 0 to size - 1; what : they are, in words."""
    if not len(x):
        return
    low, high = (int(v) for v in torch.aminmax(x))
    if low < 0 or high >= size:
        got = low if low < 0 else high
        expected = f"each {what} to be at least 0 and less than {size}"
        raise wrong(who, name, expected, got, StructureIndexError)
