"""Passes over what a schedule has lowered: what they make, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import tirx
from tvm.script import tirx as T

import sparsetir
from programs import PROGRAMS
from schedule_common import opened, program, says, table
from small import small, text_of
from sparsetir.runtime import pipeline
from sparsetir.schedules.gpu.passes.row_loops import skip_if_empty, unroll_with_remainder
from sparsetir.schedules.passes.drop_identity_order import drop_identity_order  # noqa: F401
from sparsetir.schedules.passes.equal_work import equal_work
from sparsetir.schedules.passes.one_launch import one_launch
from sparsetir.schedules.passes.opaque_step_loop import opaque_step_loop
from sparsetir.schedules.passes.parallel_loops import in_vectors, run_in_parallel
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.passes.row_offsets import row_offsets
from sparsetir.schedules.passes.short_tails import short_tails
from sparsetir.schedules.passes.specialize_on_value import specialize_on_value
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.traversal import map_expr

TWO = text_of("two", """
with T.sp_iter([I], "S", "first") as [i]:
    A[i] = 2.0 * A[i]
with T.sp_iter([J], "S", "second") as [j]:
    B[j] = 3.0 * C[j]
""", "J = T.dense_fixed(n)", A="I", B="J", C="J")  # fmt: skip


MEETS, BOTH = TWO.replace("3.0 * C[j]", "3.0 * A[j]"), ["first", "second"]


def lowered(text, parallel=BOTH):
    sch = sparsetir.Schedule(sparsetir.from_source(text))
    for name in parallel:
        sch.parallelize(sch.get_sp_iters(sch.get_sparse_iteration(name)))
    sch.lower()
    return sch


def test_what_meets_where_the_caller_vouches_for_it():
    sch = lowered(MEETS)
    sch.rewrite(one_launch, BOTH, race="ignore")
    with pytest.raises(ValueError, match="argument 'race': expected 'none' or 'ignore', got 'no'"):
        sch.rewrite(one_launch, BOTH, race="no")


def in_row_panels(by: str) -> tuple[Any, Any, Any]:
    """A schedule of spmm with sums of a pattern in a workspace, gone on to stage II; its reduce."""
    sch, it, (i, j, k) = opened()
    sch.bound(k, 4, "exact")
    panels, patterns, entries, rows = sch.group_columns_by_pattern(i, j, 3, by=by)
    k = sch.get_sp_iters(it)[-1]
    sch.sparse_reorder(it, [panels, patterns, entries, rows, k])
    _, reduce, _ = sch.precompute("C", patterns, [rows, k])
    return sch, sch.lower(), reduce


def spmm_of(sch: Any) -> tuple[np.ndarray, np.ndarray]:
    """The result of a schedule's kernel, and the expected one."""
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
def test_what_is_written_out_means_the_same(by: str, count: int) -> None:
    sch, loops, reduce = in_row_panels(by)
    sch.rewrite(skip_if_empty, "spmm0", reduce)
    sch.rewrite(unroll_with_remainder, reduce, count)
    with_cases(sch, loops, by)
    result, wanted = spmm_of(sch)
    np.testing.assert_allclose(result, wanted, rtol=1e-5)


def rewritten(*args: Any) -> Any:
    return in_row_panels("count")[0].rewrite(*args)


def tiled(vectors: int | None = 2) -> tuple[Any, Any]:
    """A schedule of spmm with sums in registers, or as it is, and the iteration that reduces."""
    sch, it, (i, j, k) = opened()
    if vectors is None:
        return sch, it
    tiles, *straight = sch.split(k, [None, vectors, 4], tail="exact")
    sch.sparse_reorder(it, [i, tiles, j, *straight])
    return sch, sch.precompute("C", tiles, straight)[1]


def with_lanes() -> tuple[Any, Any, Any]:
    """A schedule of sddmm with sums in lanes, and its steps that add them up and write."""
    sch, _, (_, j, k) = opened(program("sddmm"), "sddmm")
    _, lanes = sch.split(k, [None, 4], tail="exact")
    _, _, sums, write = sch.precompute("OUT", j, [], lanes=[lanes])
    return sch, sums, write


