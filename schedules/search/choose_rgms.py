"""The config that a relational gather-matmul-scatter gets by its sizes."""

from __future__ import annotations

from typing import Any

from sparsetir.schedules.default import l2_bytes, vector_bits
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.versions import WORK_OF_THREADS

# Vectors of sums that stay in registers, of 32 as AVX-512 has, and of 16.
SUMS, FEW_SUMS = 24, 12
# Matrices that are larger than the pages that a CPU has at hand are packed, for so many rows each.
PACKED_BYTES, PACKED_ROWS = 192 << 10, 256
AHEAD = 12

__all__ = ["choose_rgms"]


def choose_rgms(
    problem: Rgms, nnz_rows: int, feat_in: int, feat: int, target: Any, threads: int = 1,
    relations: int = 1,
) -> TiledRelations:  # fmt: skip
    """A config for a CPU.

    nnz_rows : rows of all relations that are not empty
    threads : of the CPU
    relations : that have these rows
    """
    size = 8 if problem.accumulator == "float64" else 4
    lanes = vector_bits(target) // (8 * size)
    packed = feat_in * feat * size >= PACKED_BYTES and nnz_rows >= PACKED_ROWS * relations
    parallel = threads > 1 and nnz_rows * feat_in * feat >= WORK_OF_THREADS
    return TiledRelations.for_sizes(
        feat_in, feat, lanes, SUMS if vector_bits(target) >= 512 else FEW_SUMS,
        cache=l2_bytes(), threads=threads if parallel else 1, parallel=parallel, packed=packed,
        ahead=AHEAD,
    )  # fmt: skip
