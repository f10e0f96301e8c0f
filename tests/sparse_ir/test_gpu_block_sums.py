"""Sums of all threads of a block (race "temporary" of more than a warp), on the CUDA runner."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sparsetir
from cuda_runner import KernelError, requires_cuda_text
from cuda_stages import CudaStages
from programs import copied
from schedule_common import program
from sparsetir.sparse_ir.nodes import sparse_iterations, stores_of
from spmm_gpu_common import bfloat16_arrays

BARRIER = "__syncthreads();"
LENGTHS = (0, 1, 300, 64, 33, 0, 1500, 0)  # of rows, beside 64 to 1024 threads
EXTREMES = ((np.inf, 1.0), (np.nan, 2.0), (-np.inf, 3.0), (np.inf, -np.inf))


def by_block(threads: int, dtype: str | None = None, parts: int = 0) -> Callable[[Any], None]:
    """All threads of a block share a row, or one after the other those of a part of the rows."""

    def apply(sch: Any) -> None:
        (plain,) = sparse_iterations(sch.func)
        (store,) = stores_of(plain.body)
        it = sch.get_sparse_iteration(plain.name)
        i, j, *columns = sch.get_sp_iters(it)
        rows = sch.divide(i, parts) if parts else [i]
        steps, lane = sch.strip_mine_rows(j, threads)
        sch.sparse_reorder(it, [*rows, lane, steps, *columns])
        for column in columns:
            sch.bound(column, 3, "exact")
        sch.precompute(store.buffer.name, lane, columns, dtype=dtype)
        sch.parallelize(rows[0], "block")
        sch.parallelize(lane, "thread", race="temporary")

    return apply


def arguments(name: str, dtype: str, extremes: bool = False) -> dict[str, Any]:
    """Of `spmm` with three columns, `spmv` and programs of one value a row."""
    rng = np.random.default_rng(len(name))
    indptr = np.concatenate([[0], np.cumsum(LENGTHS)]).astype("int32")
    m, n, nnz = len(LENGTHS), 2000, int(indptr[-1])
    made = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    columns = [np.sort(rng.choice(n, length, replace=False)) for length in LENGTHS]
    given: dict[str, Any] = {"m": m, "n": n, "nnz": nnz, "indptr": indptr}
    given["indices"] = np.concatenate(columns).astype("int32")
    given["a"] = rng.standard_normal(nnz).astype(made)
    if extremes:
        for row, values in zip((2, 3, 4, 6), EXTREMES, strict=True):
            given["a"][indptr[row + 1] - 2 : indptr[row + 1]] = values
    if name == "spmm":
        given |= {"b": rng.standard_normal((n, 3)).astype(made), "feat": 3}
        given["c"] = np.full((m, 3), np.nan, made)
    elif name == "spmv":
        given |= {"x": rng.standard_normal(n).astype(made), "y": np.full(m, np.nan, made)}
    else:
        given["y"] = np.full(m, np.nan, made)
    return given


def minima() -> Any:
    """`row_max` the other way round."""
    text = program("row_max").script()
    assert text.count("T.max(") == 1 and text.count("-3.4") == 1
    return sparsetir.from_source(text.replace("T.max(", "T.min(").replace("-3.4", "3.4"))


@requires_cuda_text
@pytest.mark.parametrize(("name", "dtype", "threads", "parts"), [
    ("spmm", "float32", 64, 3), ("spmv", "float32", 1024, 0), ("spmv", "float64", 256, 0),
    ("row_max", "float32", 128, 2), ("row_min", "float32", 64, 0), ("spmv", "float16", 512, 0),
    ("spmm", "bfloat16", 64, 0),
])  # fmt: skip
def test_blocks(name: str, dtype: str, threads: int, parts: int) -> None:
    """Rows shorter and longer than a block, empty ones, columns that take turns."""
    wider = {"float16": "float32", "bfloat16": "float32"}.get(dtype)
    func = minima() if name == "row_min" else program(name, dtype)
    kernel = CudaStages(func, by_block(threads, wider, parts))
    given = arguments(name, dtype)
    want = copied(given)
    exact = program(name) if wider else func
    if wider:
        want |= {k: v.astype(wider) for k, v in want.items() if k in "abcxy"}
    sparsetir.interpret(exact, want)
    with bfloat16_arrays():
        got = kernel(given)
    assert kernel.function.counts.atomics == 0
    (output,) = set(got) & {"c", "y"}
    # Sums are in float32: what is left of 16 bits is one rounding.
    close = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-4}.get(dtype, 1e-12)
    found = np.asarray(got[output], "float64")
    np.testing.assert_allclose(found, want[output], rtol=close, atol=close)


@requires_cuda_text
def test_infinities_and_nan_stay_in_their_rows() -> None:
    given = arguments("row_sum", "float32", extremes=True)
    found = CudaStages(program("row_sum"), by_block(64))(given)["y"]
    np.testing.assert_array_equal(found[[2, 3, 4, 6]], [np.inf, np.nan, -np.inf, np.nan])
    np.testing.assert_array_equal(found[[0, 1, 5, 7]], [0, given["a"][0], 0, 0])


@requires_cuda_text
@pytest.mark.parametrize("number", [0, 1])
def test_a_barrier_that_is_missing_is_found(number: int) -> None:
    """Before what warps have is kept, as columns take turns, and after it."""

    def edit(source: str) -> str:
        parts = source.split(BARRIER)
        assert len(parts) == 3
        return BARRIER.join(parts[:2]) + parts[2] if number else parts[0] + BARRIER.join(parts[1:])

    kernel = CudaStages(program("spmm"), by_block(64), edit=edit)
    with pytest.raises(KernelError, match="race: .*warps.* with no barrier between them"):
        kernel(arguments("spmm", "float32"))


def test_other_threads_beside_them_are_refused() -> None:
    """Threads of a row that is none would leave the others waiting."""
    sch = sparsetir.Schedule(program("spmv"))
    it = sch.get_sparse_iteration("spmv")
    i, j = sch.get_sp_iters(it)
    steps, lane = sch.strip_mine_rows(j, 64)
    sch.sparse_reorder(it, [i, lane, steps])
    sch.precompute("Y", lane, [])
    sch.parallelize(i, "thread", per_block=2)
    sch.parallelize(lane, "thread", race="temporary")
    with pytest.raises(sparsetir.LoweringError) as error:
        sparsetir.lower(sch, target={"kind": "cuda", "arch": "sm_90"})
    assert str(error.value) == (
        "sp_iter 'spmv_write': annotation 'group': expected 64 lanes to be all threads of their "
        "block, as they wait for each other, got ['I'] of 'spmv' beside them; legal are loops over "
        "blocks, or groups within a warp"
    )
