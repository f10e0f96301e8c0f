"""Names and conditions of programs that look like the compiler's own mean what they say."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from tvm.error import DiagnosticError

import sparsetir
from schedule_common import program
from small import small, text_of
from sparsetir.schedules.passes.parallel_loops import run_in_parallel
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.row_tile import apply as apply_row_tile

ScheduleError = sparsetir.ScheduleError


product = small("product", """
with T.sp_iter([I, K0, K], "SRS", "f") as [i, k0, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, k0] * B[k0, k]
""", "K0 = T.dense_fixed(n)\nK = T.dense_fixed(p)", A="I K0", B="K0 K", C="I K")  # fmt: skip


def split_beside_its_name() -> tuple[Any, Any]:
    sch = sparsetir.Schedule(product)
    it = sch.get_sparse_iteration("f")
    i, k0, k = sch.get_sp_iters(it)
    outer, inner = sch.split(k, [None, 4])
    sch.sparse_reorder(it, [k0, i, outer, inner])
    return sch, it


def test_a_reduction_is_not_run_in_parallel_for_its_name() -> None:
    """Split makes a coordinate `k0` beside the program's own: facts are of variables, not names."""
    rng = np.random.default_rng(0)
    A, B = rng.random((200, 300), dtype="float32"), rng.random((300, 40), dtype="float32")
    kernel = sparsetir.build(split_beside_its_name()[0])
    loops = kernel.stages["III"].script().split("C[")[0]
    assert not re.search(r"for k0 in T.parallel", loops)
    for _ in range(3):
        C = np.full((200, 40), np.nan, "float32")
        kernel(A, B, C)
        np.testing.assert_allclose(C, A @ B, rtol=1e-4)


def test_facts_of_loops_of_one_name() -> None:
    sch, _ = split_beside_its_name()
    stage_two = sch.lower()
    reduced, i, tiles, _ = stage_two.get_loops(stage_two.get_sblock("f0"))
    with pytest.raises(ScheduleError, match=r"'vk0' is no free variable \(reduction\)"):
        run_in_parallel(stage_two, reduced, "parallel")
    for loop in (i, tiles):
        run_in_parallel(stage_two, loop, "parallel")


TEXT = text_of("f", """
with T.sp_iter([I, J], "SS", "copy") as [i, j]:
    HERE
""", "J = T.dense_fixed(n)", A="I J", C="I J")  # fmt: skip


def each(line: str, then: str = "") -> Any:
    """A program that does this for each place."""
    return sparsetir.from_source(
        TEXT.replace("HERE", line + (f"\n            {then}" if then else ""))
    )


lower_triangle = each("if T.likely(i >= j):", "C[i, j] = A[i, j]")
upper_triangle = each("if T.likely(i <= j):", "C[i, j] = A[i, j]")
clamped = each("C[i, j] = A[i, T.min(j, 7)] + A[T.min(i, n - 16), j]")


@pytest.mark.parametrize(("func", "total"), [(lower_triangle, 546.0), (upper_triangle, 483.0)])
@pytest.mark.parametrize("tail", [None, "guard", "shift", "repeat"])
def test_a_predicate_of_the_program_stays(func: Any, total: float, tail: str | None) -> None:
    sch = sparsetir.Schedule(func)
    if tail is not None:
        _, j = sch.get_sp_iters(sch.get_sparse_iteration("copy"))
        sch.split(j, [None, 4], tail=tail)
    A = np.arange(1, 43, dtype="float32").reshape(6, 7)
    kernel = sparsetir.build(sch)
    for run in (kernel, lambda a, c: sparsetir.interpret(sch.func, (a, c, 6, 7))):
        C = np.zeros_like(A)
        run(A, C)
        assert C.sum() == total
    # Where the predicate ends beyond the loop, too, what is around the result stays.
    for m, n in ((50, 7), (4, 33), (40, 4)):
        A, around = np.ones((m, n), "float32"), np.zeros((3, m, n), "float32")
        kernel(A, around[1])
        kept = np.tril(A) if func is lower_triangle else np.triu(A)
        np.testing.assert_array_equal(around, [0 * A, kept, 0 * A])


SPMM = program().script()
some_features = sparsetir.from_source(re.sub(
    r"\n        (C\[i, k\] = C)", r"\n        if T.likely(k < 20):\n            \1", SPMM
))  # fmt: skip


@pytest.mark.parametrize("tail", [None, "guard", "shift", "repeat"])
def test_a_predicate_of_a_reduction_stays(tail: str | None) -> None:
    sch = sparsetir.Schedule(some_features)
    it = sch.get_sparse_iteration("spmm")
    if tail is not None:
        i, j, k = sch.get_sp_iters(it)
        outer, inner = sch.split(k, [None, 16], tail=tail)
        sch.sparse_reorder(it, [outer, i, j, inner])
        sch.precompute("C", i, [inner])
    rng = np.random.default_rng(0)
    A = scipy.sparse.random(9, 11, 0.3, "csr", "float32", rng=rng)
    B = rng.random((11, 37), dtype="float32")
    expected = A @ B
    expected[:, 20:] = 0
    C = np.full((9, 37), np.nan, "float32")
    sparsetir.build(sch)(A.data, B, C, A.indptr, A.indices)
    np.testing.assert_allclose(C, expected, rtol=1e-5)


