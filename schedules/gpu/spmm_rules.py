"""The config that SpMM over CSR gets on a GPU when its user names none.

Rules of thumb; each function says why.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2
from typing import Any

from sparsetir.formats import BSR
from sparsetir.schedules.gpu.spmm import RowSplit, apply, choices
from sparsetir.schedules.gpu.spmm_groups import Groups
from sparsetir.schedules.gpu.spmm_hyb import HybRows, shares_rows
from sparsetir.schedules.gpu.spmm_tensor_cores import engine
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.passes.nests import WARP
from sparsetir.schedules.template import Template, register

# Times the mean length of a row, from which on the longest ones are what takes long on a GPU.
UNEVEN = 8
MAX_K = 10  # more buckets take long to compile
# Features up to which a non-zero each is better than hyb where rows are uneven, and where there is
# no hyb, as for batches.
FEW_FEATURES, FEW_OF_A_BATCH = 2, 8
# Full blocks and features from which on tensor cores multiply them.
TENSOR_BLOCK, TENSOR_FEATURES = 8, 16


def candidates(problem: Spmm, stats: Any, target: Any) -> list[Any]:
    """Blocks on tensor cores, where a matrix of 16-bit numbers is made of full ones.

    Else rows by themselves; where some rows are much longer than most, hyb, or one non-zero each.

    The longest rows then would keep a few threads busy when all others have finished. k as in the
    paper: the power of two from the mean row length up (section 4.2.1).

    With few features it matters most that all threads have the same to do (Sgap, section 3.2),
    which they have with a non-zero each, whatever the rows are. Counted on 2000 rows of 4 and one
    of 1800: the longest block of hyb has 2.6 times the mean, that of non-zeros 1.2, and half as
    many instructions with one feature, for as many sectors; with 4 features the sectors are 1.6
    times as many, as each is added by itself. Groups are whole warps: of a long row each 32 are one
    atomic addition. Batches have no hyb, and a row by itself keeps one block for all of its length.
    """
    rows = RowSplit.for_features(stats.feat, _widest(problem))
    configs: list[Any] = [rows]
    if rows.rows_per_block > 1:
        configs.append(replace(rows, rows_per_block=1))
    mean = stats.nnz / max(1, stats.m)
    uneven = stats.longest > UNEVEN * mean
    if not problem.batched:
        configs += _hyb(problem, stats, mean)
        hyb = next(c for c in configs if isinstance(c, HybRows))
        if uneven and hyb.k <= MAX_K:
            configs.insert(0, hyb)
    shared, elements = _groups(problem, stats, mean)
    configs += [c for c in (shared, elements) if c.serves(problem)]
    few = stats.feat <= (FEW_OF_A_BATCH if problem.batched else FEW_FEATURES)
    if uneven and few and elements.serves(problem):
        configs.insert(0, elements)
    if stats.block >= TENSOR_BLOCK and stats.feat >= TENSOR_FEATURES:
        blocks = BSR(stats.block, stats.block)
        configs = [*engine(problem, None, stats, target, blocks), *configs]
    return list(dict.fromkeys(configs))


def _hyb(problem: Spmm, stats: Any, mean: float) -> list[HybRows]:
    """Hyb, in one column part and more."""
    k = max(0, ceil(log2(max(1.0, mean))))
    whole = max(0, ceil(log2(max(1, stats.longest))))
    hyb = HybRows.for_features(
        stats.feat, _widest(problem), 1, k if shares_rows(problem) else whole
    )
    return [hyb, replace(hyb, c=2), replace(hyb, c=4)] if shares_rows(problem) else [hyb]


def _groups(problem: Spmm, stats: Any, mean: float) -> tuple[Groups, Groups]:
    """Rows that threads share, about as many as it has elements up to 8, and non-zeros by warps.

    Groups of 4 and 8 are the best static ones of Sgap's tables 1 and 5.
    """
    lanes = 8 if mean >= 8 else 4
    shared = Groups.for_features(stats.feat, _widest(problem), lanes=lanes, group=lanes)
    return shared, Groups.for_features(stats.feat, _widest(problem), split="non-zeros", group=WARP)


def _widest(problem: Spmm) -> str:
    """The type whose elements set how many are loaded or stored at once."""
    return problem.out or problem.dtype


register(
    Template(
        RowSplit, Spmm, program, apply, gpu=True, candidates=candidates, choices=choices, turn=1
    )
)
