"""Panels of rows in the default schedule, for patterns whose neighbouring rows share columns.

Rows of finite elements, of Jacobians and of some pruned weights have columns in common: in panels
of a few rows, a row of B is loaded once for all of those that have its column
(:mod:`sparsetir.sparse_ir.schedule.group_columns_by_pattern`); values are read by their positions.
Only a pattern tells whether that pays: a kernel of the default schedule measures new index arrays,
and panels are compiled when a pattern first needs them.

Zen 5, one thread, float32, the mean of times with 32 to 512 features beside the default's
rows: structural matrices (bcsstk13, 14, 16) 0.74, Jacobians and finite elements with a few unknowns
a node 0.70, groebner_id2003_aug 0.64, mbeacxc 0.68, a pruned weight that keeps the same columns in
eight rows 0.55. Below the bounds of :mod:`sparsetir.schedules.search.shared_columns`: random ones
with 30 % stored 0.78 to 1.03, with 20 % up to 1.06, rows of 20 elements up to 1.4. Tiles of two
vectors pay alone: several take up to twice as long. With 16 registers of 256 bits there is no room
for more than two: 0.60 to 0.78 with 16 features, 0.9 to 1.3 with more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tvm
from tvm import ir, tirx

from sparsetir.schedules.registers import sum_vectors
from sparsetir.schedules.search.program_space import RowTileOfAnySize
from sparsetir.schedules.search.shared_columns import SHARED, long_rows, shared_columns, tile_fits
from sparsetir.schedules.search.visit_orders import VECTORS
from sparsetir.schedules.targets import pool, vector_registers
from sparsetir.schedules.templates.row_tile import ROWS_UNPACKED
from sparsetir.schedules.templates.shapes import ShapeError, row_reduction
from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule

BITS = 256  # the least of a vector for which panels were measured
# The most features that tiles compute, as a multiple of those that there are.
OVERLAP = 1.125


class RowPanels(NamedTuple):
    """The panels that suit a program, and the parameters that say whether they suit a pattern.

    indptr, indices : parameters
    columns, features : parameters, or numbers
    lanes : of a vector
    bytes : of an element
    wide : whether registers hold the sums of a panel for tiles of four vectors
    """

    indptr: str
    indices: str
    columns: str | int
    features: str | int
    lanes: int
    bytes: int
    wide: bool

    def pay(self, arguments: Mapping[str, Any]) -> bool:
        """Whether rows share enough columns, by the index arrays and sizes among the arguments."""
        indptr, indices = arguments[self.indptr], arguments[self.indices]
        n = arguments.get(str(self.columns), self.columns)
        long = long_rows(len(indptr) - 1, n, len(indices))
        return long and shared_columns(indptr, indices, n, ROWS_UNPACKED) >= SHARED

    def config(self, n: int, feat: int) -> RowTileOfAnySize | None:
        """The panels for a number of columns and of features; None if single rows are faster."""
        vectors = VECTORS if feat >= VECTORS * self.lanes else VECTORS // 2
        tile = vectors * self.lanes
        whole = tile <= feat and -(-feat // tile) * tile <= OVERLAP * feat
        few = feat <= tile or self.wide
        if not whole or not few or not tile_fits(n, tile * self.bytes):
            return None
        return RowTileOfAnySize(
            tile, self.lanes, pack=True, blocks=pool(), parallel=pool() > 1, rows=ROWS_UNPACKED,
            packed=False,
        )  # fmt: skip


def row_panels(func: SparseFunc, target: Any) -> RowPanels | None:
    """The panels for the rows of a program; None for a program of another shape.

    One reduction over rows of singly stored elements, in which features index the result and the
    gathered operand alone, in one type of 32 or 64 bits.
    """
    if any(it.annotations for it in sparse_iterations(func)):
        return None
    sch = Schedule(func)
    try:
        nest = row_reduction(sch, "row_panels")
    except ShapeError:
        return None
    (column, *deeper), features = nest.columns, func.axis(nest.features.name)
    axis, around = func.axis(column.name), [*nest.heads, *nest.inside, *deeper]
    if around or nest.gathered is None or not nest.free:
        return None
    if axis.kind != "sparse_variable" or not axis.unique:
        return None
    along = {b.name for b in func.buffers if any(a.name == features.name for a in b.axes or ())}
    dtype = tvm.DataType(nest.total)
    same = nest.dtype == nest.total == str(func.buffer(nest.gathered).dtype)
    bits, registers = vector_registers(target)
    if along != {nest.result, nest.gathered} or not same or dtype.bits not in (32, 64):
        return None
    if bits < BITS:
        return None
    n, feat = _size(axis.length), _size(features.length)
    if n is None or feat is None:
        return None
    names = str(axis.indptr.name), str(axis.indices.name)
    wide = sum_vectors(registers) >= ROWS_UNPACKED * VECTORS
    return RowPanels(*names, n, feat, bits // dtype.bits, dtype.bits // 8, wide)


def _size(size: Any) -> str | int | None:
    """The name of a parameter, or a number; None for other sizes."""
    if isinstance(size, tirx.IntImm):
        return int(size)
    return str(size.name) if isinstance(size, ir.Var) else None