def vectors_of(sch: Any) -> int:
    return sparsetir.lower(sch)["II scheduled"].script().count("T.vectorized(")


def test_a_schedule_goes_on_from_a_rewrite() -> None:
    sch, reduce = tiled()
    loops = sch.lower()
    (rows, *_) = loops.get_loops(loops.get_sblock("spmm0"))
    assert sch.rewrite(prefetch_gathered, reduce, "B", 8, 8) is loops is sch.stage_two
    for step in ("spmm_start", reduce, "spmm_write"):
        in_vectors(loops, step)
    assert vectors_of(sch) == 3
    text = sch.trace.as_python()
    assert "sch2 = sch.rewrite(prefetch_gathered, v" in text  # the iteration's handle
    assert text.count("sch2.unroll(") == 3
    again = sch.trace.apply(program())
    assert again.trace.as_python() == text
    assert vectors_of(again) == 3
    with pytest.raises(IndexError, match="Cannot find corresponding LoopRV"):
        loops.unroll(rows)


def test_a_schedule_that_went_on_to_stage_two_is_taken_itself() -> None:
    sch, reduce = tiled()
    with pytest.raises(ScheduleError) as error:
        in_vectors(sch, reduce)
    expected = "argument 'sch': expected a schedule of stage II; call its lower() before"
    assert str(error.value) == f"in_vectors: {expected}"
    loops = sch.lower()
    in_vectors(sch, reduce)
    run_in_parallel(sch, loops.get_loops(loops.get_sblock("spmm0"))[0], "parallel")
    assert vectors_of(sch) == 1
    assert "T.parallel(" in sparsetir.lower(sch)["II scheduled"].script()


def with_a_sum_for_each_lane() -> Any:
    """A schedule of spmm whose tile of sums is added to through one more workspace."""
    sch, reduce = tiled()
    sch.precompute("C_ws", sch.get_sp_iters(reduce)[-1], [], dtype="float64")
    return sch


FUSED_PRODUCTS = PROGRAMS["sddmm_fused"].make("float32", "int32")  # in no order

REFUSED = """
in_vectors(with_a_sum_for_each_lane().lower(), "spmm_reduce", 1)
    in_vectors: loop 'k2' as vectorized: block 'spmm_reduce0' has 'C_ws_ws' for each visit .. in for
in_vectors(tiled()[0].lower(), "spmm_redcue")
    in_vectors: expected a sparse iteration among ['spmm', 'spmm_start', .. got 'spmm_redcue'
in_vectors(tiled()[0].lower(), "spmm_reduce", 3)
    'loops': expected constant extents of the innermost 3 .. got J_indptr[vi + 1] - J_indptr[vi] of
in_vectors(tiled(None)[0].lower(), "spmm", 1)
    'loops': expected constant extents of the innermost 1 of block 'spmm1', got feat of 'k'; split
in_vectors(with_lanes()[0].lower(), "sddmm_write")
    'block': block 'sddmm_write0' is in no loop of its own, so that it has no lanes; leave it out
in_vectors(with_lanes()[0].lower(), "sddmm_sums")
    loop 'k1' as vectorized: block 'sddmm_sums0': 'vk1' is no free variable (reduction): .. in for
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce0", "B", 8, 8)
    prefetch_gathered: expected a sparse iteration among .. got 'spmm_reduce0'
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce", "A", 8, 8)
    prefetch_gathered: argument 'buffer': block 'spmm_reduce0' reads no 'A' at an index that it
tiled()[0].rewrite(prefetch_gathered, "spmm", "B", 8, 8)
    'iteration': expected one with a loop of its own over .. 'J_indices' is read .. the second
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce", "B", -8, 8)
    prefetch_gathered: argument 'distance': expected a positive integer, got -8
tiled()[0].rewrite(prefetch_gathered, "spmm_reduce", "B", 8, 0)
    prefetch_gathered: argument 'span': expected a positive integer, got 0
drop_identity_order(sparsetir.lower_sparse_iter(FUSED_PRODUCTS), "I_J_order")
    drop_identity_order: argument 'order': expected an array that is loaded from, got
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
rewritten(skip_if_empty, "spmm0", "spmm_rest")  # skip_if_empty: expected a sparse iteration among
rewritten(skip_if_empty, "spmm_init0", "spmm_reduce")
    skip_if_empty: argument 'block': expected one around 'spmm_reduce' in which
summed().rewrite(opaque_step_loop, "spmv_reduce", "steps")
    'step': expected a parameter, got 'steps'
summed().rewrite(opaque_step_loop, "spmv_start")  # expected a block in a loop, got 'spmv_st
summed().rewrite(opaque_step_loop, "spmm")  # expected a sparse iteration among
summed(False).rewrite(opaque_step_loop, "spmv")  # 'spmv1', whose init is in the loop
lowered(MEETS).rewrite(one_launch, BOTH)  # 'second' reads or writes 'A', which 'first' writes
lowered(TWO.replace("A[i] = 2.0 * A[i]", "A[i] = 2.0 * B[i]")).rewrite(one_launch, BOTH)
    'second' writes 'B', which 'first' reads
lowered(TWO, BOTH[:1]).rewrite(one_launch, BOTH)  # expected some that follow each other, outermost
lowered(TWO).rewrite(one_launch, BOTH[::-1])  # expected some that follow each other, outermost
lowered(TWO).rewrite(one_launch, BOTH[:1])  # expected some that follow each other, outermost
lowered(TWO).rewrite(one_launch, ["first", "third"])
    expected some that follow each other, outermost
"""


