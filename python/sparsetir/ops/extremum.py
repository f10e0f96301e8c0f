"""Gradients of reductions, and products as the messages that they are."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetir.ops.registry import Gradients


def mean_gradient(grad: Tensor, elements: Tensor) -> Tensor:
    """The gradient with respect to sums of rows, of that with respect to their means.

    elements : of each row, broadcast with `grad`
    """
    # In float32 at least: 16 bits end at 65504, and rows may have more elements.
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad / elements.clamp(min=1).to(wide)).to(grad.dtype)


def as_messages(values: Tensor | None, b: Tensor) -> tuple[Tensor, Tensor | None, str]:
    """Operands u and e of a product, and what becomes of them: as messages have them.

    values, b : (nnz,) or (heads, nnz), and (n, feat) or (heads, n, feat)
    """
    u, e = nodes_first(b), None if values is None else nodes_first(values[..., None])
    return u, e, "copy_u" if e is None else "mul"


def nodes_first(x: Tensor) -> Tensor:
    """(rows, heads, feat) of (heads, rows, feat), or (rows, 1, feat) of (rows, feat)."""
    return x.transpose(0, 1) if x.dim() == 3 else x[:, None]


def heads_first(x: Tensor, like: Tensor) -> Tensor:
    """The other way round, as another tensor is."""
    return x.transpose(0, 1) if like.dim() == 3 else x[:, 0]


def gradients_of_product(
    col: Tensor, values: Tensor | None, b: Tensor, place: Tensor, grad: Tensor
) -> Gradients:
    """What computes those of an extremum with respect to values and b, out of torch's own.

    place, grad : heads first, as b
    """
    u, e, op = as_messages(values, b)
    found = gradients_of_messages(col, u, e, nodes_first(place), op, nodes_first(grad))
    return {
        "values": lambda: heads_first(found["e"](), b)[..., 0],
        "b": lambda: heads_first(found["u"](), b),
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
