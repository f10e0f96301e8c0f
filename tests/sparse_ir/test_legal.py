"""Visits have no order: programs that need one are refused, and primitives ask."""

from __future__ import annotations

import pytest
from tvm.error import DiagnosticError

from schedule_common import opened
from sparsetir import IllFormedError, ScheduleError, from_source
from sparsetir.sparse_ir.legal import parallelizable, raced, races, reorderable, writes_disjoint
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.schedule.group_columns_by_pattern import group_columns_by_pattern
from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter, find_iteration
from sparsetir.sparse_ir.schedule.peel import peel
from sparsetir.sparse_ir.schedule.positions import positions
from sparsetir.sparse_ir.schedule.ranges import ranges
from sparsetir.sparse_ir.schedule.reorder import sparse_reorder
from sparsetir.sparse_ir.schedule.sell_slices import sell_slices
from sparsetir.sparse_ir.schedule.sort_rows_by_length import sort_rows_by_length
from sparsetir.sparse_ir.schedule.strip_mine_rows import strip_mine_rows
from sparsetir.sparse_ir.verify import verify

SOURCE = """
@T.prim_func{unchecked}
def f(a: T.handle, b: T.handle, c: T.handle, d: T.handle, x: T.handle, p: T.handle, q: T.handle,
      m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q))
    K = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, K), "float32")
    C = T.match_sparse_buffer(c, (I,), "float32")
    D = T.match_sparse_buffer(d, (I, K), "float32")
    X = T.match_sparse_buffer(x, (I,), "int32")
    W = T.alloc_sparse_buffer((), "float32", "local")
{body}
"""


def source(body: str, unchecked: bool = False) -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return SOURCE.format(body=lines, unchecked="(check_well_formed=False)" if unchecked else "")


OVER = 'with T.sp_iter([{0}], "{1}", "it") as [{2}]:\n'
IK = OVER.format("I, K", "SS", "i, k")
IKR = OVER.format("I, K", "SR", "i, k")
IJ = OVER.format("I, J", "SR", "i, j")

# Bodies whose result depends on the order, and what the message says.
ORDERED = [
    (IK + "    D[i, k] = D[i - 1, k + 1] + B[i, k]", "differ in 'i', 'k' read 'D'"),
    (IK + "    D[i, k] = D[i, k - 1] * 2.0", "differ in 'k' read 'D'"),
    (IK + "    D[i, k] = B[i, k]\n    C[i] = D[i, 0]", "'k' read 'D'"),
    (IKR + "    C[i] = C[i] * 0.5 + B[i, k]", "differ in 'k' read 'C'"),
    (IKR + "    C[i] = B[i, k] - C[i]", "differ in 'k' read 'C'"),
    (IKR + "    C[i] = B[i, k] / C[i]", "differ in 'k' read 'C'"),
    (IJ + "    C[i] = A[i, j]", "visits of 'j', a reduction, overwrite what others write to 'C'"),
    (IKR + "    C[i] = T.max(C[i], B[i, k]) + 1.0", "differ in 'k' read 'C'"),
    (IKR + "    C[i] = C[i] + B[i, k]\n    C[i] = T.max(C[i], B[i, k])", "differ in 'k' read 'C'"),
    (IKR + "    if C[i] < 1.0:\n        C[i] = C[i] + B[i, k]", "differ in 'k' read 'C'"),
    (IKR + "    C[i] = C[i] + B[i, k] * C[i - 1]", "differ in .*'k' read 'C'"),
    (IKR + "    C[i] = T.Select(C[i] > 0.0, C[i], B[i, k])", "differ in 'k' read 'C'"),
    (OVER.format("I, J", "SS", "i, j") + "    D[i, X[i]] = D[i, X[i]] * 0.5 + A[i, j]",
     "read 'D', which others write"),
    ('with T.sp_iter([I], "S", "it") as [i]:\n'
     '    with T.sp_iter([K], "S", "in") as [k]:\n'
     "        D[i, k] = B[i, k] + D[i + 1, k]", "differ in 'i' read 'D'"),
]  # fmt: skip