@pytest.mark.parametrize(("_", "code", "words"), table(REFUSED))
def test_refused(_: str, code: str, words: list[str]) -> None:
    says(code, words, globals(), ScheduleError)


def summed(apart: bool = True) -> Any:
    """A schedule of spmv in stage II, with sums in a workspace or in the result."""
    sch, _, (i, _) = opened(program("spmv"), "spmv")
    if apart:
        sch.precompute("Y", i, [])
    sch.lower()
    return sch


def one_at_a_time(sch):
    i, _ = sch.get_sp_iters(sch.get_sparse_iteration("spmv"))
    _, reduce, _ = sch.precompute("Y", i, [])
    sch.lower()
    sch.rewrite(opaque_step_loop, reduce)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_rows_of_any_length(idtype):
    func = PROGRAMS["spmv"].make("float64", idtype)
    kernel = sparsetir.build(func, schedule=one_at_a_time)
    text = kernel.stages["III"].script()
    assert "while j_at[0] < J_indptr[vi + 1]" in text.replace("T.int64(1)", "1"), text
    for counts in ([], [0], [3], [0, 1, 0, 7, 40, 0, 2], [0, 0, 0]):
        rng = np.random.default_rng(len(counts))
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(idtype)
        indices = np.concatenate(
            [np.sort(rng.choice(50, count, replace=False)) for count in counts] or [[]]
        ).astype(idtype)
        a, x, y = rng.random(indptr[-1]), rng.random(50), np.full(len(counts), np.nan)
        kernel(a=a, x=x, y=y, indptr=indptr, indices=indices)
        np.testing.assert_allclose(y, sp.csr_array((a, indices, indptr), (len(counts), 50)) @ x)


def test_loops_of_no_visits_are_not_tiled() -> None:
    """A loop whose extent nothing may be divided by."""
    sums = small("sums", """
with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
    with T.init():
        Y[i, k] = 0.0
    Y[i, k] = Y[i, k] + A[i, j] * X[j, k]
""", "K = T.dense_fixed(0)", A="I J", X="N K", Y="I K")  # fmt: skip
    assert "T.vectorized" not in sparsetir.build(sums).stages["III"].script()


PROGRAM = text_of("f", """
with T.sp_iter([I], "S", "f") as [i]:
    Y[i] = T.{name}(X[i])
""", dtype="{dtype}", X="I", Y="I")  # fmt: skip
# By function: what it is in float64, the largest error in units in the last place of float32, and
# what it gives for NaN, infinities, zero, and beyond what float32 has.
FUNCTIONS = {
    "exp": (np.exp, 1.1, [np.nan, np.inf, 0, 1, np.inf, 0]),
    "tanh": (np.tanh, 1.4, [np.nan, 1, -1, 0, 1, -1]),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 2.5, [np.nan, 1, 0, 0.5, 1, 0]),
}
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0, 200, -200], "float32")


