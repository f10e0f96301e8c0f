"""Rows that are stored in pieces: `meet`, and what becomes of atomic iterations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse

import sparsetir
from schedule_common import says, table
from sparsetir import ScheduleError
from sparsetir.formats import Hyb, Operand, Pattern
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import SparseIteration, iteration_with, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.traversal import map_expr

RNG = np.random.default_rng(2)
FORMAT, OPERAND = Hyb(2, 1), Operand({"A": "float32"}, ("I", "J"), "int32")
A = scipy.sparse.random(11, 9, 0.3, "csr", "float32", random_state=1)
FEAT = 6
SUM = Spmm()


def decomposed(problem: Spmm) -> Any:
    plain: Any = program(problem)
    if "computed" in plain.attrs:
        plain = plain.without_attr("computed")
    return extract_preprocess(decompose_format(plain, FORMAT.rules(OPERAND)))[1]


def scheduled(problem: Spmm = SUM) -> tuple[Schedule, list[Any]]:
    """Sums of pieces in workspaces; the iterations that write them."""
    sch = Schedule(decomposed(problem))
    writes = []
    for rule in FORMAT.rules(OPERAND):
        it = sch.get_sparse_iteration(f"spmm_{rule.name}")
        *_, rows, columns, k = loops = sch.get_sp_iters(it)
        tiles, lanes = sch.split(k, [None, 2], tail="exact")
        sch.sparse_reorder(it, [*loops[:-3], rows, tiles, columns, lanes])
        writes.append(sch.precompute("C", tiles, [lanes])[-1])
    return sch, writes


def arguments(func: Any, problem: Spmm) -> dict[str, Any]:
    A.sort_indices()
    pattern = Pattern.from_csr(A.indptr.astype("int32"), A.indices.astype("int32"), A.shape)
    stored = FORMAT.convert(pattern, OPERAND)
    b = RNG.random((A.shape[1], FEAT), "float32")
    args = {**stored.arguments(), **stored.values(A=A.data), "m": 11, "n": 9, "feat": FEAT, "b": b}
    if problem.reduce == "mean":
        args["row"] = (1 / np.maximum(np.diff(A.indptr), 1)).astype("float32")
    args |= compute(func, args)
    return {**args, "out": np.full((11, FEAT), np.nan, "float32")}


@pytest.mark.parametrize(("reduce", "covers"), [("sum", True), ("mean", False)])
def test_it_means_the_same(reduce: str, covers: bool) -> None:
    problem = Spmm(reduce=reduce)
    sch, writes = scheduled(problem)
    adds = sch.combine_row_pieces(writes, race="atomics", covers=covers)
    assert sch.func.script().count("C_shared[i] != 0") == covers
    args = arguments(sch.func, problem)
    sparsetir.interpret(sch.func, args)
    scale = args["row"][:, None] if reduce == "mean" else 1
    np.testing.assert_allclose(args["out"], (A @ args["b"]) * scale, rtol=1e-5)
    assert len(adds) == len(writes) and 0 < args["c_shared"].sum() < 11
    again = sparsetir.from_source(sch.func.script())
    assert again.script() == sch.func.script()


def test_ignore() -> None:
    """The caller's word that no row is in several pieces: plain stores, and no flags."""
    sch, writes = scheduled(Spmm(reduce="max"))
    assert sch.combine_row_pieces(writes, race="ignore") == []
    text = sch.func.script()
    assert "C_shared" not in text and "atomic" not in text
    assert text.count("C[ib, k0 * 2 + k1] = C_ws") == len(writes)


def test_a_cpu_refuses() -> None:
    sch, writes = scheduled()
    sch.combine_row_pieces(writes, race="atomics")
    with pytest.raises(ScheduleError, match="_write_add' adds atomically, which target llvm does"):
        lower(sch, target="llvm")


def meeting(writes: Any = slice(None), race: str = "atomics", init: bool = True) -> None:
    """Pieces of the sum, some of them; without a plain init its value is precomputed."""
    sch, refs = scheduled()
    if not init:
        k = sch.get_sp_iters(sch.get_sparse_iteration("spmm_init"))[-1]
        sch.precompute("C", k, [])
    sch.combine_row_pieces(refs[writes], race=race)


def combine_reductions() -> None:
    sch = Schedule(decomposed(Spmm()))
    rule = FORMAT.rules(OPERAND)[0]
    sch.combine_row_pieces([sch.get_sparse_iteration(f"spmm_{rule.name}")], race="atomics")


def written(old: str, new: str, reduce: str = "sum") -> None:
    """Sums of pieces of a program with another text in workspaces, which meet."""
    text = decomposed(Spmm(reduce=reduce)).script()
    assert old in text
    sch, writes = Schedule(sparsetir.from_source(text.replace(old, new))), []
    for rule in FORMAT.rules(OPERAND):
        it = sch.get_sparse_iteration(f"spmm_{rule.name}")
        *outer, columns, k = sch.get_sp_iters(it)
        sch.sparse_reorder(it, [*outer, k, columns])
        writes.append(sch.precompute("C", k, [])[-1])
    sch.combine_row_pieces(writes, race="atomics")


REFUSED = """
written("float32", "float64", "max")
    race="atomics" expects a sum of float32, .. , got a max of float64; legal
meeting(slice(1, None))  # 'C' is accessed outside of [ .. ] and 'spmm_init'
combine_reductions()  # expected spatial loops around X[..] = X[..] + term
meeting(slice(0))  # argument 'iterations': expected one or more, got none
meeting(race="temporary")  # argument 'race': expected one of atomics, ignore, got 'temporary'
meeting(init=False)  # expected an iteration that sets 'C' before it is added to
written("= T.float32(0.0)", "= T.float32(1.0)")
    expected 'C' to be set to T.float32(0.0) before, got
written("C[ib, k]", "C[0, k]")  # expected one coordinate of a sparse axis among
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    message = says(code, words, globals(), ScheduleError)
    assert message.startswith("combine_row_pieces: ")


def test_atomic_iterations_are_reductions() -> None:
    sch = Schedule(decomposed(Spmm()))
    with pytest.raises(ScheduleError, match="^atomic: expected X.* a sum of .* got another body"):
        sch.atomic(sch.get_sparse_iteration("spmm_init"))
    (it,) = [x for x in sparse_iterations(sch.func) if x.name == "spmm_init"]
    marked = iteration_with(it, annotations={"atomic": 1})
    body = map_expr(sch.func.body, [(SparseIteration, lambda x: marked if x.same_as(it) else x)])
    with pytest.raises(
        LoweringError, match="'spmm_init': annotation 'atomic': expected X.* a sum of"
    ):
        sparsetir.lower_sparse_iter(sch.func.replace(body=body))