@pytest.mark.parametrize("tail", [None, "guard", "shift", "repeat"])
@pytest.mark.parametrize("n", [16, 17, 33, 48])
def test_a_minimum_of_the_program_stays(tail: str | None, n: int) -> None:
    sch = sparsetir.Schedule(clamped)
    if tail is not None:
        _, k = sch.get_sp_iters(sch.get_sparse_iteration("copy"))
        sch.split(k, [None, 4], tail=tail)
    A = np.random.default_rng(0).random((50, n), dtype="float32")
    C = np.full_like(A, np.nan)
    sparsetir.build(sch)(A, C)
    i, k = np.arange(50)[:, None], np.arange(n)
    np.testing.assert_array_equal(C, A[i, np.minimum(k, 7)] + A[np.minimum(i, n - 16), k])


# Column sums, whose init is a separate iteration, beside names that it would have.
named_like_inits = small("named_like_inits", """
with T.sp_iter([I, J], "RS", "sums") as [i, j]:
    with T.init():
        C[j] = 0.0
    C[j] = C[j] + A[i, j]
with T.sp_iter([J_all], "S", "sums_init") as [x]:
    D[x] = B[x] * 2.0
""", "J_all = T.dense_fixed(m)", A="I J", B="J_all", C="N", D="J_all")  # fmt: skip


def test_names_that_a_separate_init_would_have() -> None:
    A = scipy.sparse.random(9, 12, 0.3, "csr", "float32", rng=np.random.default_rng(1))
    B, C, D = np.arange(9, dtype="float32"), np.full(12, np.nan, "float32"), np.zeros(9, "float32")
    sparsetir.build(named_like_inits)(A.data, B, C, D, A.indptr, A.indices)
    np.testing.assert_allclose(C, np.asarray(A.sum(0)).ravel(), rtol=1e-6)
    np.testing.assert_array_equal(D, 2 * B)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('T.sp_iter_attr({"parallel": []})', "'parallel', which parallelize sets"),
        ('T.sp_iter_attr({"cut": {}})', "'cut', which pos or coord sets"),
        ('T.sp_iter_attr({"atomic": 1})', "'atomic', which race=\"atomics\""),
        ('T.sp_iter_attr({"group": {}})', "'group', which race=\"group"),
        ('T.sp_iter_attr({"ranges": []})', "'ranges', which ranges sets"),
        ('T.sp_iter_attr({"sparsetir.races": {}})', "those that begin with 'sparsetir.' are not"),
        ("if T.tail(i >= j):\n            C[i, j] = 1.0", "T.tail marks .* expected T.likely"),
        ("C[i, T.at_most(j, 5)] = 1.0", "T.at_most marks .* expected T.min"),
        ('if T.call_intrin("bool", "sparsetir.tail", i >= j):\n            C[i, j] = 1.0',
         "T.tail marks"),
    ],
)  # fmt: skip
def test_what_primitives_write_is_refused_from_programs(
    line: str, message: str, tmp_path: Any
) -> None:
    """A decorated function has none of it, and `annotate` sets none."""
    body = TEXT.replace("HERE", line)
    if "C[" not in line:
        body += "        C[i, j] = A[i, j]\n"
    path = tmp_path / "mine.py"
    path.write_text(f"from tvm.script import sparse_tir as T\n{body}")
    code = compile(path.read_text(), str(path), "exec")
    with pytest.raises(DiagnosticError) as caught:
        exec(code, {"__name__": "mine", "__file__": str(path)})
    assert re.search(message, str(caught.value))
    key = re.match(r'T.sp_iter_attr\({"([a-z.]+)"', line)
    if key:
        sch = sparsetir.Schedule(lower_triangle)
        with pytest.raises(ScheduleError, match=f"annotate: argument 'key': .*{message}"):
            sch.annotate(sch.get_sparse_iteration("copy"), key[1], 1)


def test_scheduled_text_is_read_back() -> None:
    sch = sparsetir.Schedule(lower_triangle)
    i, j = sch.get_sp_iters(sch.get_sparse_iteration("copy"))
    sch.split(j, [None, 4], tail="shift")
    sch.parallelize(i)
    text = sch.func.script()
    assert "T.tail(T.at_most(" in text and '"parallel"' in text
    assert sparsetir.from_source(text).script() == text


def test_panels_of_rows_that_have_another_name() -> None:
    """A template finds what a primitive made by what made it, not by how its names end."""
    text = SPMM
    for was, name in (("I", "Rows"), ("B", "B_counts")):
        text = re.sub(rf"\b{was}\b", name, text)
    text = sparsetir.from_source(text)
    rng = np.random.default_rng(3)
    A = scipy.sparse.random(33, 21, 0.4, "csr", "float32", rng=rng)
    B = rng.random((21, 32), dtype="float32")
    kernel = sparsetir.build(text, schedule=apply_row_tile, config=RowTile(16, rows=4))
    C = np.full((33, 32), np.nan, "float32")
    kernel(A.data, B, C, A.indptr, A.indices)
    np.testing.assert_allclose(C, A @ B, rtol=1e-5)
