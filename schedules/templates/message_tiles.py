"""Tiles of features of any number of them, for the kernels of messages along edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.sparse_ir.nodes import map_expr

__all__ = [
    "Tile",
    "bind_threads",
    "hide_own_reads",
    "in_vectors",
    "on_threads",
    "without_guards",
]

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
        tile = self.tile
        if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1 or tile & (tile - 1):
            raise ValueError(f"Tile: argument 'tile': expected a power of two, got {tile!r}")
        if self.blocks < 1:
            raise ValueError(f"Tile: argument 'blocks': expected 1 or more, got {self.blocks}")
        if self.gpu and self.parallel:
            raise ValueError("Tile: argument 'gpu': expected False with 'parallel', got True")

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

    def sizes(self, feat: int) -> dict[str, int]:
        """The arguments "tiles" and "rest", the features beside one tile, of a kernel."""
        return {"tiles": -(-feat // self.tile), "rest": feat - self.tile}

    def place(self, p: Any, v: Any, lane: Any, rest: Any) -> Any:
        """The feature at a lane of vector v of tile p."""
        return tirx.min(p * self.tile, rest) + v * self.lanes + lane


def without_guards(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage-II function without conditions, where all that it reads and writes is in range.

    The lowering guards `U[order[e], k]`, as `order[e]` may be anything, and places in a last tile
    that begins earlier, as it does not know that there are features enough. Before::

        if_then_else(0 <= order[e] and order[e] < n, U[order[e], k], 0)

    After::

        U[order[e], k]

    For functions whose author wrote no conditions, and whose callers check the index arrays.
    """

    def load(call: Any) -> Any:
        named = isinstance(call.op, ir.Op) and str(call.op.name).endswith(".if_then_else")
        return call.args[1] if named else call

    def store(branch: Any) -> Any:
        return branch.then_case

    return func.with_body(map_expr(func.body, [(ir.Call, load), (tirx.IfThenElse, store)]))


def in_vectors(sch: Any, block: Any) -> None:
    """Straight code of vectors, for a block whose last two loops are over vectors and lanes."""
    *_, vectors, lanes = sch.get_loops(block)
    sch.unroll(vectors)
    sch.vectorize(lanes)


def hide_own_reads(sch: Any, name: str) -> Any:
    """A schedule in which a block that changes elements in place may be scheduled as others are.

    Each visit of the block reads the elements that it writes, and no others of that buffer, which
    TVM does not see.
    """
    block = sch.get_sblock(name)
    written = [region.source.name for region in sch.get(block).writes]
    own = [n for n, r in enumerate(sch.get(block).reads) if r.source.name in written]
    sch.unsafe_hide_buffer_access(block, "read", own)
    return s_tir.Schedule(sch.mod)  # which looks at dependences anew


def on_threads(func: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    """A stage-II function with the outermost loop of a block over the threads of a GPU."""
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    bind_threads(sch, name)
    return apply_kinds(sch.mod["main"])


def bind_threads(sch: Any, name: str) -> None:
    """Divide the outermost loop of a block among the threads of a GPU."""
    blocks, threads = sch.split(sch.get_loops(sch.get_sblock(name))[0], [None, GPU_THREADS])
    run_in_parallel(sch, blocks, "blockIdx.x")
    run_in_parallel(sch, threads, "threadIdx.x")
