"""The config that a relational gather-matmul-scatter gets by its sizes."""

from __future__ import annotations

from typing import Any

from sparsetir.schedules.default import l2_bytes, vector_bits
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.versions import WORK_OF_THREADS

# Vectors of sums that stay in registers, of 32 as AVX-512 has, and of 16.
SUMS, FEW_SUMS = 24, 12

__all__ = ["choose_rgms"]


def choose_rgms(
    problem: Rgms, nnz_rows: int, feat_in: int, feat: int, target: Any, threads: int = 1
) -> TiledRelations:
    """A config for a CPU.

    nnz_rows : rows of all relations that are not empty
    threads : of the CPU
    """
    lanes = vector_bits(target) // (64 if problem.accumulator == "float64" else 32)
    parallel = threads > 1 and nnz_rows * feat_in * feat >= WORK_OF_THREADS
    return TiledRelations.for_sizes(
        feat_in, feat, lanes, SUMS if vector_bits(target) >= 512 else FEW_SUMS,
        cache=l2_bytes(), threads=threads if parallel else 1, parallel=parallel,
    )  # fmt: skip
