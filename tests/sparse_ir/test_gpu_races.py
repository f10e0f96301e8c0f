"""Loops over blocks and threads whose visits add to the same elements, on the CUDA runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_turns
from programs import copied
from schedule_common import keeps_meaning, program
from sparsetir.sparse_ir.nodes import sparse_iterations, stores_of
from spmm_gpu_common import bfloat16_arrays

Apply = Callable[[Any], None]


def loops(sch: Any) -> tuple[Any, list[Any]]:
    """The one iteration of a function and its loops."""
    (it,) = sparse_iterations(sch.func)
    handle = sch.get_sparse_iteration(it.name)
    return handle, sch.get_sp_iters(handle)


def result(sch: Any) -> str:
    """The buffer that a program writes."""
    (it,) = sparse_iterations(sch.func)
    return it.init.buffer.name


def by_elements(race: str, threads: int = 64, tail: str = "repeat") -> Apply:
    """A lane for each element of all rows: Sgap's {1 nnz, all columns, r}."""

    def apply(sch: Any) -> None:
        it, (i, j, *rest) = loops(sch)
        into = result(sch)
        sparse = [i, j, *(x for x in rest if sch.func.axis(x.name).is_sparse)]
        rest = [x for x in rest if x not in sparse]
        element = sch.positions(sch.sparse_fuse(it, sparse))
        blocks, lanes = sch.split(element, [None, threads], tail=tail)
        sch.sparse_reorder(it, [blocks, lanes, *rest])
        if rest:
            tiles, columns = sch.split(rest[-1], [None, 2])
            sch.sparse_reorder(it, [*rest[:-1], tiles, blocks, lanes, columns])
            sch.precompute(into, lanes, [columns])
            for outer in (*rest[:-1], tiles):
                sch.parallelize(outer, "block")
        sch.parallelize(blocks, "block", race="atomics")
        sch.parallelize(lanes, "thread", race=race)

    return apply


def in_pairs_of_columns(sch: Any, rest: list[Any]) -> tuple[list[Any], list[Any]]:
    """The last of some loops in tiles of two: those around them, and what is in them."""
    if not rest:
        return [], []
    tiles, last = sch.split(rest[-1], [None, 2])
    return [*rest[:-1], tiles], [last]


def by_rows(race: str, lanes: int, rows: int = 4) -> Apply:
    """Lanes that share a row: Sgap's {1/lanes row, all columns, r}."""

    def apply(sch: Any) -> None:
        it, (i, j, *rest) = loops(sch)
        into = result(sch)
        steps, lane = sch.strip_mine_rows(j, lanes)
        rest, columns = in_pairs_of_columns(sch, rest)
        sch.sparse_reorder(it, [*rest, i, lane, steps, *columns])
        sch.precompute(into, lane, columns)
        for outer in rest:
            sch.parallelize(outer, "block")
        sch.parallelize(i, "thread", per_block=rows)
        sch.parallelize(lane, "thread", race=race)

    return apply


def by_chunks(size: int, threads: int = 32, race: str = "atomics") -> Apply:
    """A thread for so many elements in a row: Sgap's {g nnz, all columns, 1}."""

    def apply(sch: Any) -> None:
        it, (i, j, *rest) = loops(sch)
        into = result(sch)
        chunks, pieces, elements = sch.split(sch.sparse_fuse(it, [i, j]), [None, size])
        rest, columns = in_pairs_of_columns(sch, rest)
        sch.sparse_reorder(it, [*rest, chunks, pieces, elements, *columns])
        sch.precompute(into, pieces, columns)
        for outer in rest:
            sch.parallelize(outer, "block")
        sch.parallelize(chunks, "thread", race=race, per_block=threads)

    return apply


def check(name: str, apply: Apply, dtype: str = "float32", idtype: str = "int32") -> Any:
    """A program of the table with a schedule keeps its meaning; the kernel."""
    sch = sparsetir.Schedule(program(name, dtype, idtype))
    apply(sch)
    kernel = CudaStages(program(name, dtype, idtype), apply)
    return keeps_meaning(sch, name, dtype, idtype, run=kernel)


SUMS = ["spmv", "spmm", "row_sum"]


def all_of_one(names: list[str], options: list[Any]) -> list[Any]:
    """(name, option): all of the first name, the first option of the others; the rest is slow."""
    pairs = [(name, option) for name in names for option in options]
    quick = [pair for pair in pairs if pair[0] == names[0] or pair[1] == options[0]]
    marks = {False: [pytest.mark.slow], True: []}
    return [pytest.param(*pair, marks=marks[pair in quick]) for pair in pairs]


@requires_cuda_text
@pytest.mark.parametrize(("name", "size"), all_of_one(SUMS, [2, 1, 8, 32]))
@pytest.mark.default("spmv-1", "row_sum-2")
def test_segments(name: str, size: int) -> None:
    """Blocks of 8 elements or more, whole ones and the last one, whose code differs."""
    check(name, by_elements(f"segment({size})", threads=max(size, 8)))


