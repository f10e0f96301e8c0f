"""Passes that write code out: for each of some values, in whole steps, where there are visits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from schedule_common import opened, says, table
from sparsetir.schedules.gpu.passes.row_loops import skip_if_empty, unroll_with_remainder
from sparsetir.schedules.passes.specialize_on_value import specialize_on_value
from sparsetir.sparse_ir.errors import ScheduleError


def in_panels(by: str) -> tuple[Any, Any, Any]:
    """A schedule of spmm with sums of a pattern in a workspace, gone on to stage II; its reduce."""
    sch, it, (i, j, k) = opened()
    sch.bound(k, 4, "exact")
    panels, patterns, entries, rows = sch.group_columns_by_pattern(i, j, 3, by=by)
    k = sch.get_sp_iters(it)[-1]
    sch.sparse_reorder(it, [panels, patterns, entries, rows, k])
    _, reduce, _ = sch.precompute("C", patterns, [rows, k])
    return sch, sch.lower(), reduce


def spmm(sch: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel of a schedule gives, and what it should."""
    a = sp.random_array((20, 17), density=0.4, format="csr", dtype="float32", rng=0)
    a = sp.csr_array(a.toarray() * (np.arange(20) // 3 != 2)[:, None])  # a panel without any
    b = np.random.default_rng(0).random((17, 4), "float32")
    c = np.full((20, 4), np.nan, "float32")
    indptr, indices = a.indptr.astype("int32"), a.indices.astype("int32")
    sparsetir.build(sch)(a=a.data, b=b, c=c, indptr=indptr, indices=indices, m=20, n=17, nnz=a.nnz,
                         feat=4)  # fmt: skip
    return c, a @ b


def with_cases(sch: Any, loops: Any, by: str) -> None:
    if by == "count":
        sch.rewrite(specialize_on_value, "spmm0", "I_counts", range(1, 4))
    else:
        coordinate = loops.get(loops.get_sblock("spmm0")).iter_vars[-1].var.name
        sch.rewrite(specialize_on_value, "spmm0", str(coordinate), range(7))


@pytest.mark.parametrize("by", ["pattern", "count"])
@pytest.mark.parametrize("count", [1, 3])
def test_results_stay(by: str, count: int) -> None:
    sch, loops, reduce = in_panels(by)
    sch.rewrite(skip_if_empty, "spmm0", reduce)
    sch.rewrite(unroll_with_remainder, reduce, count)
    with_cases(sch, loops, by)
    found, wanted = spmm(sch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_texts() -> None:
    sch, loops, reduce = in_panels("count")
    before = loops.mod.script()
    assert before.count('T.sblock("spmm_reduce0")') == 1
    sch.rewrite(skip_if_empty, "spmm0", reduce)
    sch.rewrite(unroll_with_remainder, reduce, 4)
    with_cases(sch, loops, "count")
    text = loops.mod.script()
    # Three cases, each in steps and by itself, chosen by two questions for what there is.
    assert text.count('T.sblock("spmm_reduce0")') == 3 * 2
    asked = re.findall(r"if (I_counts\[\S+\]) < (\d):", text)
    assert [n for _, n in asked] == ["2", "3"]
    assert len(re.findall(r"in T.unroll\(4\)", text)) == 3
    loops = re.findall(r"for \w+ in T.serial\((.*), unroll=False\)", text)
    assert [x.replace(" ", "")[-2:] for x in loops] == ["/4", "%4"] * 3
    assert len(re.findall(r"if I_entries_indptr.* - I_entries_indptr.* > 0:", text)) == 3


REFUSED = """
rewritten(specialize_on_value, "spmm1", "I_counts", range(1, 4))
    specialize_on_value: argument 'block': expected the name of one block, got 'spmm1'
rewritten(specialize_on_value, "spmm0", "I_rows", range(1, 4))
    specialize_on_value: argument 'what': expected a coordinate of block 'spmm0',
rewritten(specialize_on_value, "spmm0", "I_members", range(3))
    or a buffer that it loads at one place known there, got 'I_members'
rewritten(specialize_on_value, "spmm0", "I_counts", [])
    specialize_on_value: argument 'values': expected increasing integers, got []
rewritten(specialize_on_value, "spmm0", "I_counts", [2, 1])
    specialize_on_value: argument 'values': expected increasing integers, got [2, 1]
rewritten(unroll_with_remainder, "spmm_rest", 2)
    unroll_with_remainder: expected a sparse iteration among
rewritten(unroll_with_remainder, "spmm_reduce", 0)
    unroll_with_remainder: argument 'count': expected a positive integer, got 0
rewritten(skip_if_empty, "spmm0", "spmm_rest")
    skip_if_empty: expected a sparse iteration among
rewritten(skip_if_empty, "spmm_init0", "spmm_reduce")
    skip_if_empty: argument 'block': expected one around 'spmm_reduce' in which
"""


def rewritten(*args: Any) -> Any:
    return in_panels("count")[0].rewrite(*args)


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    says(code, words, globals(), ScheduleError)
