"""When it pays to gather rows of B from panels: copies of some features of all rows.

One rule for plans, which know how many nonzeros miss a cache (:mod:`.search.choose`), and for
kernels, which ask it at run time, of sizes and the reuse distance (:mod:`.multiversion`): sizes are
numbers or expressions, and so are the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.schedules.targets import l1_bytes, l2_bytes, l3_bytes

# The least nonzeros per row of B for which copying it pays.
PACK_DEGREE = 28
# The same if most rows of B are beyond the L3 cache, or if rows of at least LONG bytes miss the L2
# cache, or the L1 cache and rows of panels do not.
PACK_DEGREE_FAR, LONG = 12, 2048
# The features from which on panels pay; with just as many, only if a cache holds narrow panels, and
# neither wide ones nor B.
PACK_FEATURES = 64
# Bytes per row of a panel, narrow and wide.
PANELS = (128, 256)
# The least share of nonzeros that miss a cache for which that cache does not help, about half, and
# most of them.
MISSED, HALF, MOST = 0.25, 0.5, 0.6


class Panels(NamedTuple):
    """Whether panels pay, and wide ones more than narrow ones: booleans, or conditions."""

    pay: Any
    wide: Any


def panels(
    n: Any, nnz: Any, feat: Any, size: int, misses: Callable[[Any, int, float], Any],
    tiles: tuple[int, int] = PANELS, copies: int = 1, converts: bool = False,
) -> Panels:  # fmt: skip
    """Return whether to gather rows of B from panels.

    n, nnz, feat : rows of B, nonzeros, features
    size : bytes of an element of B
    misses : whether at least a share of the nonzeros miss a cache, for bytes of a row, bytes of the
        cache, and the share
    tiles : bytes per row of a narrow and of a wide panel
    copies : of each panel, as each block of rows makes one
    converts : whether panels save converting elements, so that they pay for few features, too

    Panels are as wide as half of the L3 cache holds, but narrow where that makes rows stay in the
    L1 cache. (Zen 5, one thread, 2,000 to 30,000 rows: wide ones, prefetched beyond the L2 cache,
    1.1 to 1.3 times as fast.) They pay if rows are reused often, and not so soon that whole ones
    are still in the L1 cache. (Zen 3, one thread, finite elements and stencils of 25 to 60 nonzeros
    a row: whole rows 1.1 to 1.25 times as fast where the L1 cache misses 13 %, panels 1.1 to 1.7
    times where it misses 40 % and more.) Fewer nonzeros a column are enough if most rows of B come
    from beyond the L3 cache (a random graph of 16 to a row: 1.4 to 2.2 times), or if long rows miss
    the L2 cache, or the L1 cache where it holds rows of panels. (Zen 5, one thread, random graphs
    and bands of 12 to 28 to a row: 0.93 to 1.6 times with 512 features; with 128 and 256, bands
    0.76 to 0.9 if B begins at a cache line.) With 64 features whole rows, which are prefetched,
    take 0.8 to 1.05 of the time of two panels, unless the L3 cache holds a panel and not B (100,000
    rows: 1.3 to 1.7).
    """
    row, (narrow, wide) = feat * size, tiles
    often, less_often = (nnz >= n * (copies * x) for x in (PACK_DEGREE, PACK_DEGREE_FAR))
    narrow_fits, fits = (n * x <= l3_bytes() // 2 for x in tiles)
    narrow_far, far = (misses(x, l1_bytes(), MISSED) for x in tiles)
    only_narrow_near = every(no(narrow_far), far, n * wide > l2_bytes())
    some_miss, half_miss = (converts or misses(row, l1_bytes(), x) for x in (MISSED, HALF))
    near = every(no(far), half_miss, n * row <= l3_bytes())
    long = every(row >= LONG, some(near, misses(row, l2_bytes(), MOST)))
    beyond = misses(row, l3_bytes() // 2, HALF)
    pay = some(every(often, some_miss), every(less_often, some(beyond, long)))
    kept = some(every(narrow_fits, no(fits)), every(only_narrow_near, half_miss))
    at_least = every(feat >= PACK_FEATURES, often, kept)
    return Panels(
        some(every(some(converts, feat > PACK_FEATURES), pay), at_least),
        every(fits, no(only_narrow_near)),
    )


def every(*conditions: Any) -> Any:
    """The conjunction of booleans or conditions: a boolean if all are."""
    return tirx.all(*conditions) if _any_of_tir(conditions) else all(conditions)


def some(*conditions: Any) -> Any:
    """The disjunction of booleans or conditions: a boolean if all are."""
    return tirx.any(*conditions) if _any_of_tir(conditions) else any(conditions)


def no(condition: Any) -> Any:
    """The negation of a boolean or a condition."""
    return tirx.Not(condition) if _any_of_tir([condition]) else not condition


def is_false(condition: Any) -> bool:
    """Whether a boolean or a condition is known to be false."""
    return not condition if isinstance(condition, bool | tirx.IntImm) else False


def _any_of_tir(conditions: Any) -> bool:
    return any(isinstance(x, ir.Expr) for x in conditions)
