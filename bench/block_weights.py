"""Pruned weights that products of blocks are measured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.formats import BSR, DBSR, SRBCRS, Format

BLOCK = 32


@dataclass(frozen=True)
class Kind:
    """How a weight was pruned, and formats that suit it.

    tile : rows and columns of what was kept or pruned together
    empty : share of rows of blocks that keep nothing
    """

    tile: tuple[int, int]
    formats: tuple[Format, ...]
    empty: float = 0.0


# By what papers prune: blocks (movement pruning leaves rows of them empty: SparseTIR, section
# 4.3.2), pieces of columns, single weights. SR-BCRS of the last has places for what is not there.
KINDS = {
    "blocks": Kind((BLOCK, BLOCK), (BSR(BLOCK, BLOCK), BSR(16, 16), SRBCRS(16, 32))),
    "rows of blocks": Kind((BLOCK, BLOCK), (DBSR(BLOCK, BLOCK), BSR(BLOCK, BLOCK)), 0.5),
    "pieces of columns": Kind((8, 1), (SRBCRS(8, 32), SRBCRS(8, 16))),
    "weights": Kind((1, 1), (SRBCRS(8, 32), SRBCRS(16, 32))),
}


def weight(kind: Kind, size: int, sparsity: float, seed: int = 0) -> sp.csr_array:
    """(size, size) float32 of which about this share is zero, the others normally distributed."""
    rng, (rows, columns) = np.random.default_rng(seed), kind.tile
    grid = size // rows, size // columns
    kept = np.zeros(grid, bool)
    full = rng.permutation(grid[0])[: max(1, round(grid[0] * (1 - kind.empty)))]
    count = min(round(grid[0] * grid[1] * (1 - sparsity)), len(full) * grid[1])
    places = rng.permutation(len(full) * grid[1])[:count]
    kept[full[places // grid[1]], places % grid[1]] = True
    mask: Any = np.repeat(np.repeat(kept, rows, axis=0), columns, axis=1)
    i, j = np.nonzero(mask)
    values = rng.standard_normal(len(i)).astype("float32")
    return sp.csr_array((values, (i, j)), shape=(size, size))
