"""The template and the config that a problem gets unless the caller names one.

Rules of thumb, those for CPUs from measurements; each function gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetir.formats import BSR, DBSR
from sparsetir.schedules.multiversion import WORK_OF_THREADS
from sparsetir.schedules.operators.problems import Product, Spmm, unsupported, vector_lanes
from sparsetir.schedules.panels import (
    MISSED,
    PACK_DEGREE_LONG,
    long_row,
    panel_bytes,
    panels,
    share_of_l3,
)
from sparsetir.schedules.registers import feature_tile, sum_vectors, tasks
from sparsetir.schedules.search.locality import Locality
from sparsetir.schedules.search.shared_columns import SHARED, stays_near
from sparsetir.schedules.search.visit_orders import (
    VECTORS,
    WINDOW,
    row_panels,
    row_panels_pay,
    sorting_pays,
)
from sparsetir.schedules.targets import cpu_name, is_gpu, l1_bytes, l2_bytes, vector_registers
from sparsetir.schedules.templates.registry import templates_for
from sparsetir.schedules.templates.row_tile import ROWS_UNPACKED, RowTile
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmv import SlicedRows
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.recipes.locality import MISSED as FAR

# Elements ahead that are prefetched, at most and at least, and bytes of rows of B.
PREFETCH, PREFETCH_LEAST, PREFETCHED = 16, 8, 8192
# The least reads of each row of B by rows of blocks for which copying its tile pays.
BLOCK_USES = 3
# The least elements per row, and vectors of a tile, for which tiles may take turns without a copy.
LENGTH_IN_TURN, VECTORS_IN_TURN = 8, 16
# Bytes of a row of B in a copied tile, if rows reused soon are in the L1 cache or all of it is in
# the L2 cache; else half of that: two cache lines.
NARROW = 256
# The least multiplications for which a search does not try one of several threads.
SERIAL_WORK = 1 << 24


@dataclass(frozen=True)
class Statistics:
    """Numbers of a matrix by which a config is chosen.

    m, n, nnz : sizes of the pattern
    feat : features
    threads : of the CPU
    bytes : per element of B
    longest : elements of the longest row; only used for GPUs
    block : size of the square blocks that make up the pattern, all full; 1 if there are none.
        Used for CPUs, and on GPUs for 16-bit types
    work_of_threads : the least multiplications for which a CPU's other threads are woken
    locality : which rows of B are still in a cache when they are reused; None for all or none,
        if B fits or does not. See :meth:`asks_for_locality`
    shared : nonzeros per distinct column of four neighbouring rows, of long rows; 1 if unknown
    diagonals : whether many nonzeros are in slices of diagonals; only used for one feature
    """

    m: int
    n: int
    nnz: int
    feat: int
    threads: int = 1
    bytes: int = 4
    longest: int = 0
    block: int = 1
    work_of_threads: int = WORK_OF_THREADS
    locality: Locality | None = None
    shared: float = 1.0
    diagonals: bool = False

    @property
    def asks_for_locality(self) -> bool:
        """Whether a CPU's config may depend on it.

        Not if rows of B are used so seldom that their first uses alone are too many misses.
        """
        whole = self.n * self.feat * self.bytes
        again, often = (self.nnz * share > self.n for share in (MISSED, 1 / PACK_DEGREE_LONG))
        return (again and whole > l2_bytes()) or (often and whole > l1_bytes())

    def missed(self, row: int, cache: int) -> float:
        """The share of nonzeros whose row of B, of `row` bytes, misses a cache of `cache` bytes."""
        if self.n * row <= cache:
            return 0.0
        return 1.0 if self.locality is None else self.locality.missed(cache // row)

    def misses(self, row: int, cache: int, share: float) -> bool:
        """Whether at least a share of the nonzeros' rows of B, of `row` bytes, misses a cache."""
        return self.missed(row, cache) >= share

    @property
    def rounded(self) -> Statistics:
        """Statistics of a pattern with similar sizes, each up to an eighth smaller."""
        m, n, nnz = (x >> max(0, x.bit_length() - 4) << max(0, x.bit_length() - 4)
                     for x in (self.m, self.n, self.nnz))  # fmt: skip
        return replace(self, m=m, n=n, nnz=nnz)

    @property
    def parallel(self) -> bool:
        """Whether to wake the other threads of a CPU."""
        return self.threads > 1 and self.nnz * self.feat >= self.work_of_threads

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks of rows per thread that a search tries; 0 for a kernel on one thread."""
        several = () if self.threads == 1 else (1, 4)
        serial = not several or self.nnz * self.feat < SERIAL_WORK
        return (0, *several) if serial else several

    @property
    def ahead(self) -> int:
        """Elements that a thread processes while it wakes others, so that waking pays from
        `work_of_threads` on, as long as that work takes less time on all of them."""
        return int(self.work_of_threads * (1 - 1 / self.threads) / self.feat)


def choose(problem: Any, stats: Statistics, target: Any) -> Any:
    """A config for a problem, a pattern and a target."""
    return candidates(problem, stats, target)[0]


def candidates(problem: Any, stats: Statistics, target: Any) -> Sequence[Any]:
    """Configs worth measuring, the default first.

    Raises ScheduleError for an operator without templates that propose any.
    """
    gpu = is_gpu(target)
    if isinstance(problem, Spmm) and not gpu:
        return _spmm_cpu(problem, stats, target)
    for template in templates_for(problem, gpu):
        if template.candidates is not None:
            return template.candidates(problem, stats, target)
    raise ScheduleError(
        f"plan: argument 'config': expected one for {type(problem).__name__}, as no template "
        "chooses one"
    )


def _spmm_cpu(problem: Spmm, stats: Statistics, target: Any) -> list[Any]:
    """Full blocks, if the matrix consists of them (see :func:`block_rows`); else row blocks.

    Row panels by pattern for pruned weights, if :func:`row_panels_pay` says so, and for rows that
    share columns (see :mod:`sparsetir.schedules.row_orders`; here, with values in the order of
    visits, 0.6 to 0.85 of the time of rows for the same matrices, with 64 features up to 1.02).

    Row blocks use panels of B if :func:`~sparsetir.schedules.panels.panels` says so.

    Otherwise a row of B is gathered in one go, all tiles of it, which saves TLB misses: a panel
    brings distant rows together. If B is larger than the L2 cache and a tile of it is not, tiles
    take turns without a copy, too. (Zen 5, one thread, 512 columns, rows of 25 and of 10 elements:
    1.2 to 1.38 times as fast with 768 and 1024 features; not with the narrow tiles of AVX2, which
    take 1.0 to 1.5 times as long on Zen 3.) Prefetching costs as many instructions as adding two
    vectors, so it is omitted if gathered rows are in the L2 cache anyway; and for more than long
    rows in the L3 cache (Zen 3, 512 features: 1.03 to 1.4 times as fast without).

    A number of features that is one tile is compiled in: rows of B are then found by a shift, and
    no loop over tiles is left. (Zen 5, one thread, rows of 4 to 26 elements: 1.07 to 1.6 times as
    fast up to 32 features, 1.01 to 1.1 with 128. More tiles gain little, and share a kernel.)

    A tile is as wide as registers allow: each element's column and value is loaded once for all of
    its vectors. (Zen 5, one thread, 144 to 1024 features: 16 vectors take 1.01 to 1.2 times less
    time than 8, on graphs and on pruned weights with 95 and 98 % zeros.)
    """
    summed = np.dtype(problem.accumulator).itemsize
    bits, registers = vector_registers(target)
    lanes, most = vector_lanes(problem, bits), sum_vectors(registers)
    parallel = stats.parallel
    half = stats.bytes < summed  # panels save repeated conversion to the larger type
    tiles = panel_bytes(bits, half)
    few, many = (size // (lanes * summed) for size in tiles)
    ways = ((most, False), (4, False), (many, True), (few, True), (8, True), (8, False))
    configs = []
    for vectors, pack in ways:
        config = RowTile(*feature_tile(stats.feat, lanes, vectors), pack=pack)
        if config.tile == stats.feat:
            config = replace(config, feat=stats.feat)
        panel_b = stats.n * config.tile * stats.bytes  # bytes of B per tile
        reads = stats.nnz >= LENGTH_IN_TURN * stats.m and most >= VECTORS_IN_TURN
        misses = stats.missed(stats.feat * stats.bytes, l2_bytes()) >= MISSED
        in_turn = pack or (reads and config.tile < stats.feat and panel_b <= l2_bytes() and misses)
        config = replace(config, tiles_first=in_turn)
        turns = -(-stats.feat // config.tile) if in_turn else 1
        read = config.tile if in_turn else stats.feat  # elements of a row, before the next one
        row = read * (summed if pack else stats.bytes)
        in_l3 = row > long_row() and stats.n * row <= share_of_l3()
        far = stats.missed(row, l2_bytes()) >= FAR and config.tile >= 4 * lanes and not in_l3
        prefetch = min(PREFETCH, max(PREFETCH_LEAST, PREFETCHED // row)) if far else 0
        blocks = tasks(stats.threads, turns)
        ahead = stats.ahead if parallel and turns == 1 else 0
        config = replace(config, blocks=blocks, prefetch=prefetch, ahead=ahead)
        configs.append(config if parallel else replace(config, blocks=1, parallel=False))
    narrow, narrowest = configs[2:4]
    sizes = (stats.m, max(1, stats.n), stats.nnz, stats.feat, stats.bytes)
    pay, wide = panels(
        *sizes, stats.misses, tiles, narrow.blocks, half and stats.feat > lanes,
    )  # fmt: skip
    if pay:
        configs.insert(0, narrow if wide else narrowest)
    for config in (narrow, narrowest):
        if (config.feat or 0) % config.tile == 0:
            configs.append(replace(config, parts=4, prefetch=0))
    sizes = (stats.m, stats.n, stats.nnz, stats.feat)
    cpu, plain = cpu_name(target), unsupported(problem) is None
    if sorting_pays(*sizes, stats.bytes, lanes):
        configs.insert(0, by_length(configs[0], stats))
    tile = min(VECTORS * lanes, stats.feat)
    sharing = stats.shared >= SHARED and not half and stats.feat >= 2 * lanes
    # Registers hold the sums of four rows for four vectors, or there is one tile of two.
    sharing = sharing and (most >= ROWS_UNPACKED * VECTORS or stats.feat <= 2 * lanes)
    sharing = sharing and stays_near(stats.n, tile * summed)
    if plain and (sharing or row_panels_pay(*sizes, lanes, cpu)):
        configs.insert(0, row_panels(stats, lanes, most, summed, parallel, cpu, sharing))
    if 1 < stats.block and lanes <= stats.feat and plain:
        fmt = BSR(stats.block, stats.block)
        configs.insert(0, block_rows(problem, stats, fmt, True, target))
    if stats.feat == 1 and plain:
        sliced = SlicedRows.for_pattern(
            problem, stats.m, stats.nnz, threads=stats.threads,
            work_of_threads=stats.work_of_threads, vector_bits=bits,
            cache=l2_bytes(), diagonals=stats.diagonals,
        )  # fmt: skip
        configs.insert(0, sliced)
    return list(dict.fromkeys(configs))


def by_length(rows: RowTile, stats: Statistics) -> RowTile:
    """The same tiles, with rows in the order of their lengths."""
    blocks, ahead = (stats.threads, stats.ahead) if stats.parallel else (1, 0)
    return replace(
        rows, pack=False, tiles_first=False, prefetch=0, blocks=blocks, ahead=ahead, window=WINDOW
    )


def block_rows(
    problem: Product, stats: Statistics, fmt: BSR | DBSR, filled: bool, target: Any
) -> BlockRows:
    """Blocks of a CPU kernel, with as many accumulators as the vector registers hold.

    Measured on Cascade Lake (AVX-512, one thread), pruned weights of 768 x 768, 3072 x 768 and
    768 x 3072 with 5 to 30 % of the blocks, 128 and 512 features, against row blocks of CSR:

    - full blocks of 4 x 4 to 32 x 32 take 0.35 to 0.85 of the time, in bfloat16 0.3 to 0.85;
      2 x 2 and 3 x 3 0.65 to 0.85, 1 x 8 0.9
    - with masks they take 1.2 to 1.3 times as long if 1 % of the places is empty, 1.7 if 10 % are:
      only full blocks are considered
    - a copy of B's tile takes 0.6 to 0.95 of the time if each of its rows is read 3 times or more,
      and up to twice the time if it is read once; 16-bit types always have one, which saves
      converting them to float32 at each use
    """
    bits, registers = vector_registers(target)
    summed = np.dtype(problem.accumulator).itemsize
    lanes, most = vector_lanes(problem, bits), sum_vectors(registers)
    uses = stats.nnz / max(1, stats.n * fmt.rows)
    pack = stats.bytes < summed or uses >= BLOCK_USES
    fits = stats.n * 4 * lanes * summed <= l2_bytes() // 2
    wide = not pack or fits or stats.bytes < summed
    narrow = NARROW if wide else NARROW // 2
    tiles = feature_tile(stats.feat, lanes, min(4, narrow // (lanes * summed)))
    vectors = -(-tiles.tile // tiles.lanes)
    rows = next(r for r in range(min(most, fmt.rows), 0, -1) if _fits(r, vectors, most, fmt.rows))
    parallel = stats.parallel
    parts = tasks(stats.threads, -(-stats.feat // tiles.tile))
    blocks = parts if parallel and isinstance(fmt, BSR) else 1
    return BlockRows(fmt, rows, *tiles, filled, pack, blocks, parallel)


def _fits(rows: int, vectors: int, most: int, block: int) -> bool:
    """Whether rows divide a block, and their sums, or those of one row, fit the registers."""
    return block % rows == 0 and (rows == 1 or rows * vectors <= most)
