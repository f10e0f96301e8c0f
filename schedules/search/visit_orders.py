"""Rules for visiting rows of a matrix in another order, from measurements."""

from __future__ import annotations

from typing import Any

from sparsetir.schedules.registers import feature_tile, tasks
from sparsetir.schedules.search.shared_columns import stays_near
from sparsetir.schedules.targets import l2_bytes
from sparsetir.schedules.templates.row_tile import ROWS_UNPACKED, RowTile

# The least rows for which no branch predictor remembers their lengths, and the greatest length for
# which the end of a row takes a good part of its time.
ROWS, LENGTH = 8192, 6
# The most vectors per tile for which sorted rows pay, and rows that are sorted together.
NARROW, WINDOW = 2, 4096

# The least elements per row for row panels of four, five and six rows, else three: by name for CPUs
# that were measured with larger ones, and for others.
ELEMENTS = {"znver5": (64, 100, 200)}
ELEMENTS_ELSEWHERE = (64, 400)
# The vectors per tile of row panels, and the most rows of those whose tiles have fewer.
VECTORS, MOST_ROWS_NARROW = 4, 5
# Bytes per element and column.
PLACE = 8
# The least reads of each row of B for which its copy takes negligible time.
USES = 8


def sorting_pays(m: int, n: int, nnz: int, feat: int, bytes: int, lanes: int) -> bool:
    """Whether rows by length are faster than rows as stored: many short ones, few features.

    Measured on Zen 5 (AVX-512, one thread, float32), PubMed and generated graphs of 20,000 rows
    with 2 to 8 elements on average, consecutive calls: 1.9 to 3.1 times as fast with 8 features,
    1.8 to 2.4 with 16, 1.4 to 1.9 with 32, for packed values; 1.3 to 2.9 for others. In turns with
    other matrices 1.0 to 1.3 with 32. With 64 features and more, or 16 elements per row, it gains
    nothing; up to 4,000 rows it takes up to a tenth longer, as the branch predictor learns the ends
    of rows that it has seen a few times; and so it does on 325,729 rows, whose B is larger than the
    caches.
    """
    near = stays_near(n, feat * bytes)
    return m >= ROWS and near and 0 < nnz <= LENGTH * m and feat <= NARROW * lanes


def row_panels_pay(m: int, n: int, nnz: int, feat: int, lanes: int, cpu: str = "") -> bool:
    """Whether row panels are faster than single rows: if patterns have enough entries.

    Measured on Cascade Lake (AVX-512, one thread, float32), 64 x 256 to 2048 x 512 and 512 x 2048
    with 50 to 90 % zeros, 32, 128 and 512 features, against row blocks:

    - a quarter stored and more: 1.1 to 1.6 times as fast from rows of 16 elements on
    - 15 %: 1.1 to 1.3 times from 40 elements on with few features; with many from 64 on, or 128
      if the matrix, read once per tile, is larger than the L2 cache
    - 8 %: 1.15 times from 128 elements on; with few features and fewer elements 0.91 to 0.92 times
      on Zen 5, where row blocks have the number of features compiled in
    - less: up to 1.25 times as slow, as nearly all patterns have a single row

    Values passed in each call, which are read by position (`packed=False`), against rows with
    values as stored, on Zen 5 (AVX-512, one thread, float32), DLMC's layers, 32, 128 and 512
    features: 1.2 to 2.5 times as fast with 50 and 60 % zeros, 1.33 with 70 %, 1.09 with 80 %;
    panels of three rows 0.86 to 0.97 times. Reordering values in each call takes 0.4 ns an element,
    where the product takes 0.5 with 32 features; reading positions takes 0.07.

    On Zen 5 a matrix larger than the L2 cache gains with 20 % stored from 100 elements on.

    cpu : its name in LLVM
    """
    if min(m, n, nnz) <= 0 or feat < 2 * lanes or nnz < USES * n:
        return False
    stored, length, few = nnz / (m * n), nnz / m, feat <= 4 * lanes
    many = 64 if nnz * PLACE <= l2_bytes() else 100 if cpu in ELEMENTS else 128
    for share, least in ((0.25, 16), (0.15, 40 if few else many), (0.08, 128)):
        if stored >= share:
            return length >= least
    return False


def row_panels(
    stats: Any, lanes: int, sums: int, summed: int, parallel: bool, cpu: str = "",
    sharing: bool = False,
) -> RowTile:  # fmt: skip
    """Panels for a pattern, with as many accumulator vectors as there are registers for.

    stats : :class:`sparsetir.schedules.search.choose.Statistics`
    sums : accumulator vectors that registers hold
    summed : bytes per accumulator
    cpu : its name in LLVM
    sharing : whether rows share columns: then there are four, for values of each call, too

    A tile has four vectors up to four times the L2 cache. (Zen 5, one thread, 64 to 512 features,
    rows that share columns: up to 1.26 times as fast as two vectors, at worst 0.92.)

    More rows are more loops, 15 for four, 31 for five and 63 for six, of fewer visits each. Zen 5
    takes 1.05 to 1.2 times less time for five or six than for four if a tile has four vectors
    (one thread, float32, 50 to 80 % zeros, panels of 512 and 2048 columns), and 1.03 to 1.16 times
    less for five if it has fewer (32 to 48 features, 100 elements a row and more, also for values
    that are read by position, where six rows of 256 elements take up to 1.13 times as long as
    four). B is always copied, a panel that stays in the L2 cache: a single tile takes at most 4 %
    longer for it if vectors of B begin at cache lines, and 20 to 50 % less if they do not, as in
    most NumPy arrays.

    With 16 registers, three rows: with two vectors for four rows the matrix is visited twice as
    often, which takes 1.2 to 1.3 times as long. (AVX2 on Zen 5, one thread, DLMC's
    layers with 50 to 80 % zeros, 32 to 512 features: 1.09 to 1.24 times as fast as row blocks.)
    """
    vectors = VECTORS
    if not stays_near(stats.n, vectors * lanes * summed):
        vectors = max(1, vectors // 2)
    tile = feature_tile(stats.feat, lanes, vectors)
    elements = ELEMENTS.get(cpu, ELEMENTS_ELSEWHERE)
    rows = 3 + sum(stats.nnz >= stats.m * least for least in elements)
    rows = rows if tile.tile >= VECTORS * tile.lanes else min(rows, MOST_ROWS_NARROW)
    rows = max(rows, ROWS_UNPACKED) if sharing else rows
    rows = min(rows, 3) if sums < 4 * VECTORS else rows
    tiles = -(-stats.feat // tile.tile)
    blocks = tasks(stats.threads, tiles) if parallel else 1
    return RowTile(*tile, pack=True, blocks=blocks, parallel=parallel, rows=rows)