@requires_cuda_text
@pytest.mark.parametrize("tail", ["guard", "repeat"])
@pytest.mark.default("repeat")
def test_segments_of_tensors(tail: str) -> None:
    """Elements of three levels, whose rows and columns are computed."""
    check("mttkrp", by_elements("segment(16)", tail=tail))


@requires_cuda_text
@pytest.mark.parametrize(("name", "way"), all_of_one(SUMS, [
    ("group(8)", 24), ("group(1)", 1), ("group(4)", 4), ("group(8)", 32), ("temporary", 16),
    ("temporary", 32), ("atomics", 4),
]), ids=str)  # fmt: skip
@pytest.mark.default("spmv-('atomics', 4)", "row_sum-('group(8)', 24)")
def test_groups(name: str, way: tuple[str, int]) -> None:
    """Four rows in a block: groups of less than a warp lie beside those of other rows."""
    race, lanes = way
    kernel = check(name, by_rows(race, lanes))
    launches = kernel.function.kernel_names
    whole = race == "temporary" or race == f"group({lanes})"
    assert len(launches) == (1 if whole else 2)  # what sets rows before is not needed


@requires_cuda_text
@pytest.mark.parametrize(
    ("name", "size"), by_turns([("spmv", 1), ("spmm", 7), ("spmv", 7), ("spmm", 1)], 2)
)
@pytest.mark.default("spmv-7")
def test_chunks(name: str, size: int) -> None:
    check(name, by_chunks(size))
    kernel = check(name, by_chunks(size, race="temporary"))
    assert kernel.function.counts["atomics"] == 0  # results are the same in any order


# -- refusals --------------------------------------------------------------------------------------


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
    """Arguments of `spmm` with three columns, `spmv` and programs of one value a row."""
    rng = np.random.default_rng(len(name))
    indptr = np.concatenate([[0], np.cumsum(LENGTHS)]).astype("int32")
    m, n, nnz = len(LENGTHS), 2000, int(indptr[-1])
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    columns = [np.sort(rng.choice(n, length, replace=False)) for length in LENGTHS]
    args: dict[str, Any] = {"m": m, "n": n, "nnz": nnz, "indptr": indptr}
    args["indices"] = np.concatenate(columns).astype("int32")
    args["a"] = rng.standard_normal(nnz).astype(kind)
    if extremes:
        for row, values in zip((2, 3, 4, 6), EXTREMES, strict=True):
            args["a"][indptr[row + 1] - 2 : indptr[row + 1]] = values
    if name == "spmm":
        args |= {"b": rng.standard_normal((n, 3)).astype(kind), "feat": 3}
        args["c"] = np.full((m, 3), np.nan, kind)
    elif name == "spmv":
        args |= {"x": rng.standard_normal(n).astype(kind), "y": np.full(m, np.nan, kind)}
    else:
        args["y"] = np.full(m, np.nan, kind)
    return args


def minima() -> Any:
    """`row_max` the other way round."""
    text = program("row_max").script()
    assert text.count("T.max(") == 1 and text.count("-3.4") == 1
    return sparsetir.from_source(text.replace("T.max(", "T.min(").replace("-3.4", "3.4"))


@requires_cuda_text
@pytest.mark.parametrize(("name", "dtype", "threads", "parts"), by_turns([
    ("spmm", "float32", 64, 3), ("spmv", "float32", 1024, 0), ("spmv", "float64", 256, 0),
    ("row_max", "float32", 128, 2), ("row_min", "float32", 64, 0), ("spmv", "float16", 512, 0),
    ("spmm", "bfloat16", 64, 0),
], 2))  # fmt: skip
@pytest.mark.default("spmm-float32-64-3", "spmv-float64-256-0")
def test_blocks(name: str, dtype: str, threads: int, parts: int) -> None:
    """Rows shorter and longer than a block, empty ones, columns that take turns."""
    wider = {"float16": "float32", "bfloat16": "float32"}.get(dtype)
    func = minima() if name == "row_min" else program(name, dtype)
    kernel = CudaStages(func, by_block(threads, wider, parts))
    args = arguments(name, dtype)
    want = copied(args)
    exact = program(name) if wider else func
    if wider:
        want |= {k: v.astype(wider) for k, v in want.items() if k in "abcxy"}
    sparsetir.interpret(exact, want)
    with bfloat16_arrays():
        outs = kernel(args)
    assert kernel.function.counts["atomics"] == 0
    (output,) = set(outs) & {"c", "y"}
    # Sums are in float32: what is left of 16 bits is one rounding.
    close = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-4}.get(dtype, 1e-12)
    values = np.asarray(outs[output], "float64")
    np.testing.assert_allclose(values, want[output], rtol=close, atol=close)


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
