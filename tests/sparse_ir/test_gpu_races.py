"""Loops over blocks and threads whose visits add to the same elements, on the CUDA runner."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_turns
from programs import PROGRAMS, copied
from schedule_common import opened
from sparsetir.sparse_ir.nodes import sparse_iterations

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


def by_rows(race: str, lanes: int, rows: int = 4) -> Apply:
    """Lanes that share a row: Sgap's {1/lanes row, all columns, r}."""

    def apply(sch: Any) -> None:
        it, (i, j, *rest) = loops(sch)
        into = result(sch)
        steps, lane = sch.strip_mine_rows(j, lanes)
        columns = []
        if rest:
            tiles, last = sch.split(rest[-1], [None, 2])
            rest, columns = [*rest[:-1], tiles], [last]
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
        columns = []
        if rest:
            tiles, last = sch.split(rest[-1], [None, 2])
            rest, columns = [*rest[:-1], tiles], [last]
        sch.sparse_reorder(it, [*rest, chunks, pieces, elements, *columns])
        sch.precompute(into, pieces, columns)
        for outer in rest:
            sch.parallelize(outer, "block")
        sch.parallelize(chunks, "thread", race=race, per_block=threads)

    return apply


def check(name: str, apply: Apply, dtype: str = "float32", idtype: str = "int32") -> Any:
    """A program of the table with a schedule, on all its inputs, against the interpreter."""
    program = PROGRAMS[name]
    func = program.make(dtype, idtype)
    sch = sparsetir.Schedule(func)
    apply(sch)
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    again = sch.trace.apply(func).func
    assert tvm_ffi.structural_equal(again, sch.func, map_free_vars=True)
    kernel = CudaStages(func, apply)
    tolerance = 1e-4 if dtype == "float32" else 1e-11
    for case in program.cases:
        given = program.inputs(np.random.default_rng(1), case, dtype, idtype)
        want, same = copied(given), copied(given)
        sparsetir.interpret(func, want)
        sparsetir.interpret(sch.func, same)
        got = kernel(given)
        arrays = [key for key in want if isinstance(want[key], np.ndarray)]
        for key in arrays:
            for found in (same[key], got[key]):
                np.testing.assert_allclose(found, want[key], rtol=tolerance, atol=tolerance)
    return kernel


SUMS = ["spmv", "spmm", "row_sum"]


def all_of_one(names: list[str], options: list[Any]) -> list[Any]:
    """(name, option): all of the first name, the first option of the others; the rest is slow."""
    pairs = [(name, option) for name in names for option in options]
    quick = [pair for pair in pairs if pair[0] == names[0] or pair[1] == options[0]]
    marks = {False: [pytest.mark.slow], True: []}
    return [pytest.param(*pair, marks=marks[pair in quick]) for pair in pairs]


@requires_cuda_text
@pytest.mark.parametrize(("name", "size"), all_of_one(SUMS, [2, 1, 8, 32]))
def test_segments(name: str, size: int) -> None:
    check(name, by_elements(f"segment({size})"))


@requires_cuda_text
@pytest.mark.parametrize("tail", ["guard", "repeat"])
def test_segments_of_tensors(tail: str) -> None:
    """Elements of three levels, whose rows and columns are computed."""
    check("mttkrp", by_elements("segment(16)", tail=tail))


@requires_cuda_text
@pytest.mark.parametrize(("name", "way"), all_of_one(SUMS, [
    ("group(8)", 24), ("group(1)", 1), ("group(4)", 4), ("group(8)", 32), ("temporary", 16),
    ("temporary", 32), ("atomics", 4),
]), ids=str)  # fmt: skip
def test_groups(name: str, way: tuple[str, int]) -> None:
    """Four rows in a block: groups of less than a warp lie beside those of other rows."""
    race, lanes = way
    kernel = check(name, by_rows(race, lanes))
    launches = kernel.function.kernel_names
    whole = race == "temporary" or race == f"group({lanes})"
    assert len(launches) == (1 if whole else 2)  # what sets rows before is not needed


@requires_cuda_text
@pytest.mark.parametrize("lanes", [2, 32])
def test_groups_of_maxima(lanes: int) -> None:
    """What is first is no identity, as -inf: rows are set before."""
    check("row_max", by_rows("temporary", lanes))


@requires_cuda_text
@pytest.mark.parametrize(
    ("name", "size"), by_turns([("spmv", 1), ("spmm", 7), ("spmv", 7), ("spmm", 1)], 2)
)
def test_chunks(name: str, size: int) -> None:
    check(name, by_chunks(size))
    kernel = check(name, by_chunks(size, race="temporary"))
    assert kernel.function.counts.atomics == 0  # results are the same in any order


@requires_cuda_text
@pytest.mark.parametrize("apply", [
    by_elements("segment(8)"), by_elements("atomics"), by_rows("temporary", 8), by_chunks(4),
], ids=["segment", "atomics", "group", "chunks"])  # fmt: skip
def test_other_types(apply: Apply) -> None:
    check("spmm", apply, "float64", "int64")


@requires_cuda_text
def test_groups_that_follow_each_other_in_a_warp() -> None:
    """Of lanes in the next row of threads; a mask that is wrong would name lanes that are gone."""
    check("spmv", by_rows("group(8)", 8, rows=7))


@requires_cuda_text
def test_infinities_and_nan_stay_in_their_rows() -> None:
    """Lanes that have nothing to add, and those of other rows, add nothing."""
    program = PROGRAMS["spmv"]
    for apply in (by_elements("segment(32)"), by_rows("temporary", 8), by_chunks(3)):
        kernel = CudaStages(program.make("float32", "int32"), apply)
        values = np.array([np.inf, 1, np.nan, 2, -np.inf, 3, 4], "float32")
        given = {
            "a": values, "x": np.ones(3, "float32"), "y": np.zeros(5, "float32"),
            "indptr": np.array([0, 1, 2, 3, 3, 7], "int32"), "m": 5, "n": 3, "nnz": 7,
            "indices": np.array([0, 1, 2, 0, 0, 1, 2], "int32"),
        }  # fmt: skip
        found = kernel(given)["y"]
        np.testing.assert_array_equal(found, [np.inf, 1, np.nan, 0, -np.inf])


# -- refusals --------------------------------------------------------------------------------------


def test_vectors_are_loops_of_stage_one_too() -> None:
    """On a CPU: steps of a workspace in vectors, beside what the default schedule does."""
    sch, it, (i, j, k) = opened()
    k0, k1 = sch.split(k, [None, 4], tail="shift")
    sch.sparse_reorder(it, [k0, i, j, k1])
    for step in sch.precompute("C", i, [k1]):
        sch.parallelize(sch.get_sp_iters(step)[-1], "vector")
    kernel = sparsetir.build(sch)
    assert kernel.stages["III"].script().count("T.vectorized(4)") == 3
    program = PROGRAMS["spmm"]
    given = program.inputs(np.random.default_rng(1), "small", "float32", "int32")
    want = copied(given)
    sparsetir.interpret(sch.func, want)
    kernel(**given)
    np.testing.assert_allclose(given["c"], want["c"], rtol=1e-5, atol=1e-5)
