"""Attention over blocks on the tensor cores of a GPU, and its gradients.

A thread block has a row of blocks of one head. Its rows are divided among warps, which keep scores
and accumulators in registers; blocks of K and V, or of Q and the gradient, are copied to shared
memory some steps ahead. The programs are those for CPUs; their per-row values are held by the
four lanes that have the row. (SparseTIR, section 4.3.1; FlashAttention-2, section 3.)

Factors of products, including the weights of keys, are rounded to the type of Q; sums, maxima and
exponentials are in float32.
"""

from __future__ import annotations

from sparsetir.schedules.gpu.block_sddmm import WarpTiles
from sparsetir.schedules.gpu.passes.warp_mma_program import warp_mma_program
from sparsetir.schedules.operators.block_attention import BlockAttention, program
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.operators.block_attention_backward import program as gradient_program
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.block_attention import visits_of_blocks
from sparsetir.sparse_ir.schedule import Schedule


def apply(sch: Schedule, config: WarpTiles) -> None:
    """Schedule a program whose steps run for each block that a row of blocks stores.

    Before (stage I)::

        with T.sp_iter([H, IO], "SS", "rows") as [h, io]:
            with T.sp_iter([JO], "R", "keys") as [jo]:
                with T.sp_iter([JI, II, F], "SSR", "score") as [ji, ii, f]: ...
                with T.sp_iter([JI, II], "SS", "powers") as [ji, ii]: ...

    H and IO are divided among thread blocks, in stage I; II among warps, in stage II
    (:func:`sparsetir.schedules.gpu.passes.warp_mma_program.warp_mma_program`).

    Raises ScheduleError for a program of another form.
    """
    main, owner = visits_of_blocks(sch, "block_attention_gpu")
    sch.parallelize(sch.get_sp_iters(main), "block")
    sch.lower()
    sch.rewrite(warp_mma_program, f"{main.name}0", owner, config.warps, config.stages)


register(Template(WarpTiles, BlockAttention, program, apply, gpu=True))
register(Template(WarpTiles, BlockAttentionBackward, gradient_program, apply, gpu=True))
