"""Which matrices go by rows in the order of their lengths, and how (CPU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparsetir.schedules.default import l2_bytes
from sparsetir.schedules.templates.spmm_sorted import SortedRows

# Rows from which on no processor knows their lengths by heart, and elements of one up to which its
# end takes a good part of its time.
ROWS, LENGTH = 8192, 6
# Times the L2 cache that B may take: beyond it, gathering and writing far and wide takes longer.
CACHES = 4
VECTORS = 2
WINDOWS = (512, 4096)


def sorting_pays(m: int, n: int, nnz: int, feat: int, bytes: int, lanes: int) -> bool:
    """Whether rows by length are faster than rows as they are: many short ones, few features.

    Measured on Zen 5 (AVX-512, one thread, float32), PubMed and generated graphs of 20,000 rows
    with 2 to 8 elements on average, calls in a row: 1.9 to 3.1 times as fast with 8 features, 1.8
    to 2.4 with 16, 1.4 to 1.9 with 32, of values that are packed; 1.3 to 2.9 of those that are
    not. In turns with other matrices 1.0 to 1.3 with 32. With 64 features and more, or 16 elements
    to a row, it gains nothing; up to 4,000 rows it takes up to a tenth longer, as the processor
    foresees the ends of rows that it has seen some times; and so it does on 325,729 rows, whose
    B is larger than the caches.
    """
    fits = n * feat * bytes <= CACHES * l2_bytes()
    return m >= ROWS and fits and 0 < nnz <= LENGTH * m and feat <= VECTORS * lanes


def sorted_rows(tiled: Any, given: Any, parallel: bool) -> SortedRows:
    """The config for a pattern.

    tiled : row blocks for these features
    given : :class:`sparsetir.schedules.search.choose.Statistics`
    """
    blocks, ahead = (given.threads, given.ahead) if parallel else (1, 0)
    return SortedRows(
        tiled.tile, tiled.lanes, tiled.feat, blocks=blocks, parallel=parallel, ahead=ahead
    )


def sorted_choices(
    known: list[Any], given: Any
) -> tuple[dict[str, tuple[Any, ...]], Callable[..., SortedRows]] | None:
    """Choices of windows and threads around a candidate, and what makes a config of them."""
    own = [c for c in known if isinstance(c, SortedRows)]
    if not own:
        return None
    several = given.threads > 1

    def make(window: int, parallel: bool) -> SortedRows:
        return replace(sorted_rows(own[0], given, parallel), window=window)

    return {"window": WINDOWS, "parallel": (False, True) if several else (False,)}, make
