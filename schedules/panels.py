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
# The same for long rows that miss caches, and if nearly all rows of B are beyond the L3 cache.
PACK_DEGREE_LONG, PACK_DEGREE_FAR = 11, 7
# Rows of B are long if the L2 cache holds at most so many.
HELD = 512
# The part of the L3 cache that B may take, in L2 caches, if that is less than half of it.
L2_CACHES = 16
# The least nonzeros per row of A: each panel visits all rows of the result.
LENGTH = 6
# The least bytes per row of a panel, two cache lines, and vectors of a wide one.
LEAST, VECTORS = 128, 4
# The least share of nonzeros that miss a cache for which that cache does not help, about half, most
# and nearly all of them.
MISSED, HALF, MOST, NEARLY_ALL = 0.25, 0.5, 0.6, 0.75


class Panels(NamedTuple):
    """Whether panels pay, and wide ones more than narrow ones: booleans, or conditions."""

    pay: Any
    wide: Any


def panel_bytes(vector_bits: int, converts: bool = False) -> tuple[int, int]:
    """Bytes per row of a narrow and of a wide panel.

    Four vectors make up for reading a nonzero's column and value; more take room in caches from
    other rows. (AVX2 on Zen 3, one thread: panels of eight vectors take 1.1 to 1.5 times as long;
    but where elements are converted, 0.75 to 0.9.)

    converts : whether panels save converting elements
    """
    return LEAST, 2 * LEAST if converts else max(LEAST, VECTORS * vector_bits // 8)


def long_row() -> int:
    """The least bytes of a long row of B."""
    return l2_bytes() // HELD


def share_of_l3() -> int:
    """Bytes of the L3 cache that B can count on: others use it, too."""
    return min(l3_bytes() // 2, L2_CACHES * l2_bytes())


def panels(
    m: Any, n: Any, nnz: Any, feat: Any, size: int, misses: Callable[[Any, int, float], Any],
    tiles: tuple[int, int], copies: int = 1, converts: bool = False,
) -> Panels:  # fmt: skip
    """Return whether to gather rows of B from panels.

    m, n, nnz, feat : rows of A and of B, nonzeros, features
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
    times where it misses 40 % and more.) Fewer nonzeros a column are enough if rows of B come from
    beyond the L3 cache (random graphs of 16 to a row on Zen 5 1.4 to 2.2 times, of 8 on Zen 3 1.2
    to 1.5), or if long rows miss the L2 cache, or the L1 cache where it holds rows of panels or B
    is large. (One thread, random graphs, bands and communities of 11 to 28 to a row: Zen 5, 512
    features, 0.93 to 1.6 times; with 128 and 256, bands 0.76 to 0.9 if B begins at a cache line.
    Zen 3, whose L2 cache is half as large, 256 and 512 features, 1.0 to 2.2 times, once 0.8; with
    128 0.75 to 1.3.) A row that is one wide panel is only copied to two narrow ones if the L3 cache
    holds one and not B (Zen 5, 64 features, 100,000 rows: 1.3 to 1.7; else whole rows, which are
    prefetched, take 0.8 to 1.05 of the time). For rows of 3 and 4 elements whole rows take 0.55 to
    1.0 of the time (Zen 3, 64 to 512 features), as each panel visits all rows of the result.
    """
    row, (narrow, wide) = feat * size, tiles
    often, often_if_long, often_if_far = (
        nnz >= n * (copies * x) for x in (PACK_DEGREE, PACK_DEGREE_LONG, PACK_DEGREE_FAR)
    )
    share = share_of_l3()
    narrow_fits, fits = (n * x <= l3_bytes() // 2 for x in tiles)
    narrow_far, far = (misses(x, l1_bytes(), MISSED) for x in tiles)
    only_narrow_near = every(no(narrow_far), far, n * wide > l2_bytes())
    some_miss, half_miss = (converts or misses(row, l1_bytes(), x) for x in (MISSED, HALF))
    near = every(no(far), half_miss, n * row <= l3_bytes())
    large = every(half_miss, n * row > share)
    long = every(row >= long_row(), some(near, misses(row, l2_bytes(), MOST), large))
    half_beyond, beyond = (misses(row, share, x) for x in (HALF, NEARLY_ALL))
    pay = some(
        every(often, some_miss),
        every(often_if_long, some(long, half_beyond)),
        every(often_if_far, beyond),
    )
    kept = some(every(narrow_fits, no(fits)), every(only_narrow_near, half_miss))
    several = some(converts, row > wide)
    at_least = every(row >= wide, often, kept)
    return Panels(
        every(some(converts, nnz >= m * LENGTH), some(every(several, pay), at_least)),
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
