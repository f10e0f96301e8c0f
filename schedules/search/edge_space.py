"""The configs of kernels along edges: the one that is chosen, and those that a search tries.

All but attention have tiles of one number of features, attention of two: those of queries and keys,
and those of values. What else there is to choose is how rows are divided among threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_softmax import EdgeSoftmax
from sparsetir.schedules.operators.messages import Messages
from sparsetir.schedules.templates import edge_attention, edge_softmax, messages
from sparsetir.schedules.templates.edge_attention import AttentionTiles
from sparsetir.schedules.templates.message_tiles import Tile
from sparsetir.sparse_ir.schedule import Schedule

Config = Tile | AttentionTiles

BLOCKS_PER_THREAD = 8
# Blocks of rows for each thread that a search tries.
BLOCKS = (1, 4, 8, 32)
# Features of a tile: those of a GPU's thread at a time, and the least that a search tries.
GPU_TILE = 4
LEAST_TILE = 4
# Additions that take as long as an exponential.
EXPONENTIAL = 8


def work(problem: Any, nnz: int, heads: int, features: Sequence[int]) -> int:
    """About how many multiplications a call takes; arguments as of :func:`chosen`."""
    if isinstance(problem, EdgeSoftmax):
        return nnz * heads * features[0] * EXPONENTIAL
    exponentials = EXPONENTIAL if isinstance(problem, EdgeAttention) else 0
    return nnz * heads * (sum(features) + exponentials)


def chosen(features: Sequence[int], threads: int = 1, gpu: bool = False) -> Config:
    """The config for numbers of features.

    features : that tiles are of: of the result; for attention of queries, then of the result; for
        softmax the heads that lie side by side
    threads : of a CPU that pay
    """
    if gpu:
        tiles = [replace(Tile.for_features(n, most=GPU_TILE), gpu=True) for n in features]
    else:
        blocks = threads * BLOCKS_PER_THREAD if threads > 1 else 0
        tiles = [_tile(Tile.for_features(n).tile, blocks) for n in features]
    return tiles[0] if len(tiles) == 1 else AttentionTiles(*tiles)


def space(
    features: Sequence[int], threads: int, parallel: bool = True
) -> dict[str, tuple[Any, ...]]:
    """Values of "tile", of attention of "values", its tile of values, and of "blocks" of rows.

    parallel : whether the chosen config, whose values come first, is for all threads. Without
        blocks a kernel runs on one
    """
    tiles = [tuple(_tiles(n)) for n in features]
    several = tuple(threads * n for n in BLOCKS) if threads > 1 else ()
    first = (threads * BLOCKS_PER_THREAD,) if parallel and several else (0,)
    blocks = tuple(dict.fromkeys((*first, *several, 0)))
    named = dict(zip(("tile", "values"), tiles, strict=False))
    return {**named, "blocks": blocks}


def config_of(choices: Mapping[str, Any]) -> Config:
    """The config of one of each of the :func:`space`'s values."""
    blocks = choices["blocks"]
    tiles = [_tile(choices[name], blocks) for name in ("tile", "values") if name in choices]
    return tiles[0] if len(tiles) == 1 else AttentionTiles(*tiles)


def configs(choices: Mapping[str, tuple[Any, ...]]) -> list[Config]:
    """The chosen config, and those that differ from it in one field of a :func:`space`."""
    first = {name: values[0] for name, values in choices.items()}
    others = ((name, value) for name, values in choices.items() for value in values[1:])
    return [config_of(first), *(config_of({**first, name: value}) for name, value in others)]


def apply_messages(sch: Schedule, config: Mapping[str, Any]) -> None:
    """Schedule messages by one of each of the :func:`space`'s values."""
    messages.apply(sch, _as(Tile, config))


def apply_softmax(sch: Schedule, config: Mapping[str, Any]) -> None:
    """Schedule softmax by one of each of the :func:`space`'s values."""
    edge_softmax.apply(sch, _as(Tile, config))


def apply_attention(sch: Schedule, config: Mapping[str, Any]) -> None:
    """Schedule attention by one of each of the :func:`space`'s values."""
    edge_attention.apply(sch, _as(AttentionTiles, config))


# By the type of the problem, what schedules by choices.
SCHEDULES: Mapping[type, Any] = {
    Messages: apply_messages, EdgeSoftmax: apply_softmax, EdgeAttention: apply_attention,
}  # fmt: skip


def _tile(tile: int, blocks: int) -> Tile:
    return Tile(tile, True, blocks) if blocks else Tile(tile)


def _tiles(feat: int) -> list[int]:
    """The widest tile of a number of features, and half of it, and so on."""
    widest = Tile.for_features(feat).tile
    return [t for n in range(6) if (t := widest >> n) >= min(LEAST_TILE, widest)]


def _as(kind: type, choices: Mapping[str, Any]) -> Any:
    found = config_of(choices)
    assert isinstance(found, kind)
    return found
