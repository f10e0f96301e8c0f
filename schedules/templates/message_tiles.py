"""Tiles of any number of features, for the kernels along edges: messages, softmax, attention.

All but attention have tiles of one number of features, attention of two: those of queries and keys,
and those of values. What else there is to choose is how rows are divided among threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.arguments import Config, expect, number
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.problems import Arranged, CsrPattern
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.passes.inline_exponentials import inline_exponentials
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates import register_tile
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef

MAX_LANES = 16
MAX_TILE = 128
GPU_THREADS = 128

BLOCKS_PER_THREAD = 8
# Blocks of rows for each thread that a search tries.
BLOCKS = (1, 4, 8, 32)
# Features of a tile: those of a GPU's thread at a time, and the least that a search tries.
GPU_TILE = 4
LEAST_TILE = 4
# Additions that take as long as an exponential.
EXPONENTIAL = 8


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


@dataclass(frozen=True)
class AttentionTiles(Config):
    """Tiles of the features of Q and K, and of those of V; threads as `keys` says."""

    keys: Tile = Tile()
    values: Tile = Tile()

    def tiles(self, feat: int) -> int:
        """Of so many features of values; raises ScheduleError for fewer than one has."""
        return self.values.tiles(feat)


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


# -- what is chosen and tried -------------------------------------------------------------------


def work(problem: Any, nnz: int, heads: int, features: Sequence[int]) -> int:
    """About how many multiplications a call takes; arguments as of :func:`chosen`."""
    softmax, attention = (isinstance(problem, kind) for kind in (EdgeSoftmax, EdgeAttention))
    if softmax:
        return nnz * heads * features[0] * EXPONENTIAL
    return nnz * heads * (sum(features) + EXPONENTIAL * attention)


def chosen(features: Sequence[int], threads: int = 1, gpu: bool = False) -> Tile | AttentionTiles:
    """The config for numbers of features.

    features : that tiles are of: of the result; for attention of queries, then of the result; for
        softmax the heads that lie side by side
    threads : of a CPU that pay
    """
    if gpu:
        tiles = [replace(Tile.for_features(n, most=GPU_TILE), gpu=True) for n in features]
        return _together(tiles)
    blocks = threads * BLOCKS_PER_THREAD if threads > 1 else 0
    return config_of(blocks, *(Tile.for_features(n).tile for n in features))


def tried(features: Sequence[int], threads: int, parallel: bool = True) -> Branch:
    """What a search tries: "tile", of attention "values", its tile of values, and "blocks" of rows.

    parallel : whether the chosen config, whose values come first, is for all threads. Without
        blocks a kernel runs on one
    """
    widest = [Tile.for_features(n).tile for n in features]
    least = [min(LEAST_TILE, tile) for tile in widest]
    tiles = [
        tuple(t for n in range(6) if (t := tile >> n) >= end)
        for tile, end in zip(widest, least, strict=True)
    ]
    several = tuple(threads * n for n in BLOCKS) if threads > 1 else ()
    first = (threads * BLOCKS_PER_THREAD,) if parallel and several else (0,)
    blocks = tuple(dict.fromkeys((*first, *several, 0)))
    named = dict(zip(("tile", "values"), tiles, strict=False))
    return Branch("schedule", {**named, "blocks": blocks}, config_of)


def config_of(blocks: int, tile: int, values: int | None = None) -> Tile | AttentionTiles:
    """The config of some values of what is :func:`tried`."""
    tiles = [n for n in (tile, values) if n is not None]
    return _together([Tile(n, True, blocks) if blocks else Tile(n) for n in tiles])


def _together(tiles: Sequence[Tile]) -> Tile | AttentionTiles:
    return tiles[0] if len(tiles) == 1 else AttentionTiles(*tiles)
