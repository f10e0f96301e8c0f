"""SDDMM on a CPU: OUT[i, j] = X[i] . Y[j] for the stored elements of a matrix.

The kernel knows no rows: workers get equally many non-zeros, and short rows cost no more than long
ones. (The fused iteration space of SparseTIR, section 4.2.2, with the row of each non-zero computed
once instead of searched for.) A few non-zeros at a time are summed in vectors along the features,
one register each; then the lanes of these registers are added up together (see `add_lanes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetir.schedules.arguments import choice, expect, is_power_of_two, number
from sparsetir.schedules.operators.problems import (
    Arranged,
    CsrPattern,
    Sddmm,
    accumulator,
    vector_lanes,
)
from sparsetir.schedules.operators.sddmm import program
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.schedules.targets import vector_bits
from sparsetir.schedules.template import Asked, Template, Tried, around, register
from sparsetir.schedules.templates.register_tile import Tiled
from sparsetir.schedules.templates.shapes import ElementReduction, element_reduction
from sparsetir.sparse_ir.computed import keyword
from sparsetir.sparse_ir.recipes.general import cache_parts
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef, SpIter

GROUP = 8
TILE_VECTORS = 8
# Vectors of a row that code is written out for: more take long to compile. Above, tiles are gone
# through in a loop, so narrow that LLVM leaves it one: written out in part it takes longer.
MAX_STRAIGHT = 16
LOOP_VECTORS = 4
# Rows of Y of a part: what stays in a core's second-level cache beside rows of X.
PART_BYTES = 3 * 2**18
# Elements per row of X and Y from which on a copy pays.
PACK_DEGREE = 24

VECTORS = (1, 2, 4, 8, 16)  # of a tile that a search tries


@dataclass(frozen=True)
class SddmmGroups(Tiled):
    """How a CPU kernel is made.

    lanes : of a vector, a power of two, at most the number of features
    group : non-zeros whose lanes are added up together, a power of two; at most `lanes`, where a
        vector has more than one. Their sums stay in registers while they are below 1 KiB
    vectors : in a tile of features
    feat : None for a kernel that serves every multiple of a tile, lanes * vectors; else the one
        feature size it serves, in whole tiles and a rest, whose last vector may overlap the one
        before
    parts : parts of the columns that are gone through one after the other, so that their rows of Y
        stay in cache; how many is not compiled in
    pack : first copy X and Y, so that their rows begin at whole vectors, in the type that sums are
        in; with `feat`
    """

    lanes: int = number(16, power=True)
    group: int = GROUP
    vectors: int = number(TILE_VECTORS)
    feat: int | None = None
    parts: int = number(1, compiled=2, tries=(1, 4, 16))
    pack: bool = choice(False, True)

    def __post_init__(self) -> None:
        lanes, group, feat = self.lanes, self.group, self.feat
        super().__post_init__()
        fits = is_power_of_two(group) and (lanes == 1 or group <= lanes)
        expect(self, "group", fits, f"a power of two up to lanes = {lanes}")
        least = max(lanes, lanes * (self.vectors - 1) + 1)
        expect(self, "feat", feat is None or feat >= least, f"{least} or more features")
        expect(self, "pack", feat is not None or not self.pack, "False where 'feat' is None")

    @staticmethod
    def for_features(problem: Sddmm, feat: int, vector_bits: int = 512) -> SddmmGroups:
        """A good config for a feature size; sizes with the same config share a kernel."""
        lanes = vector_lanes(problem, vector_bits)
        while lanes > feat:
            lanes //= 2
        group = min(GROUP, lanes) if lanes > 1 else GROUP
        if feat % (lanes * TILE_VECTORS) == 0:
            return SddmmGroups(lanes, group)
        return SddmmGroups(lanes, group, SddmmGroups.vectors_of(feat, lanes), feat)

    @staticmethod
    def vectors_of(feat: int, lanes: int) -> int:
        """Vectors in a tile of a kernel for one feature size: all, unless they are many."""
        vectors = -(-feat // lanes)
        return vectors if vectors <= MAX_STRAIGHT else LOOP_VECTORS

    @staticmethod
    def for_pattern(
        problem: Sddmm, m: int, n: int, nnz: int, feat: int, vector_bits: int = 512
    ) -> SddmmGroups:
        """A good config for a pattern of `nnz` elements in (m, n).

        Parts pay where a part of a row has elements enough for its row of X to be loaded for. A
        copy pays where rows begin within vectors and are read often.
        """
        found = SddmmGroups.for_features(problem, feat, vector_bits)
        parts = cache_parts(m, n, nnz, feat, np.dtype(problem.dtype).itemsize, PART_BYTES)
        pack = feat % found.lanes != 0 and nnz >= PACK_DEGREE * (m + n)
        return replace(found, parts=parts, pack=pack)

    @property
    def tile(self) -> int:
        """Features of a tile."""
        return self.lanes * self.vectors

    @property
    def row_vectors(self) -> int:
        """Vectors of a row, of a config with `feat`."""
        return -(-(self.feat or 0) // self.lanes)


def apply(sch: Schedule, config: SddmmGroups) -> None:
    """Schedule a program that sums over features for each stored element.

    Before (stage I), and after for one feature size in one tile::

        with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]: ...

        with T.sp_iter([I_J_whole0], "S", "sddmm") as [ij0]:
            ...  # sddmm_start, sddmm_reduce, sddmm_sums, sddmm_write for a group of non-zeros
        with T.sp_iter([I_J_rest0], "S", "sddmm_rest") as [ij0]:
            ...  # the same for each of those that fill no group
    """
    found = element_reduction(sch, "SddmmGroups")
    elements = by_positions(sch, found, config.parts > 1)
    if config.feat is None:
        sch.split(found.features, [None, config.vectors, config.lanes], tail="exact")
    else:
        sch.bound(found.features, config.feat, "exact")
        sch.split(found.features, [None, config.lanes], tail="shift")
    if config.group > 1:
        elements, rest = sch.peel(elements, config.group)
        groups = [_grouped(sch, found, elements, config.group), _grouped(sch, found, rest, 1)]
    else:
        groups = [_grouped(sch, found, elements, config.group)]
    main = sch.get_sparse_iteration(elements.iteration)
    sch.parallelize(sch.get_sp_iters(main)[-1])
    copies = _packed(sch, found, groups[0]) if config.pack else []
    reductions = [_in_tiles(sch, steps[1], config) for steps in groups]
    stage_two = sch.lower()
    for copy in copies:
        in_vectors(stage_two, copy, 1)
    for steps, tiled in zip(groups, reductions, strict=True):
        start, _, _, write = (stage_two.get_sblock(f"{step.name}0") for step in steps)
        in_vectors(stage_two, start)
        for step in tiled:
            block = stage_two.get_sblock(f"{step.name}0")
            if config.feat is None:
                stage_two.unroll(stage_two.get_loops(block)[0])
            in_vectors(stage_two, block, 2 if config.feat is None else 3)
        if config.parts > 1:  # written all over the result
            stage_two.unroll(stage_two.get_loops(write)[-1])
        else:
            in_vectors(stage_two, write, 1)
    if config.lanes > 1:
        for steps in groups:
            sch.rewrite(add_lanes, f"{steps[2].name}0")


def by_positions(sch: Schedule, found: ElementReduction, in_parts: bool) -> SpIter:
    """Visit elements by their positions.

    in_parts : in an order that keeps gathered rows in cache. The parts of the columns are as many
        as sizes ask for, unless whoever makes a plan says another number
    """
    if not in_parts:
        return sch.positions(found.elements)
    row, column = (sch.func.axis(name) for name in found.elements.axes)
    sizes = {
        "m": row.length, "n": column.length, "nnz": column.nnz,
        "feat": sch.func.axis(found.features.name).length,
    }  # fmt: skip
    named = {name: keyword(size) for name, size in sizes.items()}
    known = {"itemsize": np.dtype(found.dtype).itemsize, "cache": PART_BYTES}
    default: Any = {"recipe": "cache_parts", **named, **known}
    return sch.positions(
        found.elements, parts="parts", default=1 if None in named.values() else default
    )


def _grouped(
    sch: Schedule, found: ElementReduction, elements: SpIter, size: int
) -> list[SparseIterationRef]:
    """Let non-zeros share registers, `size` at a time; the steps of one such group."""
    lanes = sch.get_sp_iters(sch.get_sparse_iteration(elements.iteration))[-1]
    groups, group = sch.split(elements, [None, size], tail="shift")
    return sch.precompute(
        found.result, groups, [group], lanes=[lanes], dtype=accumulator(found.dtype)
    )


def _packed(
    sch: Schedule, found: ElementReduction, steps: list[SparseIterationRef]
) -> list[SparseIterationRef]:
    """Copy the operands' rows to whole vectors, in the type of sums."""
    main = sch.get_sparse_iteration(found.iteration.name)
    _, *vectors = sch.get_sp_iters(steps[1])
    heads = sch.get_sp_iters(main)[:-1]
    copies: list[SparseIterationRef] = []
    for operand, rows in found.operands:
        copies += sch.precompute(
            operand, main, [*heads, rows, *vectors], scope="global", dtype=accumulator(found.dtype)
        )
        sch.parallelize(sch.get_sp_iters(copies[-1])[len(heads)])
    return copies


