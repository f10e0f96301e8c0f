"""The config of a relational gather-matmul-scatter by its sizes, and its order of operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tvm import DataType

from sparsetir.schedules.multiversion import WORK_OF_THREADS
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.registers import most_sum_vectors
from sparsetir.schedules.targets import is_gpu, l2_bytes, vector_bits, vector_registers
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates.rgms import TiledRelations

VECTORS = (1, 2, 4)  # per tile of features, tried by a search
CACHES = (0.5, 1, 2)  # shares of the cache that rows of the result may use
GPU_BYTES = 16  # per vector
# Matrices larger than a CPU's TLB covers are packed, if relations have at least this many rows.
PACKED_BYTES, PACKED_ROWS = 192 << 10, 256
AHEAD = 12

# Costs of steps on a CPU, in units of adding a gathered feature (0.3 ns, measured with AVX-512): a
# multiplication of a product of rows with matrices, and besides its features an element, a row of
# products, two more kernels (and the loss of the remaining relations), and a row of their result.
PRODUCT, ELEMENT, ROW, KERNELS, RESULT_ROW = 0.1, 10, 80, 4_000_000, 15
# The factor by which the other order must be slower: products need memory, too.
LONGER = 1.5
# The most rows of products per row of X or Y: their memory is bounded by nodes, not edges.
MOST_PRODUCTS = 4


class RelationSizes(NamedTuple):
    """Sizes of relations, (relations,): edges, nonempty rows, and distinct columns."""

    edges: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


def lanes_of(problem: Rgms, target: Any) -> int:
    """Numbers per vector: on a CPU of accumulators, on a GPU of loads."""
    if is_gpu(target):
        return GPU_BYTES // DataType(problem.dtype).itemsize
    return vector_bits(target) // (64 if problem.accumulator == "float64" else 32)


def whole_vectors(problem: Rgms, feat: int, target: Any) -> int:
    """A number of features rounded up to whole vectors, or to a power of two if there are few."""
    lanes = lanes_of(problem, target)
    return -(-feat // lanes) * lanes if feat > lanes else 1 << max(feat - 1, 0).bit_length()


def choose_rgms(
    problem: Rgms, nnz_rows: int, feat_in: int, feat: int, target: Any, threads: int = 1,
    relations: int = 1, blocks: int = 1, work_of_threads: int = WORK_OF_THREADS,
) -> TiledRelations:  # fmt: skip
    """A config for a CPU.

    nnz_rows : nonempty rows of all relations
    threads : of the CPU
    relations : the number of relations with these rows
    blocks : of features, each of `feat_in` and `feat`
    work_of_threads : the least multiplications of products for which other threads are woken
    """
    size = 8 if problem.accumulator == "float64" else 4
    packed = feat_in * feat * size >= PACKED_BYTES and nnz_rows >= PACKED_ROWS * relations
    parallel = threads > 1 and nnz_rows * feat_in * feat * blocks >= work_of_threads
    return TiledRelations.for_sizes(
        feat_in, feat, lanes_of(problem, target),
        most_sum_vectors(vector_registers(target)[1]), cache=l2_bytes(),
        threads=threads if parallel else 1, parallel=parallel, packed=packed and blocks == 1,
        ahead=AHEAD, blocks=blocks,
    )  # fmt: skip


def tried(problem: Rgms, nnz_rows: int, feat_in: int, feat: int, **options: Any) -> Branch:
    """The values that a search tries for each field, those of the chosen config first.

    The search covers rows, tile, cost, cache, prefetch, ahead, packed and, for several threads,
    whether to use them (`parallel`, which follows from it); the other fields have one value.
    Arguments as for :func:`choose_rgms`.
    """
    config = choose_rgms(problem, nnz_rows, feat_in, feat, **options)
    choices = config.tries(
        tile=[n * config.lanes for n in VECTORS if feat % (n * config.lanes) == 0],
        cache=[int(config.cache * part) for part in CACHES],
        threads=[1, options.get("threads", 1)],
    )
    del choices["parallel"]
    return Branch("schedule", choices, config_of)


def config_of(**choices: Any) -> TiledRelations:
    """The config of some values for the fields of :func:`tried`."""
    return TiledRelations(**choices, parallel=choices["threads"] > 1)


def products_first(
    sizes: RelationSizes, m: int, n: int, feat_in: int, feat: int, blocks: int = 1
) -> np.ndarray | None:
    """(relations,) whether rows of X should be multiplied by W[r] before they are summed.

    Sums first costs, for a relation, `rows` products and `feat_in` features per edge. Products
    first costs `columns` products, which are written, and `feat` features per edge: less if many
    edges share a column, as with attributes of few values, and if there are many edges and fewer
    features after than before.

    Returns None if nothing is gained. Products number at most four times the rows of X or of Y,
    whichever are more, and half of the edges; if more would pay, the relations with the largest
    gain per product are taken.

    m, n : the numbers of rows and columns
    feat_in, feat : features of X and Y, of all blocks
    blocks : of features, each multiplied by its own matrix
    """
    edges, rows, columns = (x.astype(float) for x in sizes)
    product = PRODUCT * feat_in * feat / blocks + ROW * blocks
    before = edges * (ELEMENT + feat_in) + rows * (product + feat)
    after = edges * (ELEMENT + feat) + columns * (product + ELEMENT + feat_in + 2 * feat)
    gain = before - after
    order = np.argsort(-gain / np.maximum(columns, 1), kind="stable")
    order = order[(before > LONGER * after)[order] & (2 * columns[order] <= edges[order])]
    order = order[np.cumsum(columns[order]) <= MOST_PRODUCTS * max(m, n)]
    if gain[order].sum() <= KERNELS + m * (RESULT_ROW + feat):
        return None
    first = np.zeros(len(edges), bool)
    first[order] = True
    return first
