"""Values of products and sums of sparse matrices on a GPU, at a pattern that is known.

Each thread has an element of the result: of a product it goes through a row of A and a column of B
together, by a pointer into each; of a sum it searches for its column in each operand's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.arguments import Config, number
from sparsetir.schedules.operators.sparse_results import SparseResult
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class ElementThreads(Config):
    """A thread for each element of a sparse result.

    block : threads of a block
    """

    block: int = number(128, most=1024, power=True)

    def tiles(self, feat: int) -> int:
        """None: there are no features."""
        del feat
        return 1


def program(problem: SparseResult, config: ElementThreads) -> SparseFunc:
    """That of the values."""
    del config
    return problem.values_program()


def apply(sch: Any, config: ElementThreads) -> None:
    """Divide the elements among threads."""
    stage_two = sch.lower()
    for block in stage_two.get_child_blocks(stage_two.get_sblock("root")):
        blocks, threads = stage_two.split(stage_two.get_loops(block)[0], [None, config.block])
        run_in_parallel(stage_two, blocks, "blockIdx.x")
        run_in_parallel(stage_two, threads, "threadIdx.x")


register(Template(ElementThreads, SparseResult, program, apply, gpu=True))
