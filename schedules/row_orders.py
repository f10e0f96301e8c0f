"""Orders of rows in the default schedule, for the patterns that they suit.

Only a pattern tells whether another order than that of the matrix pays: a kernel of the default
schedule measures new index arrays, and a kernel in another order is compiled when a pattern first
needs it. Values are read by their positions.

**Panels of rows that share columns.** Rows of finite elements, of Jacobians and of some pruned
weights have columns in common: in panels of a few rows, a row of B is loaded once for all of those
that have its column (:mod:`sparsetir.sparse_ir.schedule.group_columns_by_pattern`).

Zen 5, one thread, float32, the mean of times with 32 to 512 features beside the default's
rows: structural matrices (bcsstk13, 14, 16) 0.74, Jacobians and finite elements with a few unknowns
a node 0.70, groebner_id2003_aug 0.64, mbeacxc 0.68, a pruned weight that keeps the same columns in
eight rows 0.55. Below the bounds of :mod:`sparsetir.schedules.search.shared_columns`: random ones
with 30 % stored 0.78 to 1.03, with 20 % up to 1.06, rows of 20 elements up to 1.4. Tiles of two
vectors pay alone: several take up to twice as long. With 16 registers of 256 bits there is no room
for more than two: 0.60 to 0.78 with 16 features, 0.9 to 1.3 with more.

**Rows by length**, where many are short and features few
(:func:`sparsetir.schedules.search.visit_orders.sorting_pays`): the mispredicted end of a row takes
as long as its elements. Zen 5, one thread, float32, graphs of 20,000 to 60,000 rows with 2 to 6
elements on average: with 4 and 8 features 0.35 to 0.75 of the time, with 16 0.43 to 0.8, with 32
0.65 to 1.0; with 100,000 rows of 4, whose values are larger than the caches, 1.2 to 1.35. Sums
without features are in slices (:class:`sparsetir.schedules.templates.spmv.SlicedRows`): 0.4 to 0.6
of the time on graphs of 20,000 to 300,000 rows, 0.8 to 1.1 if nearly all rows are equally long,
0.55 to 0.8 on stencils, whose slices are of diagonals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import ir, tirx

from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.registers import feature_tile, sum_vectors, tasks
from sparsetir.schedules.search.program_space import RowTileOfAnySize
from sparsetir.schedules.search.shared_columns import (
    SHARED,
    long_rows,
    on_diagonals,
    shared_columns,
    stays_near,
)
from sparsetir.schedules.search.visit_orders import NARROW, VECTORS, WINDOW, sorting_pays
from sparsetir.schedules.targets import l2_bytes, pool, vector_registers
from sparsetir.schedules.templates.register_tile import packed_values
from sparsetir.schedules.templates.row_tile import ROWS_UNPACKED, RowTile
from sparsetir.schedules.templates.shapes import RowReduction, ShapeError, row_reduction, row_sum
from sparsetir.schedules.templates.spmv import DIAGONAL, DIAGONAL_GATHERED, SlicedRows
from sparsetir.sparse_ir.nodes import SparseFunc, nodes_of, sparse_iterations
from sparsetir.sparse_ir.reduction import reduction_of
from sparsetir.sparse_ir.schedule import Schedule

BITS = 256  # the least of a vector for which other orders were measured, but for packed slices
# The most features that tiles compute, as a multiple of those that there are.
OVERLAP = 1.125
SUMMED = ("float32", "float64")  # types of sums in slices
PLACES = 8  # bytes of the column and the position of an element
# For slices of packed values: the least elements, and those of an average row from which sums along
# rows are as fast.
LEAST, LONG = 1 << 14, 32


class RowOrders(NamedTuple):
    """The orders of rows that a program can have, and the parameters that tell which one suits.

    indptr, indices : parameters
    columns, features : parameters, or numbers; None for sums without features
    dtype, idtype : of elements and of indices
    lanes : of a vector
    wide : whether registers hold the sums of a panel for tiles of four vectors
    """

    indptr: str
    indices: str
    columns: str | int
    features: str | int | None
    dtype: str
    idtype: str
    lanes: int
    wide: bool

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize

    def of_pattern(
        self, arguments: Mapping[str, Any], work: int
    ) -> Callable[[int], RowTile | SlicedRows | None] | None:
        """The config for a number of features, or None for them; None for the order of the matrix.

        arguments : the index arrays and sizes among them
        work : the least multiplications for which other threads are used, and panels pay
        """
        indptr, indices = arguments[self.indptr], arguments[self.indices]
        n = arguments.get(str(self.columns), self.columns)
        m, nnz = len(indptr) - 1, len(indices)
        if self.lanes * self.bytes * 8 < BITS:
            return None
        short = sorting_pays(m, n, nnz, 1, self.bytes, self.lanes)
        if self.features is None:
            near = self.on_diagonals(indptr, indices, n, DIAGONAL_GATHERED)
            sliced = self.in_slices(m, nnz, work, near).unpacked
            return (lambda _: sliced) if short or near else None
        if short:
            return partial(self.by_length, m, n, nnz, work)
        if long_rows(m, n, nnz) and shared_columns(indptr, indices, n, ROWS_UNPACKED) >= SHARED:
            return lambda feat: self.in_row_panels(n, feat) if nnz * feat >= work else None
        return None

    def in_packed_slices(self, indptr: Any, indices: Any, work: int) -> SlicedRows | None:
        """Slices for sums without features over values that rarely change; None if none pays.

        Packing values takes longer than a sum.
        """
        if self.features is not None:
            return None
        m, nnz = len(indptr) - 1, len(indices)
        near = self.on_diagonals(indptr, indices, int(indices.max(initial=0)) + 1, DIAGONAL)
        return self.in_slices(m, nnz, work, near) if near or LEAST <= nnz < LONG * m else None

    def on_diagonals(self, indptr: Any, indices: Any, n: int, percent: int) -> bool:
        """Whether slices of diagonals pay, if nonzeros fill this percentage of them."""
        return len(indices) >= LEAST and on_diagonals(indptr, indices, n, self.lanes, percent)

    def in_slices(self, m: int, nnz: int, work: int, diagonals: bool) -> SlicedRows:
        """Slices of rows by length, and of diagonals."""
        bits = self.lanes * self.bytes * 8
        return SlicedRows.for_pattern(
            Spmm(self.dtype, self.idtype), m, nnz, threads=pool(), work_of_threads=work,
            vector_bits=bits, cache=l2_bytes(), diagonals=diagonals,
        )  # fmt: skip

    def by_length(self, m: int, n: int, nnz: int, work: int, feat: int) -> RowTile | None:
        """Rows by length, with the features compiled in; None if the order of the matrix is faster.

        m, n, nnz : sizes of the pattern
        work : the least multiplications for which other threads are used
        """
        near = stays_near(nnz, PLACES + self.bytes)
        if not near or not sorting_pays(m, n, nnz, feat, self.bytes, self.lanes):
            return None
        tile, lanes, _ = feature_tile(feat, self.lanes, NARROW)
        parallel = pool() > 1 and nnz * feat >= work
        return RowTile(
            tile, lanes, feat, tiles_first=False, blocks=pool() if parallel else 1,
            parallel=parallel, window=WINDOW, packed=False,
        )  # fmt: skip

    def in_row_panels(self, n: int, feat: int) -> RowTile | None:
        """The panels for a number of columns and of features; None if single rows are faster."""
        vectors = VECTORS if feat >= VECTORS * self.lanes else VECTORS // 2
        tile = vectors * self.lanes
        whole = tile <= feat and -(-feat // tile) * tile <= OVERLAP * feat
        few = feat <= tile or self.wide
        if not whole or not few or not stays_near(n, tile * self.bytes):
            return None
        blocks = tasks(pool(), -(-feat // tile))
        return RowTileOfAnySize(
            tile, self.lanes, pack=True, blocks=blocks, parallel=pool() > 1, rows=ROWS_UNPACKED,
            packed=False,
        )  # fmt: skip


def row_orders(func: SparseFunc, target: Any) -> RowOrders | None:
    """The orders of rows that a program can have; None for a program of another shape.

    One reduction over rows of singly stored elements, in which features index the result and the
    gathered operand alone, in one type of 32 or 64 bits; or a sum of products without features.
    """
    if any(it.annotations for it in sparse_iterations(func)):
        return None
    bits, registers = vector_registers(target)
    sums = row_sum_of(func)
    if sums is not None:
        nest, features = sums, None
        same = nest.dtype == nest.total in SUMMED
    else:
        sch = Schedule(func)
        try:
            nest = row_reduction(sch, "row_orders")
        except ShapeError:
            return None
        features = func.axis(nest.features.name)
        others = [*nest.heads, *nest.inside, *nest.columns[1:]]
        if others or nest.gathered is None or not nest.free:
            return None
        along = {b.name for b in func.buffers if any(a.name == features.name for a in b.axes or ())}
        same = nest.dtype == nest.total == str(func.buffer(nest.gathered).dtype)
        same = same and along == {nest.result, nest.gathered}
    axis, dtype = func.axis(nest.columns[0].name), tvm.DataType(nest.total)
    if axis.kind != "sparse_variable" or not axis.unique or not same:
        return None
    if dtype.bits not in (32, 64):
        return None
    n, feat = _size(axis.length), None if features is None else _size(features.length)
    if n is None or (feat is None) != (features is None):
        return None
    names = str(axis.indptr.name), str(axis.indices.name)
    wide = sum_vectors(registers) >= ROWS_UNPACKED * VECTORS
    types = nest.total, str(axis.idtype)
    return RowOrders(*names, n, feat, *types, bits // dtype.bits, wide)


def row_sum_of(func: SparseFunc) -> RowReduction | None:
    """The loops of a row sum of products with a CSR matrix, such as SpMV, with at most iterations
    over dense axes besides, such as a bias; None for another program."""
    sch = Schedule(func)
    try:
        sums = row_sum(sch, "row_sum_of")
    except ShapeError:
        return None
    (it,) = [it for it in sparse_iterations(func) if it.name == sums.iteration.name]
    _, columns = it.axes
    reduction = reduction_of(it.body)
    if columns.kind != "sparse_variable" or not columns.unique or reduction is None:
        return None
    plain = (
        reduction.operator == "sum" and not reduction.conditions and not nodes_of(ir.Call, it.body)
    )
    return sums if plain and len(packed_values(sch, sums)) == 1 else None


def _size(size: Any) -> str | int | None:
    """The name of a parameter, or a number; None for other sizes."""
    if isinstance(size, tirx.IntImm):
        return int(size)
    return str(size.name) if isinstance(size, ir.Var) else None
