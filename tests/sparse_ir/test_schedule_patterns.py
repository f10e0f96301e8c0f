"""group_columns_by_pattern, loops moved into steps: what they make, the same meaning, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import strategies as st

import sparsetir
from drawing import examples
from positions_common import SOFTMAX
from schedule_common import gives, keeps_meaning, opened, program
from sparsetir.sparse_ir.recipes import patterns as recipes

NAMES = ["spmv", "spmm", "row_sum", "row_max"]


def in_patterns(func: Any, size: int, by: str = "pattern") -> tuple[Any, Any, list[Any]]:
    """A schedule of a program of one iteration, whose first loops are over rows and columns."""
    sch, ref, (rows, columns, *_) = opened(func)
    return sch, ref, sch.group_columns_by_pattern(rows, columns, size, by=by)


@pytest.mark.parametrize(
    ("name", "size", "by", "idtype"),
    [*((n, s, "pattern", "int32") for n, s in zip(NAMES, (2, 3, 4, 5), strict=True)),
     ("spmm", 3, "count", "int32"), ("row_max", 4, "count", "int64")],
)  # fmt: skip
def test_the_result_stays(name: str, size: int, by: str, idtype: str) -> None:
    sch, _, _ = in_patterns(program(name, idtype=idtype), size, by)
    keeps_meaning(sch, name, idtype=idtype)


def test_entries_of_a_large_matrix_exceed_32_bits():
    n = 40_000  # panels * n do not, panels * patterns * n do
    indptr = np.repeat(np.arange(2, dtype="int32"), [n, 1])
    (entry,) = recipes.pattern_entries(indptr, np.array([n - 1], "int32"), n, 4)
    assert entry == ((n // 4 - 1) * 15 + 7) * n + n - 1


@examples(
    60, 1000, m=st.integers(0, 20), n=st.integers(0, 12), density=st.floats(0, 1),
    rows=st.integers(2, 8), seed=st.integers(0, 99), wide=st.sampled_from((1, 1000)),
    by=st.sampled_from(("pattern", "count")),
)  # fmt: skip
def test_each_element_is_in_its_pattern_once(
    m: int, n: int, density: float, rows: int, seed: int, wide: int, by: str
) -> None:
    """Columns may be too many for a table of all of them."""
    a = sp.csr_array(np.random.default_rng(seed).random((m, n)) < density)
    n, indptr, indices = n * wide, a.indptr.astype("int32"), (a.indices * wide).astype("int32")
    entries = recipes.pattern_entries(indptr, indices, n, rows, by)
    ptr = recipes.entry_ptr(entries, n, recipes.panel_count(m, rows), rows)
    order = recipes.pattern_order(indptr, indices, entries, ptr, n, rows, by)
    assert sorted(order) == [*range(a.nnz)]
    values, column_of = recipes.value_ptr(ptr, rows, by), recipes.entry_columns(entries, n)
    patterns = (1 << rows) - 1
    masks = sorted(range(1, patterns + 1), key=lambda x: x.bit_count() if by == "count" else 0)
    assert len(ptr) == recipes.panel_count(m, rows) * patterns + 1 and ptr[-1] == len(column_of)
    row_of = np.repeat(np.arange(m), np.diff(indptr))
    for group in range(len(values)):
        panel, pattern = divmod(group, patterns)
        held = [r for r in range(rows) if masks[pattern] >> r & 1]
        columns = column_of[ptr[group] : ptr[group + 1]]
        assert (np.diff(columns) > 0).all()
        for e, column in enumerate(columns):
            here = order[values[group] + e * len(held) :][: len(held)]
            assert indices[here].tolist() == [column] * len(held)
            assert row_of[here].tolist() == [panel * rows + r for r in held]


M, HEADS = 4, 6


softmax = sparsetir.from_source(SOFTMAX)


def arguments() -> dict[str, Any]:
    indptr = np.array([0, 3, 3, 4, 9], "int32")
    x = np.random.default_rng(0).uniform(-2, 2, (9, HEADS)).astype("float32")
    return {"x": x, "y": x, "indptr": indptr, "m": M, "nnz": 9, "heads": HEADS}


def expected() -> np.ndarray:
    args = arguments()
    out = np.exp(args["x"].astype(float))
    for a, b in zip(args["indptr"], args["indptr"][1:], strict=False):
        out[a:b] /= out[a:b].sum(0)
    return out


def check(sch: Any) -> str:
    """The interpreter and the kernel give the softmax; what is compiled."""
    assert sparsetir.from_source(sch.func.script()).script() == sch.func.script()
    return str(gives(sch, arguments(), {"y": expected()}).stages["III"].script())


@pytest.mark.parametrize("tail", ["guard", "shift"])
@pytest.mark.parametrize("factors", [[None, 4], [None, 1, 2]])
def test_steps_of_tiles(tail: str, factors: list[Any]) -> None:
    sch, _, (_, h) = opened(softmax, "rows")
    _, *inner = sch.split(h, factors, tail=tail)
    sch.distribute(inner)
    check(sch)


@pytest.mark.parametrize("threads", [False, True])
def test_tiles_keep_their_conditions_on_several_threads(threads: bool) -> None:
    """Iterations that set what they change have no race where they take turns."""
    sch, it, (i, h) = opened(softmax, "rows")
    tiles, lanes = sch.split(h, [None, 4], tail="shift")
    outer, i = (tiles, i) if threads else sch.divide(i, 2, by="work")
    sch.sparse_reorder(it, [outer, i, lanes] if threads else [outer, i, tiles, lanes])
    sch.distribute(lanes)
    sch.parallelize(outer)
    assert ("likely" in check(sch)) == threads
    turns = '"vh0": ["scatter", "Y"]' in sparsetir.lower_sparse_iter(sch.func).script()
    assert turns != threads


@pytest.mark.parametrize(("old", "new"), [
    # It changes what no visit sets: to come by twice would double it twice.
    ("T.exp(X[i, j, h] - TOP[()])", "Y[i, j, h] * 2.0"),
    # What is read there was set by no step of this visit.
    ("TOTAL[()] + Y[i, j, h]", "TOTAL[()] + Y[i, j + 1, h]"),
    ("TOTAL[()] + Y[i, j, h]", "TOTAL[()] + Y[i, 0, h]"),
])  # fmt: skip
def test_tiles_that_read_what_others_have_set_keep_their_conditions(old: str, new: str) -> None:
    text = softmax.script()
    assert old in text
    sch, _, (_, h) = opened(sparsetir.from_source(text.replace(old, new)), "rows")
    _, lanes = sch.split(h, [None, 4], tail="shift")
    sch.distribute(lanes)
    assert "likely" in sparsetir.lower_sparse_iter(sch.func).script()
