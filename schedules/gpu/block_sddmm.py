"""SDDMM of blocks on the tensor cores of a GPU, for all heads of a batch.

A thread block has a row of blocks of one head. The rows of X stay in its warps' registers; the rows
of Y of each stored block are copied to shared memory some blocks ahead.
(SparseTIR, section 4.3.1 and figure 16.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.gpu.passes.warp_mma_program import warp_mma_program
from sparsetir.schedules.operators.block_spmm import BlockSddmm, program
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class WarpTiles(Config):
    """The numbers of warps and pipeline stages of a kernel.

    warps : the most warps per thread block; each has 16 rows of a block, or a multiple
    stages : blocks in shared memory at a time, 2 to 4
    """

    warps: int = number(4)
    stages: int = number(2, least=2, most=4)


def apply(sch: Schedule, config: WarpTiles) -> None:
    """Schedule the program of :mod:`sparsetir.schedules.operators.block_spmm`.

    Before (stage I), and after::

        with T.sp_iter([H, IO, JO, II, JI, K], "SSSSSR", "spmm_grad_a") as [h, io, ..]: ...

        with T.sp_iter([H, IO, JO], "SSS", "spmm_grad_a") as [h, io, jo]:  # h, io: blocks
            with T.sp_iter([II, JI], "SS", "spmm_grad_a_start") as [ii, ji]: ...
            with T.sp_iter([II, JI, K], "SSR", "spmm_grad_a_reduce") as [ii, ji, k]: ...
            with T.sp_iter([II, JI], "SS", "spmm_grad_a_write") as [ii, ji]: ...

    II is divided among warps in stage II. Raises ScheduleError for block sizes not divisible by 16.
    """
    it = sch.get_sparse_iteration("spmm_grad_a")
    h, io, jo, ii, ji, _ = sch.get_sp_iters(it)
    sch.precompute("GRAD_A", jo, [ii, ji], dtype="float32")
    sch.parallelize([h, io], "block")
    sch.lower()
    sch.rewrite(warp_mma_program, "spmm_grad_a0", ii.name, config.warps, config.stages)


register(Template(WarpTiles, BlockSddmm, program, apply, gpu=True))
