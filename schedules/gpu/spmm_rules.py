"""The config that SpMM over CSR gets on a GPU unless the caller names one.

Rules of thumb; each function gives the reason.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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

# The least multiple of the mean length for which the longest rows dominate on a GPU.
UNEVEN = 8
MAX_K = 10  # more buckets take long to compile
# Features up to which a nonzero per thread beats hyb if rows are uneven, and the same if there is
# no hyb, as for batches.
FEW_FEATURES, FEW_OF_A_BATCH = 2, 8
# The least size of full blocks, and features, for which tensor cores are used.
TENSOR_BLOCK, TENSOR_FEATURES = 8, 16


def candidates(problem: Spmm, stats: Any, target: Any) -> list[Any]:
    """Blocks on tensor cores, if a matrix of 16-bit numbers consists of full ones.

    Otherwise rows by themselves; if some rows are much longer than most, hyb, or a nonzero per
    thread: the longest rows would keep a few threads busy when all others have finished. k is the
    paper's: the power of two from the mean row length up (section 4.2.1).

    With few features equal work for all threads matters most (Sgap, section 3.2), which a nonzero
    per thread gives for any rows. Counted on 2000 rows of 4 and one of 1800: the longest block of
    hyb has 2.6 times the mean, that of nonzeros 1.2, and half as many instructions with one
    feature, for as many sectors; with 4 features the sectors are 1.6 times as many, as each is
    added separately. Batches have no hyb, and a single row occupies one block for its whole length.
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
    """Hyb configs, with one column part and more."""
    k = max(0, ceil(log2(max(1.0, mean))))
    whole = max(0, ceil(log2(max(1, stats.longest))))
    hyb = HybRows.for_features(
        stats.feat, _widest(problem), 1, k if shares_rows(problem) else whole
    )
    return [hyb, replace(hyb, c=2), replace(hyb, c=4)] if shares_rows(problem) else [hyb]


def _groups(problem: Spmm, stats: Any, mean: float) -> tuple[Groups, Groups]:
    """Threads that share rows, about as many as a row has elements up to 8; and a nonzero each.

    Groups of 4 and 8 are the best static ones of Sgap's tables 1 and 5. A nonzero per thread is in
    groups of a warp if the thread has all columns: each 32 elements of a long row are one atomic
    addition.
    """
    make, lanes = partial(Groups.for_features, stats.feat, _widest(problem)), 8 if mean >= 8 else 4
    elements = make(split="non-zeros", group=8)
    if elements.vector >= stats.feat:
        elements = make(split="non-zeros", group=WARP)
    return make(lanes=lanes, group=lanes), elements


def _widest(problem: Spmm) -> str:
    """The widest type of an operand: it bounds how many elements a load or store has."""
    return problem.out or problem.dtype


register(
    Template(
        RowSplit, Spmm, program, apply, gpu=True, candidates=candidates, choices=choices, turn=1
    )
)
