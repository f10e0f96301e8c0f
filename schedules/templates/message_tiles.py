"""Tiles of features of any number of them, for the kernels of messages along edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.arguments import expect, expect_at_least, is_power_of_two
from sparsetir.schedules.passes.parallel_loops import run_in_parallel

__all__ = ["ROW_COST", "Tile", "bind_threads"]

MAX_LANES = 16
MAX_TILE = 128
GPU_THREADS = 128
# Of a row, beside what it stores, in blocks of rows with about as much work each.
ROW_COST = 2


@dataclass(frozen=True)
class Tile:
    """How a kernel for any number of features from `tile` on is made.

    tile : features at a time, a power of two; the last tile begins earlier where it would reach
        too far
    parallel : use all threads; to wake them takes as long as a small product
    blocks : of rows with about as much work each, that are divided among the threads
    gpu : for the threads of a GPU, one for a row or an edge
    """

    tile: int = 1
    parallel: bool = False
    blocks: int = 16
    gpu: bool = False

    def __post_init__(self) -> None:
        expect(self, "tile", is_power_of_two(self.tile), "a power of two")
        expect_at_least(self, blocks=1)
        expect(self, "gpu", not (self.gpu and self.parallel), "False with 'parallel'")

    @staticmethod
    def for_features(feat: int, parallel: bool = False, most: int = MAX_TILE) -> Tile:
        """The widest tile for a number of features, 1 or more."""
        return Tile(min(most, 1 << (feat.bit_length() - 1)), parallel)

    @property
    def lanes(self) -> int:
        """Of a vector."""
        return min(self.tile, MAX_LANES)

    @property
    def vectors(self) -> int:
        """Of a tile."""
        return self.tile // self.lanes


def bind_threads(sch: Any, name: str) -> None:
    """Divide the outermost loop of a block among the threads of a GPU."""
    blocks, threads = sch.split(sch.get_loops(sch.get_sblock(name))[0], [None, GPU_THREADS])
    run_in_parallel(sch, blocks, "blockIdx.x")
    run_in_parallel(sch, threads, "threadIdx.x")
