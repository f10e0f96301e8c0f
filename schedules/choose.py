"""The template and the config that a problem gets when its user names none.

Rules of thumb from what was measured (`bench/results`): see `choose` for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparsetir.schedules.default import is_gpu, vector_bits
from sparsetir.schedules.problems import Spmm
from sparsetir.schedules.spmm import RowBlocks

__all__ = ["Statistics", "candidates", "choose"]

# Non-zeros per row of B from which on a copy of B pays.
PACK_DEGREE = 16
ENOUGH_FEATURES = 64


@dataclass(frozen=True)
class Statistics:
    """What the choice is made by: sizes of the pattern, and features."""

    m: int
    n: int
    nnz: int
    feat: int


def choose(problem: Any, given: Statistics, target: Any) -> Any:
    """A config for a problem, a pattern and a target."""
    return candidates(problem, given, target)[0]


def candidates(problem: Any, given: Statistics, target: Any) -> list[Any]:
    """Configs worth measuring, the default first."""
    if is_gpu(target):
        raise NotImplementedError
    return _spmm_cpu(problem, given, target)


def _spmm_cpu(problem: Spmm, given: Statistics, target: Any) -> list[RowBlocks]:
    lanes = max(1, vector_bits(target) // (64 if problem.accumulator == "float64" else 32))
    narrow, wide = _tiled(given.feat, lanes, 4), _tiled(given.feat, lanes, 8)
    widest = _tiled(given.feat, lanes, 16)
    packed = replace(narrow, pack=True)
    in_parts = replace(packed, parts=4, prefetch=0)
    found = [wide, narrow, widest, packed, replace(wide, pack=True), in_parts]
    if given.feat > ENOUGH_FEATURES and given.nnz >= PACK_DEGREE * given.n:
        found.insert(0, packed)
    return list(dict.fromkeys(found))


def _tiled(feat: int, lanes: int, vectors: int) -> RowBlocks:
    """Tiles of about as many vectors, all of the same width."""
    while lanes > feat:
        lanes //= 2
    most = lanes * vectors
    for tile in range(most, most // 2, -lanes):
        if feat % tile == 0:
            return RowBlocks(tile=tile, lanes=lanes)
    if feat <= most and feat % lanes == 0:
        return RowBlocks(tile=feat, lanes=lanes)
    count = -(-feat // most)
    tile = min(feat, -(-feat // (count * lanes)) * lanes)
    return RowBlocks(tile=tile, lanes=lanes, feat=feat)
