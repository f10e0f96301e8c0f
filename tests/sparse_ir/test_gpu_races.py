"""Loops over blocks and threads whose visits add to the same elements, on the CUDA runner."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from cuda_runner import KernelError, requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import cuda_source, requires_nvcc
from pairs import by_default, by_turns
from programs import PROGRAMS, copied
from schedule_common import opened
from sparsetir import ScheduleError
from sparsetir.sparse_ir.nodes import sparse_iterations
from spmm_gpu_common import compile_cuda

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
@pytest.mark.parametrize(("what", "instead"), [
    ("atomicAdd(", "not_atomic("),  # blocks would race for a row
])  # fmt: skip
def test_an_atomic_that_is_missing_is_found(what: str, instead: str) -> None:
    program = PROGRAMS["spmv"]
    prelude = "static void not_atomic(float* x, float y) { *x += y; }\n"

    def edit(source: str) -> str:
        assert what in source
        return prelude.replace("static", "__device__") + source.replace(what, instead)

    func = program.make("float32", "int32")
    kernel = CudaStages(func, by_elements("segment(4)", threads=32), edit=edit)
    given = program.inputs(np.random.default_rng(1), program.cases[0], "float32", "int32")
    given |= {"a": np.ones(40, "float32"), "indices": np.zeros(40, "int32"), "nnz": 40}
    given["indptr"] = np.array([0, *[40] * int(given["m"])], "int32")
    with pytest.raises(KernelError, match="race|depends on the order"):
        kernel(given)


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


@requires_nvcc
@pytest.mark.parametrize("arch", by_default(["sm_80", "sm_90"], "sm_90"))
@pytest.mark.parametrize(("apply", "has"), [
    (by_elements("segment(32)"), ["shfl.sync", "vote.sync.ballot", "red.global.add|atom.global"]),
    (by_rows("temporary", 8), ["shfl.sync"]),
    (by_chunks(4), ["red.global.add|atom.global"]),
], ids=["segment", "group", "chunks"])  # fmt: skip
def test_instructions(apply: Apply, has: list[str], arch: str, tmp_path: Any) -> None:
    import re

    stages = sparsetir.lower(
        PROGRAMS["spmm"].make("float32", "int32"), apply, target={"kind": "cuda", "arch": arch}
    )
    made = compile_cuda(cuda_source(stages["III"]), tmp_path, arch)
    assert all(re.search(each, made.ptx) for each in has)
    assert made.spills == 0


# -- refusals --------------------------------------------------------------------------------------


def positioned(sch: Any, it: Any, i: Any, j: Any, k: Any) -> list[Any]:
    """[blocks, threads, columns] of a loop over all elements."""
    element = sch.positions(sch.sparse_fuse(it, [i, j]))
    blocks, threads = sch.split(element, [None, 64])
    sch.sparse_reorder(it, [blocks, threads, k])
    return [blocks, threads, k]


def part_lanes(sch: Any, it: Any, i: Any, j: Any, k: Any, lanes: int = 8) -> list[Any]:
    """[rows, lanes, columns] with sums of lanes in workspaces."""
    sch.bound(k, 2, "exact")
    steps, lane = sch.strip_mine_rows(j, lanes)
    sch.sparse_reorder(it, [i, lane, steps, k])
    sch.precompute("C", lane, [k])
    return [i, lane]


def lanes_outside(sch: Any, it: Any, i: Any, j: Any, k: Any) -> Any:
    """Lanes around the loop over their steps."""
    steps, lane = sch.strip_mine_rows(j, 8)
    sch.sparse_reorder(it, [i, k, lane, steps])
    return lane


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (
        lambda s, it, i, j, k: s.parallelize(i, "thread", race="segment(3)"),
        'argument \'race\': expected "none" or "ignore" or "atomics" or "temporary" or "group(r)" '
        'or "segment(r)" for unit "thread", got \'segment(3)\', r a power of two up to 32',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(i, "block", race="group(4)"),
        'expected "none" or "ignore" or "atomics" for unit "block", got \'group(4)\'',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(i, "block", per_block=4),
        "argument 'per_block': expected None for unit \"block\", whose visits are no threads, "
        "got 4",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(i, "thread", per_block=2048),
        "argument 'per_block': expected None or 1 to 1024 visits of a loop over \"warp\" or "
        '"thread", got 2048 for "thread"',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(i, "thread"),
        'expected one loop over a dense axis of constant extent for unit "thread", as split makes, '
        "or steps of what rows store, or per_block=n, got ['I']",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(s.split(k, [None, 2048])[1], "thread"),
        "expected at most 1024 visits, as a block has threads, got 2048 of 'K1'; split it",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(positioned(s, it, i, j, k)[0], "block"),
        "loop 'I_J0' is not proven free of races (scatter: C); legal are loops whose coordinates "
        'each write elements of their own, or race="ignore" where you know that visits do not '
        'meet, and race="atomics" of a sum',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(part_lanes(s, it, i, j, k)[1], "thread"),
        'meet, race="atomics" or "segment(r)" of a sum, and "group(r)" of threads of one row',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(
            positioned(s, it, i, j, k)[1], "thread", race="group(32)"
        ),
        "lanes of 'I_J1' add to different elements, [I_at[ij0 * 64 + ij1], k]; legal is "
        'race="segment(32)", where each run of lanes with the same one is added up',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(
            part_lanes(s, it, i, j, k)[1], "thread", race="segment(8)"
        ),
        "all lanes of 'J_lanes' add to the same element, [i, k]; legal is race=\"group(8)\"",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(
            part_lanes(s, it, i, j, k, 12)[1], "thread", race="group(8)"
        ),
        "argument 'race': expected a loop over a multiple of 8 threads, got 12 of 'J_lanes'",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(
            part_lanes(s, it, i, j, k, 48)[1], "thread", race="temporary"
        ),
        "race=\"temporary\" expects a power of two of threads, got 48 of 'J_lanes'; legal is "
        'race="group(32)" of a multiple',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(
            part_lanes(s, it, i, j, k)[1], "thread", race="group(8)", per_block=8
        ),
        "argument 'per_block': expected None for race 'group(8)', whose threads are all of one "
        "block, got 8",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(s.split(k, [None, 8])[1], "thread", race="group(8)"),
        "visits of 'K1' do not add to the same elements; legal is race=\"none\"",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(
            lanes_outside(s, it, i, j, k), "thread", race="group(8)"
        ),
        "expected the sum over ['J_steps'] in a workspace, which precompute makes",
    ),
]


@pytest.mark.parametrize(("apply", "message"), REFUSED)
def test_refused(apply: Callable[..., Any], message: str) -> None:
    sch, it, handles = opened()
    with pytest.raises(ScheduleError) as error:
        apply(sch, it, *handles)
    text = str(error.value)
    assert text.startswith("parallelize: ") and message in text and "in T.sp_iter" in text, text


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


def too_many(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    """64 rows of 32 lanes in a block."""
    rows, lanes = part_lanes(sch, it, i, j, k, 32)
    sch.parallelize(rows, "thread", per_block=64)
    sch.parallelize(lanes, "thread", race="temporary")


def no_warps(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    rows, lanes = part_lanes(sch, it, i, j, k, 8)
    sch.parallelize(rows, "warp", per_block=4)
    sch.parallelize(lanes, "thread", race="temporary")


def threads_inside(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    """Lanes that are no neighbours, which shuffles would take for such."""
    _, lane = part_lanes(sch, it, i, j, k, 8)
    (write,) = sch.parallelize(lane, "thread", race="temporary")
    sch.parallelize(sch.get_sp_iters(write)[0], "thread")


def of_other_sizes(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    """Two steps of one kernel, over 2 and over 4 threads."""
    k0, k1, k2 = sch.split(k, [None, 2, 4])
    sch.sparse_reorder(it, [k0, i, j, k1, k2])
    start, _, write = sch.precompute("C", i, [k1, k2])
    sch.parallelize(k0, "block")
    sch.parallelize(sch.get_sp_iters(start)[0], "thread")
    sch.parallelize(sch.get_sp_iters(write)[1], "thread")


@pytest.mark.parametrize(("apply", "message"), [
    (too_many, "expected at most 1024 threads, got {'threadIdx.x': 32, 'threadIdx.y': 64}"),
    (no_warps, "expected 32 threads inside of the loop over warps ['I'], got {'threadIdx.x': 8"),
    (threads_inside, "expected the lanes 'J_lanes' to be the innermost loop over threads, got "
     "threadIdx.y"),
    (of_other_sizes, "expected 4 threads as threadIdx.x in all loops, got {'threadIdx.x': 2}"),
])  # fmt: skip
def test_blocks_that_cannot_be(apply: Callable[..., Any], message: str) -> None:
    sch, it, handles = opened()
    apply(sch, it, *handles)
    with pytest.raises(sparsetir.LoweringError) as error:
        sparsetir.lower(sch, target={"kind": "cuda", "arch": "sm_90"})
    assert message in str(error.value)