# Bodies whose result does not.
FREE = [
    IK + "    D[i, k] = D[i, k] * 2.0",
    IK + "    D[i, k] = B[i, k]\n    D[i, k] = D[i, k] + D[i, k]",
    IJ + "    C[i] = C[i] + A[i, j]",
    IJ + "    C[i] = C[i] - A[i, j]",
    IJ + "    C[i] = A[i, j] * C[i]",
    IKR + "    C[i] = C[i] / B[i, k]",
    IJ + "    C[i] = T.min(A[i, j], C[i])",
    IJ + "    C[i] = T.Select(A[i, j] > C[i], A[i, j], C[i])",
    IJ + "    if A[i, j] > 0.5:\n        C[i] = 1.0",  # the same in all visits that write
    IK + "    D[i, X[i]] = B[i, k]",  # the author's word
    IK + "    D[X[i], k] = D[X[i], k] + B[i, k]",
    IJ + "    X[i] = X[i] | T.Cast(\"int32\", A[i, j])",
    'with T.sp_iter([I], "S", "it") as [i]:\n'
    "    W[()] = 0.0\n"
    '    with T.sp_iter([J], "R", "in") as [j]:\n'
    "        W[()] = W[()] + A[i, j]\n"
    "    C[i] = W[()] * W[()]",
    'with T.sp_iter([I], "S", "it") as [i]:\n'
    "    C[i] = 0.0\n"
    "    for r in range(3):\n"
    "        C[i] = C[i] * 0.5 + B[i, r]",  # a plain loop goes in its order
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), ORDERED)
def test_programs_that_need_an_order_are_refused(body: str, message: str) -> None:
    func = from_source(source(body, unchecked=True))
    with pytest.raises(IllFormedError, match=f"its visits have no order, but .*{message}") as error:
        verify(func)
    assert "; expected an update" in str(error.value)
    with pytest.raises(DiagnosticError, match="its visits have no order"):
        from_source(source(body))


@pytest.mark.parametrize("body", FREE)
def test_programs_that_need_no_order_are_taken(body: str) -> None:
    func = from_source(source(body))
    assert all(reorderable(func, it) is None for it in sparse_iterations(func))


def test_questions() -> None:
    func = from_source(source(IJ + "    C[i] = C[i] + A[i, j]"))
    (it,) = sparse_iterations(func)
    assert parallelizable(func, it) == ["free", "reduction: C"]
    assert [writes_disjoint(func, it, place) for place in (0, 1)] == [True, False]


RECURRENCE = source(
    OVER.format("I, J, K", "SSS", "i, j, k") + "    D[i, k] = D[i, k] * 0.5 + A[i, j]",
    unchecked=True,
)
FUSED = RECURRENCE.replace("[I, J, K]", "[T.fuse(I, J), K]")
# Primitives that change the order of visits, with loops i, j and k of the iteration "it".
CHANGES = {
    "sparse_reorder": lambda f, i, j, k: sparse_reorder(f, SparseIterationRef("it"), [k, i, j]),
    "sort_rows_by_length": lambda f, i, j, k: sort_rows_by_length(f, i, j, 8),
    "sell_slices": lambda f, i, j, k: sell_slices(f, i, j, 4),
    "group_columns_by_pattern": lambda f, i, j, k: group_columns_by_pattern(f, i, j, 2),
    "ranges": lambda f, i, j, k: ranges(f, j, 2, 4),
    "strip_mine_rows": lambda f, i, j, k: strip_mine_rows(f, j, 4),
    "peel": lambda f, i, j, k: peel(f, k, 4),
    "positions": lambda f, i, j, k: positions(f, SpIter("it", ("I", "J")), parts=2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_primitives_ask(name: str) -> None:
    func = from_source(FUSED if name == "positions" else RECURRENCE)
    loops = [SpIter("it", (axis,)) for axis in "IJK"]
    with pytest.raises(
        ScheduleError,
        match=f"^{name}: the order of visits of 'it' matters: visits that differ in 'j' read 'D'",
    ):
        CHANGES[name](func, *loops)


def test_a_gpu_may_meet_at_what_is_updated_atomically() -> None:
    """And at nothing else; threads of a CPU at nothing."""
    body = 'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n    C[i] = C[i] + A[i, j]\n'
    sch, ref, _ = opened(from_source(source(body)), "it")
    plain = find_iteration(sch.func, "it")
    sch.atomic(ref)
    atomic = find_iteration(sch.func, "it")
    fact = parallelizable(sch.func, atomic)[1]
    assert raced(fact) == {"C"}
    assert not races(atomic, fact, "block") and not races(atomic, fact, "thread")
    assert races(plain, fact, "block") and races(atomic, fact, "cpu")
    assert races(atomic, f"{fact}, D", "block")


def test_what_follows_each_other_is_left_in_order() -> None:
    """Visits of a run of elements add up until the row changes."""
    sch, it, (i, j, k) = opened()
    tiles, column = sch.split(k, [None, 2])
    outer, inner = sch.split(sch.positions(sch.sparse_fuse(it, [i, j])), [None, 8])
    sch.sparse_reorder(it, [tiles, outer, inner, column])
    sch.segment_accumulate(inner)
    (each,) = [x for x in sparse_iterations(sch.func) if x.name == "spmm_each"]
    assert "its visits follow each other" in str(reorderable(sch.func, each))
    ref = sch.get_sparse_iteration("spmm_each")
    with pytest.raises(ScheduleError, match="its visits follow each other"):
        sch.sparse_reorder(ref, sch.get_sp_iters(ref))
