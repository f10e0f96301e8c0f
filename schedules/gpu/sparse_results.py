"""Values of products and sums of sparse matrices on a GPU, for a known pattern.

Each thread has an element of the result. For a product it merges a row of A and a column of B, with
a pointer into each; for a sum it searches each operand's row for its column. Or the terms of a
product's elements are listed beforehand, and threads that share an element reduce them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsetir.schedules.arguments import Config, expect, number
from sparsetir.schedules.operators.problems import memoized
from sparsetir.schedules.operators.sparse_results import SparseResult
from sparsetir.schedules.passes.nests import WARP
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.template import Template, register
from sparsetir.sparse_ir.schedule import Schedule


@dataclass(frozen=True)
class ElementThreads(Config):
    """One thread per element of a sparse result.

    block : threads per block
    """

    block: int = number(128, most=1024, power=True)


def configs(problem: SparseResult, *_: object) -> list[ElementThreads]:
    """The configs that a search tries, the default first."""
    return [ElementThreads(), ElementThreads(64), ElementThreads(256)]


def apply(sch: Schedule, config: ElementThreads) -> None:
    """Divide the elements among threads."""
    stage_two = sch.lower()
    for block in stage_two.get_child_blocks(stage_two.get_sblock("root")):
        blocks, threads = stage_two.split(stage_two.get_loops(block)[0], [None, config.block])
        run_in_parallel(stage_two, blocks, "blockIdx.x")
        run_in_parallel(stage_two, threads, "threadIdx.x")


program = memoized(SparseResult.values_program)
register(Template(ElementThreads, SparseResult, program, apply, gpu=True, configs=configs))


@dataclass(frozen=True)
class TermLanes(Config):
    """Threads that share an element of a product, whose terms are listed when it is planned.

    lanes : their number, up to a warp; their sums are reduced by shuffles
    block : threads per block
    """

    lanes: int = number(8, most=WARP, power=True)
    block: int = number(128, most=1024, power=True)
    listed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "block", self.block >= self.lanes, f"at least lanes = {self.lanes}")

    def alternative_for(self, problem: SparseResult, op: str) -> str:
        """The config to expect where this one does not support the problem; else ""."""
        return "" if problem.is_product else "ElementThreads"


def products(problem: SparseResult, *_: object) -> list[TermLanes]:
    """The configs that a search tries for a product."""
    return [TermLanes(lanes) for lanes in (1, 4, 8, 32) if problem.is_product]


def share_terms(sch: Schedule, config: TermLanes) -> None:
    """Divide elements, and the terms of each, among threads.

    After::

        with T.sp_iter([E, S_lanes], "SR", "terms"):
            ...  # terms_start
            with T.sp_iter([S_steps], "R", "terms_reduce"): ...
            ...  # terms_write, of a group
    """
    (buffer,) = (b for b in sch.func.buffers if str(b.handle.name) == "out")
    it = sch.get_sparse_iteration("terms")
    element, steps = sch.get_sp_iters(it)
    inner = element
    if config.lanes > 1:
        steps, inner = sch.strip_mine_rows(steps, config.lanes)
        sch.sparse_reorder(it, [element, inner, steps])
    sch.precompute(buffer.name, inner, [], dtype=buffer.dtype)
    sch.parallelize(element, "thread", per_block=config.block // config.lanes)
    if config.lanes > 1:
        sch.parallelize(inner, "thread", race=f"group({config.lanes})")


terms = memoized(SparseResult.terms_program)
register(Template(TermLanes, SparseResult, terms, share_terms, gpu=True, configs=products))
