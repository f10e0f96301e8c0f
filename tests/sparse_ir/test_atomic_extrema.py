"""Maxima and minima that threads take atomically, on the CUDA runner, against the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_turns
from programs import PROGRAMS
from schedule_common import program
from small import text_of

PROGRAM = text_of("extrema", """
with T.sp_iter([E], "S", "extrema") as [e]:
    Y[ROWS[e]] = {value}
""", "E = T.dense_fixed(nnz)", "{dtype}", A="E", Y="I", ROWS="E int32")  # fmt: skip
TEST = "T.Select({test}, A[e], Y[ROWS[e]])"
FORMS = {
    "max": "T.max(Y[ROWS[e]], A[e])",
    "min": "T.min(Y[ROWS[e]], A[e])",
    "max without NaN": TEST.format(test="A[e] > Y[ROWS[e]]"),
    "min without NaN": TEST.format(test="A[e] < Y[ROWS[e]]"),
    "max or NaN": TEST.format(test="A[e] > Y[ROWS[e]] or T.isnan(A[e])"),
    "min or NaN": TEST.format(test="A[e] < Y[ROWS[e]] or T.isnan(A[e])"),
}
# What rows hold before, and the least that a float has: of both signs, and NaN of both signs.
BEFORE = np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 0.0], "float32")
BEFORE[9] = np.copysign(np.float32(np.nan), np.float32(-1))
SOME = np.array([0.0, -0.0, 2.5, -2.5, 1e-45, -1e-45, 3e38, -3e38, np.inf, -np.inf], "float32")


def made(form: str, dtype: str = "float32") -> Any:
    return sparsetir.from_source(PROGRAM.format(dtype=dtype, value=FORMS[form]))


def atomically(sch: Any) -> None:
    """Blocks of 32 threads, one for each term."""
    (loop,) = sch.get_sp_iters(sch.get_sparse_iteration("extrema"))
    sch.parallelize(loop, "thread", per_block=32, race="atomics")


def arguments(dtype: str, nan: bool) -> dict[str, Any]:
    """Terms of all kinds for rows that hold values of all kinds; one row has none."""
    rng = np.random.default_rng(3)
    size = 40 * len(BEFORE)
    rows = rng.integers(0, 4 * len(BEFORE) - 1, size).astype("int32")
    if dtype == "int32":
        before = rng.integers(-(2**31), 2**31, 4 * len(BEFORE))
        return {
            "a": rng.integers(-(2**31), 2**31, size).astype(dtype), "y": before.astype(dtype),
            "rows": rows, "nnz": size, "m": len(before),
        }  # fmt: skip
    before, terms = np.tile(BEFORE, 4), rng.choice(SOME, size)
    if nan:
        signs = rng.choice(np.array([-1, 1], "float32"), size)
        terms = np.where(rng.random(size) < 0.05, np.copysign(np.float32(np.nan), signs), terms)
    else:
        before = np.where(np.isnan(before), np.float32(-7), before)
    return {"a": terms, "y": before, "rows": rows, "nnz": size, "m": len(before)}


@requires_cuda_text
@pytest.mark.parametrize(("form", "dtype"), by_turns([
    *((form, "float32") for form in FORMS), ("max", "int32"), ("min", "int32"),
], 2))  # fmt: skip
def test_extrema(form: str, dtype: str) -> None:
    """Extrema in any order of visits, with NaN where the program defines its effect."""
    args = arguments(dtype, nan=form not in ("max", "min"))
    want = args | {"y": args["y"].copy()}
    sparsetir.interpret(made(form, dtype), want)
    kernel = CudaStages(made(form, dtype), atomically)
    np.testing.assert_array_equal(kernel(args)["y"], want["y"])
    assert kernel.function.counts["atomics"] >= 300


@requires_cuda_text
def test_rows_in_several_chunks() -> None:
    """Maxima of rows in one chunk are written, those of others taken atomically."""
    text = program("row_max").script()
    func = sparsetir.from_source(re.sub(r"T.float32\(-3.4.*\)", 'T.float32("-inf")', text))
    assert 'T.float32("-inf")' in func.script()

    def chunks(sch: Any) -> None:
        it = sch.get_sparse_iteration("row_max")
        chunk, piece, _ = sch.split(sch.sparse_fuse(it, sch.get_sp_iters(it)), [None, 4])
        sch.precompute("Y", piece, [])
        sch.parallelize(chunk, "thread", race="atomics", per_block=32)

    kernel = CudaStages(func, chunks)
    for case in ("small", "dense_row", "empty"):
        args = PROGRAMS["row_max"].inputs(np.random.default_rng(0), case, "float32", "int32")
        want = args | {"y": args["y"].copy()}
        sparsetir.interpret(func, want)
        np.testing.assert_array_equal(kernel(args)["y"], want["y"])
        assert case != "dense_row" or kernel.function.counts["atomics"]


def product(sch: Any) -> None:
    text = sch.func.script().replace("T.max(Y[ROWS[e]], A[e])", "Y[ROWS[e]] * A[e]")
    atomically(sparsetir.Schedule(sparsetir.from_source(text)))


def wide(sch: Any) -> None:
    text = sch.func.script().replace('"float32"', '"float64"')
    atomically(sparsetir.Schedule(sparsetir.from_source(text)))


@pytest.mark.parametrize(("apply", "got"), [
    (product, "a product of float32"), (wide, "a max of float64"),
])  # fmt: skip
def test_refused(apply: Callable[[Any], None], got: str) -> None:
    with pytest.raises(sparsetir.ScheduleError) as error:
        apply(sparsetir.Schedule(made("max")))
    assert str(error.value).startswith(
        "parallelize: atomics expect a sum of float32, float64, int32 or a max of float32, int32 "
        f"or a min of float32, int32, got {got} in 'extrema'; legal are groups of all threads that "
        "share a row"
    )
