"""The config that a relational gather-matmul-scatter gets by its sizes, and which sizes it has."""

from __future__ import annotations

from typing import Any

from tvm import DataType

from sparsetir.schedules.default import is_gpu, l2_bytes, vector_bits
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.templates.rgms import TiledRelations
from sparsetir.schedules.versions import WORK_OF_THREADS

# Vectors of sums that stay in registers, of 32 as AVX-512 has, and of 16.
SUMS, FEW_SUMS = 24, 12
GPU_BYTES = 16  # of a vector
# Matrices that are larger than the pages that a CPU has at hand are packed, for so many rows each.
PACKED_BYTES, PACKED_ROWS = 192 << 10, 256
AHEAD = 12

__all__ = ["choose_rgms", "lanes_of", "whole_vectors"]


def lanes_of(problem: Rgms, target: Any) -> int:
    """Numbers in a vector: on a CPU of sums, on a GPU of what is loaded."""
    if is_gpu(target):
        return GPU_BYTES // DataType(problem.dtype).itemsize
    return vector_bits(target) // (64 if problem.accumulator == "float64" else 32)


def whole_vectors(problem: Rgms, feat: int, target: Any) -> int:
    """A number of features with those that fill vectors, or a power of two where these are few."""
    lanes = lanes_of(problem, target)
    return -(-feat // lanes) * lanes if feat > lanes else 1 << max(feat - 1, 0).bit_length()


def choose_rgms(
    problem: Rgms, nnz_rows: int, feat_in: int, feat: int, target: Any, threads: int = 1,
    relations: int = 1,
) -> TiledRelations:  # fmt: skip
    """A config for a CPU.

    nnz_rows : rows of all relations that are not empty
    threads : of the CPU
    relations : that have these rows
    """
    lanes = lanes_of(problem, target)
    size = DataType(problem.accumulator).itemsize
    packed = feat_in * feat * size >= PACKED_BYTES and nnz_rows >= PACKED_ROWS * relations
    parallel = threads > 1 and nnz_rows * feat_in * feat >= WORK_OF_THREADS
    return TiledRelations.for_sizes(
        feat_in, feat, lanes, SUMS if vector_bits(target) >= 512 else FEW_SUMS,
        cache=l2_bytes(), threads=threads if parallel else 1, parallel=parallel, packed=packed,
        ahead=AHEAD,
    )  # fmt: skip
