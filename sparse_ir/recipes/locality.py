"""The recipe of the reuse distance of gathered rows, one number per pattern."""

from __future__ import annotations

import numpy as np

from sparsetir.sparse_ir.recipes.registry import recipe

# Places where nonzeros are sampled; the shortest and the longest sample of one, and the largest
# share of all nonzeros that a sample may have.
PLACES, SHORTEST, LONGEST, SAMPLE = 3, 512, 1 << 14, 1 / 8
FEW = 1 << 15  # nonzeros; with fewer, samples are too short to rule out reuse
MISSED = 5 / 16  # share of uses that a cache of as many rows as the reuse distance still misses


@recipe(open=True, unknown=2**62)
def reuse_distance(indices: np.ndarray) -> int:
    """The number of distinct rows between uses of a row, exceeded by a third of uses at most.

    indices : (nnz,) rows, in the order of use

    By the working set of Denning (1968): a cache that holds the rows of a window misses as large a
    share of uses as doubling the window adds rows. Windows at three places are doubled until they
    add few. If the longest window still adds many, the result is nnz, or nnz / 8 below 32,768
    nonzeros.
    """
    indices = indices.ravel()
    nnz = len(indices)
    places = [nnz * n // (PLACES + 1) for n in range(1, PLACES + 1)]
    window, before = SHORTEST, 0
    while window <= min(nnz * SAMPLE, LONGEST):
        used = (np.sort(indices[at : at + window]) for at in places)
        rows = sum(1 + int(np.count_nonzero(row[1:] != row[:-1])) for row in used)
        if before and rows - before < MISSED * PLACES * window / 2:
            return before // PLACES
        window, before = 2 * window, rows
    return nnz // 8 if nnz < FEW else nnz
