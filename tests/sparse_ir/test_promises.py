"""Promises about sizes and assumptions: which guards go, what is checked and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from computed_common import blocked
from positions_common import relations
from refusals import refusals
from schedule_common import read_back
from sparsetir import ScheduleError
from sparsetir.sparse_ir.promises import check_promises
from sparsetir.sparse_ir.recipes.registry import RECIPES
from sparsetir.sparse_ir.verify import verify

CASES = [
    ("exact", 64, [64], [0, 63, 65, 128], "expected 64, as its schedule promises, got"),
    ("max", 64, [0, 63, 64], [65, 2**62], "expected at most 64, as its schedule promises, got"),
    ("min", 64, [64, 2**62], [0, 63], "expected at least 64, as its schedule promises, got"),
    ("multiple", 64, [0, 64, 640], [1, 63, 100],
     "expected a multiple of 64, as its schedule promises, got"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "kept", "broken", "message"), CASES)
def test_check(kind, value, kept, broken, message):
    promises = [{"param": "feat", "kind": kind, "value": value}]
    for number in kept:
        check_promises("spmm", promises, {"feat": number})
        check_promises("spmm", promises, {"feat": np.int64(number)})
    for number in broken:
        with pytest.raises(ValueError, match=rf"^spmm: argument 'feat': {message} {number}$"):
            check_promises("spmm", promises, {"feat": number})


def promised(**promise):
    verify(blocked(promises=[promise]))


test_refusals = refusals(
    """
promised(kind="max", value=3)  # IllFormedError: expected a dict of 'param', 'kind' and 'value'
promised(param="q", kind="max", value=3)
    # IllFormedError: promise about 'q': no such parameter; there
promised(param="a", kind="max", value=3)
    # IllFormedError: 'a': expected a parameter of an integer type
promised(param="m", kind="near", value=3)
    # IllFormedError: 'm': expected a kind among ['exact', 'max', 'min', 'multiple'], got 'near'
promised(param="m", kind="max", value=1.5)
    # IllFormedError: expected an integer of 0 or more, got 1.5
promised(param="m", kind="max", value=-1)
    # IllFormedError: expected an integer of 0 or more, got -1
promised(param="m", kind="multiple", value=0)
    # IllFormedError: expected an integer of 1 or more, got 0
verify(relations.with_attr("assumed", "J"))
    # IllFormedError: attribute 'assumed': expected a list, got 'J'
verify(relations.with_attr("assumed", [{"fact": "filled"}]))
    # IllFormedError: expected a fact among .. 'coordinates', 'filled', 'inside' .. and what
""",
    globals(),
)


def text(sch: Any) -> str:
    return sparsetir.lower_sparse_iter(sch.func).script()


def test_guards_go_with_what_is_assumed() -> None:
    sch = sparsetir.Schedule(relations)
    assert "if_then_else" in text(sch) and "if J_indices[vi, vj] >= 0" in text(sch)
    sch.assume("coordinates", buffer="ETYPE", axis="R")
    assert "if_then_else" not in text(sch) and "if J_indices[vi, vj] >= 0" in text(sch)
    sch.assume("filled", axis="J")
    assert "J_indices[vi, vj] >= 0" not in text(sch)
    before = sch.func
    sch.assume("filled", axis="J")
    assert tvm_ffi.structural_equal(sch.func, before)
    read_back(sch, relations)


def test_orders_hold_each_position_once_part_by_part() -> None:
    indices = np.array([5, 0, 3, 4, 1, 1, 2, 0], "int32")
    order = RECIPES["order_by_column_parts"](indices, 6, 3)
    assert sorted(order) == list(range(8))
    assert (indices[order] // 2).tolist() == sorted(indices // 2)
    assert order.tolist() == [1, 4, 5, 7, 2, 6, 0, 3]
    indptr = np.array([0, 3, 3, 8], "int32")
    rows = RECIPES["row_of_position"](indptr)
    assert rows.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
    assert (RECIPES["row_of_position"](indptr, order) == rows[order]).all()
    assert (RECIPES["in_order"](indices, order) == indices[order]).all()
    with pytest.raises(ScheduleError, match="order_by_column_parts: argument 'parts': expected 1"):
        RECIPES["order_by_column_parts"](indices, 6, 0)


GATHERED = """
@T.prim_func
def gather(x: T.handle, out: T.handle, indptr: T.handle, rows: T.handle, offsets: T.handle,
           m: T.int32, nnz: T.int32, few: T.int32, some: T.int32, slots: T.handle):
    T.func_attr({"computed": {"slots": {
        "recipe": "positions_of_rows", "indptr": "$indptr", "rows": "$rows", "offsets": "$offsets"
    }}})
    I = T.dense_fixed(m)
    J = T.dense_variable(I, (nnz, nnz), indptr)
    ROW = T.dense_fixed(few)
    SLOT = T.dense_variable(ROW, (some, some), offsets)
    NNZ = T.dense_fixed(nnz)
    X = T.match_sparse_buffer(x, (NNZ,), "float32")
    OUT = T.match_sparse_buffer(out, (ROW, SLOT), "float32")
    ROWS = T.match_sparse_buffer(rows, (ROW,), "int32")
    SLOTS = T.match_sparse_buffer(slots, (ROW, SLOT), "int32")
    with T.sp_iter([ROW, SLOT], "SS", "gather") as [r, s]:
        OUT[r, s] = X[SLOTS[r, s]]
"""


def test_positions_of_what_callers_give_are_checked() -> None:
    """The load has no guard, as the recipe's results are positions of nonzeros."""
    func = sparsetir.from_source(GATHERED)
    assert "if_then_else" not in sparsetir.lower_sparse_iter(func).script()
    kernel = sparsetir.build(func)
    x, indptr = np.arange(5, dtype="float32"), np.array([0, 2, 5], "int32")
    for rows, offsets, wanted in (([1, 0], [0, 3, 5], [2, 3, 4, 0, 1]), ([1], [0, 2**20], None)):
        args: dict[str, Any] = {
            "x": x, "out": np.zeros(offsets[-1], "float32"), "indptr": indptr,
            "rows": np.array(rows, "int32"), "offsets": np.array(offsets, "int32"), "m": 2,
        }  # fmt: skip
        if wanted is not None:
            kernel(**args)
            assert args["out"].tolist() == wanted
            continue
        with pytest.raises(
            ScheduleError,
            match=r"gather: computed parameter 'slots': expected recipe 'positions_of_rows' to "
            r"make numbers in \[0, 5\), which guards are proven from, got 2 to 1048577",
        ):
            kernel(**args)
