"""Matrices of full blocks whose values callers have block by block, as sparse BSR tensors of torch.

Products take the values as they are, where CSR would bring them into another order in each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from tvm.target import Target

from sparsetir.formats import BSR, Format, Operand
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.ops.cache import lasting
from sparsetir.ops.compress import transpose
from sparsetir.planning.plan import plan
from sparsetir.planning.run_plan import Plan
from sparsetir.schedules.gpu.spmm_tensor_cores import for_format
from sparsetir.schedules.operators.problems import CsrPattern, Spmm, vector_lanes
from sparsetir.schedules.targets import is_gpu, vector_bits
from sparsetir.sparse_ir.errors import StructureError


@dataclass(frozen=True)
class Blocks:
    """Where a matrix has blocks, and where the caller has the values of each.

    indptr, indices : (rows of blocks + 1,) and (blocks,) columns of blocks, by rows of blocks
    size : rows and columns of a block
    order : (blocks,) int64 place, among the caller's blocks, of each; None where that is the same
    turned : whether the caller's blocks are the transposed ones
    """

    indptr: Tensor
    indices: Tensor
    size: tuple[int, int]
    order: Tensor | None = None
    turned: bool = False

    def arranged(self, values: Tensor) -> Tensor:
        """(blocks * rows * columns,) values block by block, of values as the caller has them."""
        if self.order is None and not self.turned:
            return values
        blocks = values.view(-1, *(self.size[::-1] if self.turned else self.size))
        blocks = blocks if self.order is None else blocks.index_select(0, self.order)
        return (blocks.transpose(1, 2) if self.turned else blocks).reshape(-1)

    @lasting
    def transposed(self, columns: int) -> Blocks:
        """Of the transposed matrix, for a caller that has the same values; columns : of blocks."""
        indptr, indices, order = transpose(self.indptr, self.indices, columns, self.order)
        return Blocks(indptr, indices, (self.size[1], self.size[0]), order, not self.turned)

    def plan(self, pattern: CsrPattern, feat: int, dtype: str, target: Target) -> Plan | None:
        """The sum of products with this matrix, for values as :meth:`arranged` gives them.

        pattern : the elements
        dtype, target : as of :func:`sparsetir.plan`

        None where row blocks of CSR are as fast: for features that fill no vector, for blocks of
        one row (see :func:`sparsetir.schedules.search.choose.block_rows`), on a GPU for blocks that
        its tensor cores do not multiply; and where the blocks of a row are in no order.
        """
        fmt, problem = BSR(*self.size), Spmm(dtype)
        if is_gpu(target):
            if for_format(fmt, problem, feat, target) is None:
                return None
        elif fmt.rows == 1 or feat < vector_lanes(problem, vector_bits(target)):
            return None
        try:
            return plan("spmm", _OfBlocks(*pattern), feat, dtype=dtype, target=target, format=fmt)
        except StructureError:
            return None


class _OfBlocks(CsrPattern):
    """A pattern of full blocks whose values come block by block."""

    def stored_in(self, format: Format, operand: Operand) -> ConvertedFormat:
        found = super().stored_in(format, operand)
        return _AsGiven(found.name, found.pattern, found.operand, found.parts)


class _AsGiven(ConvertedFormat):
    """A format that takes values in the order in which it stores them."""

    keeps_order = True

    def values(self, /, **stored: Tensor) -> dict[str, Tensor]:
        return {
            self.parameter(name, part): values.reshape(part.shape)
            for name, values in stored.items()
            for part in self.parts
        }
