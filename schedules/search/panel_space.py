"""The panels of rows that a search tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsetir.schedules.gpu.features import vector_width
from sparsetir.schedules.gpu.spmm_panels import PanelThreads
from sparsetir.schedules.registers import served, tasks
from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.spmm_panels import MOST_COMPACT, MOST_ROWS, PanelRows

# Share of the places that store something, from which on panels are tried.
LEAST = 0.05
# Sums of a panel, in vectors, that are tried: more are in memory.
MOST_SUMS = 30


def panel_choices(
    problem: Any, known: list[Any], given: Statistics, lanes: int
) -> tuple[dict[str, tuple[Any, ...]], Callable[..., PanelRows | None]] | None:
    """Choices of rows, tile, copy, compaction and blocks of a CPU, and what makes a config of them.

    None where panels do not serve. Compacted are those of as many rows as by pattern are the most
    and of more: smaller ones compile sooner by pattern (`bench study coarsen`).

    known : the candidates, of which there may be panels
    lanes : of a vector

    (Enumerate-and-sparse-coarsen, sections 3.4 and 3.5: UFi, WarpTile and compaction.)
    """
    if _stored(given) < LEAST or lanes > given.feat or decomposed.serves(problem) is not None:
        return None
    own = [c for c in known if isinstance(c, PanelRows)]
    several = given.threads > 1

    # Results of compacted panels are added to.
    exact = (problem.out or problem.dtype) == problem.accumulator

    def make(rows: int, tile: int, pack: bool, compact: bool, parallel: bool) -> PanelRows | None:
        if rows * -(-tile // lanes) > MOST_SUMS:
            return None
        if compact and (rows < MOST_ROWS or not exact or given.feat % tile):
            return None
        if rows > MOST_ROWS and not compact:
            return None
        parts = tasks(given.threads, -(-given.feat // tile)) if parallel else 1
        feat = served(given.feat, tile, lanes)
        return PanelRows(rows, tile, lanes, feat, pack, parts, parallel, compact=compact)

    tiles = {min(given.feat, v * lanes) for v in (2, 4, 6)} | {c.tile for c in own}
    choices = {
        "rows": tuple(range(2, MOST_COMPACT + 1)),
        "tile": tuple(sorted(tiles)),
        "pack": (False, True),
        "compact": (False, True),
        "parallel": (False, True) if several else (False,),
    }
    return choices, make


def gpu_panel_choices(
    problem: Any, given: Statistics
) -> tuple[dict[str, tuple[Any, ...]], Callable[..., PanelThreads | None]] | None:
    """Choices of UFi, UFk, WarpTile, the block, atomics and compaction of a GPU, or None.

    Blocks are of one warp, as most of the paper's best ones, or of four. UFk is up to 8, as in its
    table 2. A default has to wait for figures of a GPU: by counts of the emulated one (`bench study
    coarsen --counts`) panels read fewer sectors than rows by themselves, and fill fewer warps.
    """
    if _stored(given) < LEAST or problem.batched:
        return None
    dtype = problem.out or problem.dtype
    widest = vector_width(given.feat, dtype)

    def make(vector: int, block: int, **fields: Any) -> PanelThreads | None:
        if vector > widest or vector * fields["coarsen"] > given.feat:
            return None
        config = PanelThreads.for_features(given.feat, dtype, vector=vector, block=block, **fields)
        return config if config.serves(problem) else None

    choices = {
        "rows": (2, 3, 4, 5, 6, 8),
        "unroll": (2, 4, 8),
        "atomics": (False, True),
        "compact": (False, True),
        "vector": tuple(v for v in (1, 2, 4, 8) if v <= widest)[-3:],
        "coarsen": (1, 2),
        "block": (32, 128),
    }
    return choices, make


def _stored(given: Statistics) -> float:
    """The share of places that store something."""
    return given.nnz / max(1, given.m * given.n)