def built(name, dtype="float32"):
    return sparsetir.build(sparsetir.from_source(PROGRAM.format(name=name, dtype=dtype)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors(name):
    exact, most, special = FUNCTIONS[name]
    kernel, random = built(name), np.random.default_rng(0)
    assert f"T.{name}" not in kernel.stages["II scheduled"].script()
    small = 10.0 ** random.uniform(-30, 0, 50_000)
    x = np.concatenate(
        [random.uniform(-87, 88, 200_000), random.uniform(-2, 2, 200_000), small, -small]
    )
    x = x.astype("float32")
    y = np.empty_like(x)
    kernel(x, y)
    right = exact(x.astype("float64"))
    units = np.abs(y - right) / np.spacing(np.abs(right).astype("float32"))
    assert units.max() <= most
    results = np.empty_like(SPECIAL)
    kernel(SPECIAL, results)
    np.testing.assert_array_equal(results, np.array(special, "float32"))


SUMS = small("sums", """
with T.sp_iter([I, J, L], "SRR", "sums") as [i, j, l]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j, l]
""", "L = T.sparse_variable(J, (p, q), (fibers, last))", A="I J L", Y="I")  # fmt: skip


@pytest.mark.parametrize(
    "rows", [np.zeros(0, int), np.zeros(9, int), [7], [0, 900, 0], [1000, *[1] * 99], [3] * 50]
)
def test_parts_of_equal_work(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are visited; no part has more than its share and a row's work."""
    part = re.compile(r"i_part\b")

    def numbered(func: Any, _: int) -> Any:
        func = equal_work(func, 4)
        (loop,) = [x for x in nodes_of(tirx.For, func.body) if part.match(x.loop_var.name)]
        number = tirx.Cast("float32", loop.loop_var)

        def store(node: Any) -> Any:
            array = node.buffer.name == "Y"
            return tirx.BufferStore(node.buffer, number, node.indices) if array else node

        return func.with_body(map_expr(func.body, [(tirx.BufferStore, store)]))

    fibers = np.concatenate([np.arange(1, n + 1) % 3 for n in rows] or [[]]).astype("int64")
    pointers = [np.concatenate([[0], np.cumsum(x)]).astype("int32") for x in (rows, fibers)]
    places = [
        np.concatenate([np.arange(n) for n in x] or [[]]).astype("int32") for x in (rows, fibers)
    ]
    (indptr, ends), (indices, last) = pointers, places
    a, y = np.ones(ends[-1], "float32"), np.full(len(rows), np.nan, "float32")
    sizes = {"m": len(rows), "n": 1000, "nnz": len(fibers), "p": 3, "q": len(a)}
    named = {"indptr": indptr, "indices": indices, "fibers": ends, "last": last, "a": a, "y": y}
    monkeypatch.setattr(pipeline, "pool", lambda: 4)
    sparsetir.build(SUMS)(**named, **sizes)
    np.testing.assert_array_equal(y, np.diff(ends[indptr]))
    monkeypatch.setattr(pipeline, "equal_work", numbered)
    sparsetir.build(SUMS)(**named, **sizes)
    work = 2 + np.diff(indptr) + np.diff(ends[indptr])
    of_part = np.bincount(y.astype(int), work, 16)
    assert (np.diff(y) >= 0).all()
    assert of_part.max() <= work.sum() / 16 + work.max(initial=0)


def test_short_loops_stay_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of one store have a version without threads, by their size; loops over rows do not."""
    monkeypatch.setattr(pipeline, "pool", lambda: 2)
    monkeypatch.setattr(pipeline, "work_of_threads", lambda: 100)

    def versions(func: Any) -> list[list[Any]]:
        choices = [x for x in nodes_of(tirx.IfThenElse, func.body) if x.else_case is not None]
        parts = [part for x in choices for part in (x.then_case, x.else_case)]
        return [[loop.kind for loop in nodes_of(tirx.For, part)] for part in parts]

    serial, parallel = tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL
    two = sparsetir.from_source(TWO)
    assert versions(pipeline.lower(two)["III"]) == [[serial], [parallel]] * 2
    kernel = sparsetir.build(two)
    for m in (0, 1, 99, 100, 101):
        a, b, c = np.ones(m, "float32"), np.full(7, np.nan, "float32"), np.ones(7, "float32")
        kernel(a=a, b=b, c=c, m=m, n=7)
        np.testing.assert_array_equal(a, 2)
        np.testing.assert_array_equal(b, 3)
    rows = pipeline.lower(SUMS)["III"]
    monkeypatch.setattr(pipeline, "short_loops", lambda func, _: func)
    tvm.ir.assert_structural_equal(rows, pipeline.lower(SUMS)["III"], map_free_vars=True)


FILLED = """
@T.prim_func
def filled(c: T.handle, d: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32,
           k: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    K = T.dense_fixed(k)
    S = T.sparse_variable(I, (n, nnz), (indptr, indices))
    C = T.match_sparse_buffer(c, (I, J, K), "float16")
    D = T.match_sparse_buffer(d, (J, K, I), "float64")
    with T.sp_iter([I, J, K], "SSS", "ones") as [i, j, k]:
        C[i, j, k] = T.float16(1.0)
    with T.sp_iter([I, J, K], "SSS", "across") as [i, j, k]:
        D[j, k, i] = T.float64(-2.0)
    with T.sp_iter([I, S, K], "SSS", "twos") as [i, j, k]:
        C[i, j, k] = T.float16(2.0)
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_fills_are_one_loop(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill in order is one loop in a part per thread, apart from what follows; others stay."""
    monkeypatch.setattr(pipeline, "pool", lambda: threads)
    monkeypatch.setattr(pipeline, "work_of_threads", lambda: 100)
    func = sparsetir.from_source(FILLED)
    text = str(pipeline.lower(func)["III"])
    assert text.count("for C_at in") == 1 + (threads > 1) and "for D_at" not in text
    assert (f"for C_part in T.parallel(T.int64({threads}))" in text) == (threads > 1)
    kernel = sparsetir.build(func)
    for m, n, k in ((0, 3, 4), (3, 4, 1), (5, 7, 2), (5, 7, 3), (13, 11, 1)):
        matrix = sp.csr_array(np.eye(m, n, dtype="float32"))
        c, d = np.full((m, n, k), np.nan, "float16"), np.full((n, k, m), np.nan)
        kernel(c, d, matrix.indptr, matrix.indices, m, n, k, matrix.nnz)
        np.testing.assert_array_equal(c, 1 + np.eye(m, n)[:, :, None] * np.ones(k))
        np.testing.assert_array_equal(d, -2)


def test_offsets_of_rows_share_their_product():
    @tvm.script.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(A: T.Buffer((T.int64(64),)), B: T.Buffer((T.int64(64),)), n: T.int64, m: T.int32):
            for i in range(T.int64(4)):
                A[(i + T.int64(1)) * n - T.int64(2)] = B[(i - T.int64(3)) * n]
                A[T.Cast("int64", (m + 1) * m)] = T.Cast("float32", (i + T.int64(1)) * n)

    text = row_offsets(Module["main"]).script()
    assert "A[i * n + n - T.int64(2)] = B[i * n - T.int64(3) * n]" in text
    # Arithmetic of fewer bits could overflow, and so could that of values.
    assert "(m + 1) * m" in text and "(i + T.int64(1)) * n" in text


def test_rows_of_a_tile_end_with_the_axis():
    @tvm.script.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(A: T.Buffer((1024,)), n: T.int32, m: T.int32):
            for i, j, k, l in T.grid(n, 8, 16, 16):
                if i * 16 + k < n and j * 16 + l < m:
                    A[i + k + l] = T.float32(0.0)
            for i, k, l in T.grid(n, 16, 16):
                if i * 16 + k * l < n and i * 16 + k < l:
                    A[i + k + l] = T.float32(1.0)

    func = short_tails(Module["main"])
    extents = [str(x.extent) for x in nodes_of(tirx.For, func.body)]
    ends = [x for x in extents if "T.min(16, n - T.Add(i * 16, 0))" in x]
    assert len(extents) == 7 and len(ends) == 1 and extents.count("16") == 3, extents
