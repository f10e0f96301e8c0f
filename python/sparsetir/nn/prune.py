"""Which weights are kept: those of the largest magnitude, one by one or in blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def prune(weight: Tensor, sparsity: float, block: tuple[int, int] | None = None) -> Tensor:
    """Mask of the weights of largest magnitude, or of the blocks of largest norm.

    Parameters
    ----------
    weight : (rows, columns) Tensor
        The weight.
    sparsity : float
        Share of the places, or of the blocks, that are not kept, 0 to 1.
    block : (int, int), optional
        Rows and columns of the blocks, which are to divide the weight; blocks of the largest norms
        are kept. None for places one by one.

    Returns
    -------
    (rows, columns) Tensor, bool

    Examples
    --------
    >>> import torch
    >>> prune(torch.tensor([[3.0, 0.1], [-0.2, -4.0]]), 0.5)
    tensor([[ True, False],
            [False,  True]])
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"prune: argument 'weight': expected two dimensions, got {got}")
    if isinstance(sparsity, bool) or not 0 <= sparsity <= 1:
        raise ValueError(f"prune: argument 'sparsity': expected 0 to 1, got {sparsity!r}")
    size = check_block("prune", weight, block) if block is not None else (1, 1)
    (m, n), (r, c) = weight.shape, size
    blocks = weight.detach().reshape(m // r, r, n // c, c).to(torch.float64)
    score = blocks.square().sum((1, 3)).flatten()
    kept = score.topk(round((1 - sparsity) * score.numel())).indices
    mask = torch.zeros_like(score, dtype=torch.bool)
    mask[kept] = True
    return mask.view(m // r, 1, n // c, 1).expand(m // r, r, n // c, c).reshape(m, n)


def check_block(who: str, weight: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    """A block's rows and columns; raises ValueError for what does not divide a weight."""
    whole = isinstance(block, tuple | list) and len(block) == 2
    whole = whole and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in block)
    if not whole or weight.shape[0] % block[0] or weight.shape[1] % block[1]:
        raise ValueError(
            f"{who}: argument 'block': expected rows and columns that divide a weight of shape "
            f"{tuple(weight.shape)}, got {block!r}"
        )
    return block[0], block[1]
