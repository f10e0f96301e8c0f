"""Feature dimensions of two operands as kernels take them: at most two, heads and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Shape = Sequence[int]


class Merged(NamedTuple):
    """How feature dimensions of operands are joined.

    out : the feature dimensions of the result, as broadcast by torch
    groups : of each operand, the sizes of the joined dimensions; 1 where it is the same for all
    wide : of each operand, whether it must be expanded to `out` first
    """

    out: tuple[int, ...]
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    wide: bool

    def first(self, x: Tensor | None) -> Tensor | None:
        """The first operand, (rows, heads, feat)."""
        return None if x is None else self.grouped(x, 0)

    def second(self, x: Tensor | None) -> Tensor | None:
        """The second operand, (rows, heads, feat)."""
        return None if x is None else self.grouped(x, 1)

    def grouped(self, x: Tensor, side: int, keep: int = 0) -> Tensor:
        """An operand with joined dimensions; the last `keep` dimensions stay as they are."""
        kept = x.shape[x.dim() - keep :]
        if self.wide:
            before = x.shape[1 : x.dim() - keep]
            ones = (1,) * (len(self.out) - len(before))
            x = x.reshape(x.shape[0], *ones, *before, *kept)
            x = x.expand(x.shape[0], *self.out, *kept)
        return x.reshape(x.shape[0], *self.groups[side], *kept)


def merged(first: Shape | None, second: Shape | None, most: int = 2) -> Merged:
    """Join neighbouring dimensions that an operand has, or lacks, together.

    first, second : feature shapes; None for an operand that there is not. () is one number for all
    most : joined dimensions at most; where there are more the operands are to be expanded

    >>> merged((4, 8), (4, 1)).groups
    ((4, 8), (4, 1))
    >>> merged((4, 8), (4, 8)).groups
    ((1, 32), (1, 32))

    Raises RuntimeError for shapes that cannot be broadcast.
    """
    a, b = (() if x is None else tuple(x) for x in (first, second))
    out = tuple(torch.broadcast_shapes(a, b))
    a, b = ((1,) * (len(out) - len(x)) + x for x in (a, b))
    if first is None or second is None:
        a = b = out  # of one operand all dimensions are joined
    sizes: list[list[int]] = []
    last = None
    for one, other, size in zip(a, b, out, strict=True):
        if size == 1:
            continue
        has = one == size, other == size
        if has == last:
            sizes[-1] = [sizes[-1][0] * one, sizes[-1][1] * other]
        else:
            sizes.append([one, other])
        last = has
    wide = len(sizes) > most
    if wide:
        total = torch.Size(out).numel()
        sizes = [[total, total]]
    sizes = [[1, 1]] * (most - len(sizes)) + sizes
    groups = tuple(s[0] for s in sizes), tuple(s[1] for s in sizes)
    return Merged(out, groups, wide)