def _in_tiles(
    sch: Schedule, reduction: SparseIterationRef, config: SddmmGroups
) -> list[SparseIterationRef]:
    """Go through many vectors of a row in a loop over tiles; the iterations, tiles first."""
    if config.feat is None or config.row_vectors <= config.vectors:
        return [reduction]
    group, vectors, lanes = sch.get_sp_iters(reduction)
    made = [reduction]
    if config.row_vectors % config.vectors:
        vectors, rest = sch.peel(vectors, config.vectors)
        made.append(sch.get_sparse_iteration(rest.iteration))
    tiles, vectors = sch.split(vectors, [None, config.vectors])
    # Tiles are narrow: all sums of a group take turns.
    sch.sparse_reorder(reduction, [tiles, group, vectors, lanes])
    return made


def arrange(matrix: CsrPattern, problem: Sddmm, config: SddmmGroups) -> Arranged:
    """CSR as it is, in as many parts of the columns."""
    del problem
    return Arranged(matrix, matrix.arguments(), {"parts": config.parts})


def candidates(problem: Sddmm, given: Any, target: Any) -> list[SddmmGroups]:
    """Groups for a pattern; fewer parts of the columns and more, with copies and without."""
    sizes = (given.m, given.n, given.nnz, given.feat)
    config = SddmmGroups.for_pattern(problem, *sizes, vector_bits(target))
    parts = dict.fromkeys([config.parts, 1, max(1, config.parts // 2), 2 * config.parts])
    found = [replace(config, parts=count) for count in parts]
    if config.feat is not None:
        found.append(replace(config, pack=not config.pack))
    return list(dict.fromkeys(found))


def choices(asked: Asked) -> Tried:
    """Tiles of whole `vectors`; 0 for a kernel for this feature size alone."""
    own, feat = asked.own(SddmmGroups), asked.given.feat
    default = own[0]
    fitting = [v for v in VECTORS if feat % (v * default.lanes) == 0]

    def make(lanes: int, group: int, vectors: int, parts: int, pack: bool) -> SddmmGroups:
        if not vectors:
            vectors = SddmmGroups.vectors_of(feat, lanes)
            return SddmmGroups(lanes, group, vectors, feat, parts, pack)
        return SddmmGroups(lanes, group, vectors, None, parts, pack)

    half, groups = max(1, default.lanes // 2), (g for g in (4, 8, 16) if g <= default.lanes)
    tried, _ = around(own, lanes=[half], group=groups, vectors=[0])
    return {**tried, "vectors": (0, *fitting)}, make


register(
    Template(SddmmGroups, Sddmm, program, apply, arrange, candidates=candidates, choices=choices)
)
