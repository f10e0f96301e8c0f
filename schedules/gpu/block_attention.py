"""Attention over blocks on the tensor cores of a GPU, and its gradients.

A thread block has a row of blocks of one head. Its rows are divided among warps, which keep scores
and accumulators in registers; blocks of K and V, or of Q and the gradient, are copied to shared
memory some steps ahead. The programs are those for CPUs; their per-row values are held by the
four lanes that have the row. (SparseTIR, section 4.3.1; FlashAttention-2, section 3.)

On Hopper (sm_90a) the four warps of a warpgroup can multiply 64 rows together by a factor that is
read from shared memory once: `WarpgroupTiles`. No GPU has run that, and nothing chooses it.

Factors of products, including the weights of keys, are rounded to the type of Q; sums, maxima and
exponentials are in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.gpu.block_sddmm import WarpTiles
from sparsetir.schedules.gpu.passes.warp_mma_program import warp_mma_program
from sparsetir.schedules.gpu.passes.warpgroup_program import warpgroup_program
from sparsetir.schedules.operators.block_attention import BlockAttention, program
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.operators.block_attention_backward import program as gradient_program
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.block_attention import visits_of_blocks
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class WarpgroupTiles(Config):
    """The number of pipeline stages of a kernel for sm_90a, whose warpgroups have 64 rows each.

    Blocks have a multiple of 64 rows, and heads a multiple of 64 features, at most 256.

    stages : blocks in shared memory at a time, 2 to 4
    """

    stages: int = number(2, least=2, most=4)


def apply(sch: Schedule, config: WarpTiles | WarpgroupTiles) -> None:
    """Schedule a program whose steps run for each block that a row of blocks stores.

    Before (stage I)::

        with T.sp_iter([H, IO], "SS", "rows") as [h, io]:
            with T.sp_iter([JO], "R", "keys") as [jo]:
                with T.sp_iter([JI, II, F], "SSR", "score") as [ji, ii, f]: ...
                with T.sp_iter([JI, II], "SS", "powers") as [ji, ii]: ...

    H and IO are divided among thread blocks, in stage I; II among warps, in stage II
    (:func:`sparsetir.schedules.gpu.passes.warp_mma_program.warp_mma_program`, or
    :func:`sparsetir.schedules.gpu.passes.warpgroup_program.warpgroup_program`).

    Raises ScheduleError for a program of another form.
    """
    main, owner = visits_of_blocks(sch, "block_attention_gpu")
    sch.parallelize(sch.get_sp_iters(main), "block")
    sch.lower()
    if isinstance(config, WarpgroupTiles):
        sch.rewrite(warpgroup_program, main.block, owner, config.stages)
    else:
        sch.rewrite(warp_mma_program, main.block, owner, config.warps, config.stages)


for kind in (WarpTiles, WarpgroupTiles):
    register(Template(kind, BlockAttention, program, apply, gpu=True))
    register(Template(kind, BlockAttentionBackward, gradient_program, apply, gpu=True))
