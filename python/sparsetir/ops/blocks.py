"""Matrices of dense blocks whose values come block by block, such as torch's BSR tensors.

Products read the values in that order; CSR would permute them in each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from tvm.target import Target

from sparsetir.formats import BSR, Format, Operand
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.ops.cache import cacheable
from sparsetir.ops.compress import transpose
from sparsetir.planning.plan import plan
from sparsetir.planning.run_plan import Plan
from sparsetir.schedules.operators.problems import CsrPattern, Spmm, vector_lanes
from sparsetir.schedules.search.by_format import on_engine
from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.sparse_ir.errors import StructureError


@dataclass(frozen=True)
class Blocks:
    """The pattern of a matrix of blocks, and the position of each block in the caller's values.

    indptr, indices : (block rows + 1,) row pointers and (blocks,) block columns
    size : rows and columns of a block
    order : (blocks,) int64 position of each block among the caller's; None for the same order
    turned : whether the caller's blocks are transposed
    """

    indptr: Tensor
    indices: Tensor
    size: tuple[int, int]
    order: Tensor | None = None
    turned: bool = False

    def arranged(self, values: Tensor) -> Tensor:
        """Permute the caller's values into (blocks * rows * columns,), block by block."""
        if self.order is None and not self.turned:
            return values
        blocks = values.view(-1, *(self.size[::-1] if self.turned else self.size))
        blocks = blocks if self.order is None else blocks.index_select(0, self.order)
        return (blocks.transpose(1, 2) if self.turned else blocks).reshape(-1)

    @cacheable
    def transposed(self, columns: int) -> Blocks:
        """The transposed matrix on the same values of the caller; columns : block columns."""
        indptr, indices, order = transpose(self.indptr, self.indices, columns, self.order)
        return Blocks(indptr, indices, (self.size[1], self.size[0]), order, not self.turned)

    def plan(self, pattern: CsrPattern, feat: int, dtype: str, target: Target) -> Plan | None:
        """The plan of SpMM with this matrix, for values ordered by :meth:`arranged`.

        pattern : the elements
        dtype, target : those of :func:`sparsetir.plan`

        None if row blocks of CSR are as fast: for features that do not fill a vector, for blocks
        of one row (see :func:`sparsetir.schedules.search.choose.block_rows`), on a GPU for blocks
        that its tensor cores do not support; and if a row's blocks are not sorted.
        """
        fmt, problem = BSR(*self.size), Spmm(dtype)
        if is_gpu(target):
            stats = Statistics(*pattern.shape, pattern.nnz, feat)
            if not on_engine(problem, pattern, stats, target, fmt):
                return None
        elif fmt.rows == 1 or feat < vector_lanes(problem, vector_bits(target)):
            return None
        try:
            return plan("spmm", _OfBlocks(*pattern), feat, dtype=dtype, target=target, format=fmt)
        except StructureError:
            return None


class _OfBlocks(CsrPattern):
    """A pattern of dense blocks whose values come block by block."""

    def stored_in(self, format: Format, operand: Operand) -> ConvertedFormat:
        converted = super().stored_in(format, operand)
        return _AsGiven(converted.name, converted.pattern, converted.operand, converted.parts)


class _AsGiven(ConvertedFormat):
    """A format whose values come in its own storage order."""

    keeps_order = True

    def values(self, /, **stored: Tensor) -> dict[str, Tensor]:
        return {
            self.parameter(name, part): values.reshape(part.shape)
            for name, values in stored.items()
            for part in self.parts
        }
