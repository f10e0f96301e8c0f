"""Tiles of features of any number of them, for the kernels of messages along edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.arguments import expect, number
from sparsetir.schedules.operators.problems import Arranged, CsrPattern
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.passes.inline_exponentials import inline_exponentials
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.templates import register_tile
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef

MAX_LANES = 16
MAX_TILE = 128
GPU_THREADS = 128


@dataclass(frozen=True)
class Tile(register_tile.Tiled):
    """How a kernel for any number of features from `tile` on is made.

    tile : features at a time, a power of two; the last tile begins earlier where it would reach
        too far
    parallel : use all threads; to wake them takes as long as a small product
    blocks : of rows with about as much work each, that are divided among the threads
    gpu : for the threads of a GPU, one for a row or an edge
    """

    tile: int = number(1, power=True)
    parallel: bool = False
    blocks: int = number(16)
    gpu: bool = False
    feat = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "gpu", not (self.gpu and self.parallel), "False with 'parallel'")

    @staticmethod
    def for_features(feat: int, parallel: bool = False, most: int = MAX_TILE) -> Tile:
        """The widest tile for a number of features, 1 or more."""
        return Tile(min(most, 1 << (feat.bit_length() - 1)), parallel)

    def tiles(self, feat: int) -> int:
        """Of so many features; raises ScheduleError for fewer than one has."""
        if feat < self.tile:
            raise ScheduleError(
                f"Tile: argument 'tile': expected at most {feat}, the number of features, got "
                f"{self.tile}"
            )
        return -(-feat // self.tile)

    @property
    def tail(self) -> str:
        """The last tile begins earlier."""
        return "shift"

    @property
    def lanes(self) -> int:
        """Of a vector."""
        return min(self.tile, MAX_LANES)


class OfEdges:
    """Values of edges as kernels take them; what a ConvertedFormat says of itself."""

    padding = 0.0
    keeps_order = True

    def values(self, /, **stored: Any) -> Mapping[str, Any]:
        """Values as they are."""
        return {"e": stored["A"]}


def arrange(matrix: CsrPattern, problem: Any, config: Any) -> Arranged:
    """CSR as it is, with values for each edge."""
    del problem, config
    return Arranged(OfEdges(), matrix.arguments())


def finish(
    sch: Schedule,
    tile: Tile,
    outer: Sequence[SparseIterationRef],
    vectors: register_tile.Straight,
    sums: Sequence[SparseIterationRef] = (),
) -> None:
    """All that is done in stage II.

    outer : iterations whose outermost loop is divided among the threads of a GPU
    vectors, sums : on a CPU, straight code of vectors, and iterations that add up lanes
    """
    stage_two = sch.lower()
    if tile.gpu:
        for step in outer:
            _bind_threads(stage_two, f"{step.name}0")
        return
    sch.rewrite(inline_exponentials)
    register_tile.straight_code(sch, vectors)
    for step in sums if tile.lanes > 1 else ():
        sch.rewrite(add_lanes, f"{step.name}0")


def _bind_threads(sch: Any, name: str) -> None:
    """Divide the outermost loop of a block among the threads of a GPU."""
    blocks, threads = sch.split(sch.get_loops(sch.get_sblock(name))[0], [None, GPU_THREADS])
    run_in_parallel(sch, blocks, "blockIdx.x")
    run_in_parallel(sch, threads, "threadIdx.x")
