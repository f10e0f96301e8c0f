"""Maxima and minima of sparse-dense products, where they are, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetir.ops.message_kernels import gspmm
from sparsetir.ops.registry import Gradients
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


def gradients_of_product(
    col: Tensor, values: Tensor | None, b: Tensor, place: Tensor, grad: Tensor
) -> Gradients:
    """What computes those of an extremum with respect to values and b, out of torch's own.

    place, grad : of the results of :func:`extremum_and_place`
    """
    heads = b.dim() == 3
    u, arg, grad = (x.transpose(0, 1) if heads else x[:, None] for x in (b, place, grad))
    e = None if values is None else (values.t() if heads else values[:, None])[..., None]
    found = gradients_of_messages(col, u, e, arg, "mul" if e is not None else "copy_u", grad)
    return {
        "values": lambda: found["e"]().squeeze(2).t() if heads else found["e"]()[:, 0, 0],
        "b": lambda: found["u"]().transpose(0, 1) if heads else found["u"]()[:, 0],
    }


def gradients_of_messages(
    col: Tensor, u: Tensor | None, e: Tensor | None, arg: Tensor, op: str, grad: Tensor
) -> Gradients:
    """What computes those of the greatest or least messages with respect to u and e.

    u, e : (n, heads, feat) and (nnz, heads, feat), whose heads and feat may be 1
    arg : (m, heads, feat) the element whose message each is, -1 without any

    Each comes from that one message; sums of 16-bit numbers are in float32.
    """
    columns = col[0] if col.dim() == 2 else col
    nothing = not columns.shape[0]
    found, edge = arg >= 0, arg.clamp(min=0)
    column = edge if nothing else columns.long()[edge]
    with_both = op in ("mul", "div")

    def at(operand: Tensor, place: Tensor) -> Tensor:
        """Where an operand that is the same for all heads or features has them, (m * .. ,)."""
        (_, heads, feat), (_, h, k) = operand.shape, place.shape
        place = place * heads
        if heads != 1:
            place = place + torch.arange(h, device=place.device)[:, None]
        place = place * feat
        return (place + torch.arange(k, device=place.device) if feat != 1 else place).reshape(-1)

    def taken(operand: Tensor, place: Tensor) -> Tensor:
        """The operand's part in each message that was the greatest or least."""
        return grad if nothing else operand.expand(-1, *place.shape[1:]).gather(0, place)

    def scattered(terms: Tensor, place: Tensor, operand: Tensor) -> Tensor:
        wide = torch.promote_types(terms.dtype, torch.float32)
        zeros = terms.new_zeros(operand.shape, dtype=wide)
        if not nothing:
            terms = torch.where(found, terms, 0).to(wide)
            if operand.shape[1:] == place.shape[1:]:
                zeros = zeros.scatter_add(0, place, terms)
            else:
                flat = zeros.reshape(-1).scatter_add(0, at(operand, place), terms.reshape(-1))
                zeros = flat.view_as(operand)
        return zeros.to(operand.dtype)

    def for_u() -> Tensor:
        assert u is not None
        other = taken(e, edge) if with_both and e is not None else None
        terms = grad if other is None else grad * other if op == "mul" else grad / other
        return scattered(terms, column, u)

    def for_e() -> Tensor:
        assert e is not None
        terms = -grad if op == "sub" else grad
        if with_both and u is not None:
            terms = grad * taken(u, column)
            if op == "div":
                other = taken(e, edge)
                terms = -terms / (other * other)
        return scattered(terms, edge, e)

    return {"u": for_u, "e": for_e}
