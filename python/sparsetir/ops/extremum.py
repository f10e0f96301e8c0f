"""Maxima and minima of sparse-dense products, where they are, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetir.ops.message_kernels import gspmm
from sparsetir.ops.structure import Structure


def extremum_and_place(
    structure: Structure, values: Tensor | None, b: Tensor, largest: bool
) -> tuple[Tensor, Tensor]:
    """C[i, k] = the greatest or least A[i, j] * B[j, k], and which element each is of.

    values : (nnz,) or (heads, nnz) in the caller's order, or None for ones
    b : (n, feat) or (heads, n, feat)

    The first is zero in rows without elements. The second is int64 and of the same shape: the
    place, in the caller's order, of the first element there that has the extremum, or is NaN where
    that is; -1 in rows without elements. Of 16-bit numbers the products are compared
    before they are rounded.
    """
    if b.dtype not in (torch.float32, torch.float64):
        wide = None if values is None else values.float()
        c, place = extremum_and_place(structure, wide, b.float(), largest)
        return c.to(b.dtype), place
    c = structure.run("spmm", (b,), values, "max" if largest else "min")
    if b.dim() == 2:
        return c, _place(structure, values, b, c)
    if not len(b):
        return c, torch.full_like(c, -1, dtype=torch.int64)
    each = values.unbind() if values is not None else [None] * len(b)
    heads = zip(each, b.unbind(), c.unbind(), strict=True)
    return c, torch.stack([_place(structure, *head) for head in heads])


def _place(structure: Structure, values: Tensor | None, b: Tensor, c: Tensor) -> Tensor:
    """Whose each element of c (m, feat) is, for values (nnz,) and b (n, feat)."""
    op, e = ("copy_u", None) if values is None else ("mul", values[:, None, None])
    _, place = gspmm(structure, b[:, None], e, op, "max", arg=True, found=c[:, None])
    assert place is not None
    return place[:, 0]


def gradients(
    col: Tensor, values: Tensor | None, b: Tensor, place: Tensor, grad: Tensor, wanted: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of an extremum with respect to values and b, where `wanted`, out of torch's own.

    Each comes from the one element that has the extremum; sums of 16-bit numbers are in float32.
    """
    columns = col[0] if col.dim() == 2 else col
    if not columns.shape[0]:
        zeros = None if values is None or not wanted[0] else torch.zeros_like(values)
        return zeros, torch.zeros_like(b) if wanted[1] else None
    found, place = place >= 0, place.clamp(min=0)
    flat = place.flatten(-2)
    column = columns.long()[place]
    wide = torch.promote_types(b.dtype, torch.float32)

    def kept(x: Tensor) -> Tensor:
        return torch.where(found, x, 0).to(wide)

    for_values = for_b = None
    if wanted[0] and values is not None:
        terms = kept(grad * b.gather(-2, column)).reshape(flat.shape)
        zeros = torch.zeros_like(values, dtype=wide)
        for_values = zeros.scatter_add(-1, flat, terms).to(values.dtype)
    if wanted[1]:
        terms = grad if values is None else grad * values.gather(-1, flat).view_as(grad)
        zeros = torch.zeros_like(b, dtype=wide)
        for_b = zeros.scatter_add(-2, column, kept(terms)).to(b.dtype)
    return for_values, for_b
