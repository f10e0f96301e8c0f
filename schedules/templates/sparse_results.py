"""Schedules of sparse results: what plans keep, and how results are assembled.

There is nothing to schedule: :mod:`sparsetir.sparse_ir.assemble` creates the programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.schedules.arguments import Config, choice, expect, number
from sparsetir.schedules.operators.sparse_results import SparseResult
from sparsetir.schedules.template import Branch, Template, register
from sparsetir.sparse_ir.nodes import SparseFunc


@dataclass(frozen=True)
class Assembled(Config):
    """Schedule of a sparse result in a plan.

    kept : calls after the first compute the values on the pattern that it found; else each
        assembles its result
    gathered : a sum visits one operand after the other and adds to a workspace; else it co-iterates
        all of them
    parallel : rows are divided among threads
    listed : for a product with a mask, or one that is kept and has few terms per element, the terms
        are listed beforehand, and calls iterate over the list: two or three indices per term, whose
        listing takes as long as some hundred calls; for an elementwise product that is kept, the
        factors of each element
    dotted : for a product with a mask, each element iterates over a row of A and a column of B, for
        masks with few elements; excludes `listed`
    levels : of the bitmap of a row's columns, if calls assemble: 1 scans all of its words, 0 sorts
        elements of short rows as they come; by default depends on the number of elements per row
    """

    kept: bool = choice(True, False)
    gathered: bool = choice(False, True)
    parallel: bool = choice(True, False)
    listed: bool = choice(False, True)
    dotted: bool = choice(False, True)
    levels: int | None = number(None, least=0, most=3, optional=True, tries=(0, 1, 2, 3))

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "dotted", not (self.dotted and self.listed), "False with 'listed'")
        expect(self, "levels", not self.kept or self.levels is None, "None with 'kept'")


def program(problem: SparseResult, config: Assembled) -> SparseFunc:
    """The operator's program."""
    return problem.program(config.gathered)


def refuse(sch: Any, config: Assembled) -> None:
    """Raise: such programs are assembled, not scheduled."""
    del config
    raise NotImplementedError(f"{sch.func.name}: its result is sparse; see build_assembled")


def branch(problem: SparseResult, first: Assembled, threads: int, masked: bool) -> Branch:
    """The choices of a search.

    first : the default
    masked : whether the pattern is known before the first call
    """
    choices = first.tries()
    if masked:
        del choices["kept"], choices["levels"]
    if not problem.lists or (masked and not problem.is_product):
        del choices["listed"]
    if not (masked and problem.is_product):
        del choices["dotted"]
    if problem.how not in ("add", "subtract"):
        del choices["gathered"]
    if threads == 1:
        del choices["parallel"]

    def make(**chosen: Any) -> Assembled | None:
        if chosen.get("listed") and (chosen.get("dotted") or not chosen.get("kept", True)):
            return None
        config = Assembled(**chosen)
        bitmap = problem.is_product or config.gathered
        return config if bitmap or config.levels is None else None

    return Branch(Assembled.__name__, choices, make)


register(Template(Assembled, SparseResult, program, refuse))
