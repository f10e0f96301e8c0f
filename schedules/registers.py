"""Vector register budgets of CPU kernels, in one place.

A kernel's accumulators leave room for loaded operands; a nest that reuses its operands for many
sums can give them more of the registers.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple


class Features(NamedTuple):
    """The fields of a config that describe the tiling of features."""

    tile: int
    lanes: int
    feat: int | None


def sum_vectors(registers: int) -> int:
    """Accumulator vectors per tile, half of the registers.

    Each gathered element's column and value is loaded once for all of its vectors, so that wider
    tiles are faster as long as nothing is spilled.
    """
    return registers // 2


def most_sum_vectors(registers: int) -> int:
    """Accumulator vectors for products of tiles, three quarters of the registers."""
    return registers * 3 // 4


def feat_field(feat: int, tile: int, lanes: int) -> int | None:
    """The field `feat` of a config: None if tiles and vectors are whole."""
    return None if feat % tile == 0 and tile % lanes == 0 else feat


def feature_tile(feat: int, lanes: int, vectors: int) -> Features:
    """Tiles of about `vectors` vectors, all of equal width."""
    while lanes > feat:
        lanes //= 2
    most = lanes * vectors
    for tile in range(most, most // 2, -lanes):
        if feat % tile == 0:
            return Features(tile, lanes, None)
    if feat <= most and feat % lanes == 0:
        return Features(feat, lanes, None)
    count = -(-feat // most)
    return Features(min(feat, -(-feat // (count * lanes)) * lanes), lanes, feat)


def tasks(threads: int, tiles: int, each: int = 1) -> int:
    """Blocks of rows that give each thread `each` tasks, if tiles are tasks too."""
    return max(1, each * (threads // gcd(tiles, threads)))
