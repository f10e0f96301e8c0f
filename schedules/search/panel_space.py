"""The panels of rows that a search tries (CPU)."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.spmm_panels import MOST_ROWS, PanelRows

__all__ = ["panel_choices"]

# Share of the places that store something, from which on panels are tried.
LEAST = 0.05
# Sums of a panel, in vectors, that are tried: more are in memory.
MOST_SUMS = 30


def panel_choices(
    problem: Any, known: list[Any], given: Statistics, lanes: int
) -> tuple[dict[str, tuple[Any, ...]], Callable[..., PanelRows | None]] | None:
    """Choices of rows, tile, copy and blocks, and what makes a config of them; None for none.

    known : the candidates, of which there may be panels
    lanes : of a vector

    (Enumerate-and-sparse-coarsen, section 3.4: UFi and WarpTile.)
    """
    stored = given.nnz / max(1, given.m * given.n)
    if stored < LEAST or lanes > given.feat or decomposed.serves(problem) is not None:
        return None
    own = [c for c in known if isinstance(c, PanelRows)]
    several = given.threads > 1

    def make(rows: int, tile: int, pack: bool, parallel: bool) -> PanelRows | None:
        if rows * -(-tile // lanes) > MOST_SUMS:
            return None
        parts = given.threads // gcd(-(-given.feat // tile), given.threads) if parallel else 1
        whole = given.feat % tile == 0 and tile % lanes == 0
        feat = None if whole else given.feat
        return PanelRows(rows, tile, lanes, feat, pack, parts, parallel)

    tiles = {min(given.feat, v * lanes) for v in (2, 4, 6)} | {c.tile for c in own}
    choices = {
        "rows": tuple(range(2, MOST_ROWS + 1)),
        "tile": tuple(sorted(tiles)),
        "pack": (False, True),
        "parallel": (False, True) if several else (False,),
    }
    return choices, make
