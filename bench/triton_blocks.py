"""A product of a matrix in blocks with a dense one, as one writes it in Triton.

For comparison; needs triton. A program has a row of blocks and a tile of features, sums in float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _product(
    a, b, c, indptr, indices, feat,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    features = tile * TILE + tl.arange(0, TILE)
    inside = features[None, :] < feat
    sums = tl.zeros((ROWS, TILE), dtype=tl.float32)
    for at in range(tl.load(indptr + row), tl.load(indptr + row + 1)):
        left = tl.load(a + at * ROWS * COLUMNS + rows[:, None] * COLUMNS + columns[None, :])
        k = tl.load(indices + at) * COLUMNS + columns
        right = tl.load(b + k[:, None] * feat + features[None, :], mask=inside, other=0.0)
        sums = tl.dot(left, right, sums)
    place = (row * ROWS + rows)[:, None] * feat + features[None, :]
    tl.store(c + place, sums.to(c.dtype.element_ty), mask=inside)


def product(
    indptr: Any, indices: Any, blocks: Any, b: Any, out: Any, tile: int, warps: int, stages: int
) -> Any:
    """out (m, feat), of blocks (blocks, rows, columns) and b (n, feat)."""
    _, rows, columns = blocks.shape
    grid = len(indptr) - 1, triton.cdiv(b.shape[1], tile)
    _product[grid](
        blocks, b, out, indptr, indices, b.shape[1], ROWS=rows, COLUMNS=columns, TILE=tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
