"""Sums over the elements of rows, with rows in slices where that pays.

Like :func:`sparsetir.plan` of "spmv": the values of slices are packed, which takes longer than the
sum. So it suits values that rarely change, with many elements in short rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import ir

from sparsetir.runtime import pool
from sparsetir.schedules.multiversion import WORK_OF_THREADS
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.targets import l2_bytes, resolve_target, vector_bits
from sparsetir.schedules.templates.register_tile import packed_values
from sparsetir.schedules.templates.shapes import ShapeError, row_sum
from sparsetir.schedules.templates.spmv import SlicedRows, arrange
from sparsetir.sparse_ir.nodes import SparseFunc, nodes_of, sparse_iterations
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.schedule import Schedule

DTYPES = ("float32", "float64")
LEAST = 1 << 14  # elements
LONG = 32  # elements of an average row, from which summing along rows is as fast
MOST_CHANGES = 3  # changes of values, after which they are no longer packed


def is_row_sum(func: SparseFunc) -> bool:
    """Whether a program is a row sum of products with a CSR matrix, such as SpMV, with at most
    iterations over dense axes besides, such as a bias."""
    sch = Schedule(func)
    try:
        rows = row_sum(sch, "einsum")
    except ShapeError:
        return False
    (it,) = [it for it in sparse_iterations(func) if it.name == rows.rows.iteration]
    _, columns = it.axes
    reduction = reduction_of(it.body)
    return (
        columns.kind == "sparse_variable"
        and columns.unique
        and len(packed_values(sch, rows)) == 1
        and reduction is not None
        and reduction.operator == "sum"
        and not reduction.conditions
        and not nodes_of(ir.Call, it.body)
    )


def slices_of(
    ptr: np.ndarray | None, idx: np.ndarray | None, shape: tuple[int, ...], dtype: str
) -> tuple[SlicedRows, Mapping[str, int]] | None:
    """The config of slices for a result of this shape, and its overrides; None if none pays."""
    if ptr is None or idx is None or dtype not in DTYPES or shape != (len(ptr) - 1,):
        return None
    (m,) = shape
    if not LEAST <= len(idx) < LONG * m:
        return None
    problem = Spmm(dtype, ptr.dtype.name)
    config = SlicedRows.for_pattern(
        problem, m, len(idx), threads=pool.count(), work_of_threads=WORK_OF_THREADS,
        vector_bits=vector_bits(resolve_target("llvm")), cache=l2_bytes(),
    )  # fmt: skip
    return config, arrange(CsrPattern(ptr, idx, (m, 0)), problem, config).overrides
