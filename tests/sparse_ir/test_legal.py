"""Visits have no order; which loops are free of races, against all pairs of visits."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.error import DiagnosticError

from schedule_common import opened
from sparsetir import IllFormedError, ScheduleError, from_source
from sparsetir.sparse_ir.legal import parallelizable, races, reorderable, writes_disjoint
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    SparseIteration,
    buffer_var,
    sparse_iterations,
)
from sparsetir.sparse_ir.parallel import parallel_units
from sparsetir.sparse_ir.races import Fact
from sparsetir.sparse_ir.schedule.loops import find_iteration
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
    (IKR + '    C[i] = T.cast(T.cast(C[i], "int32"), "float32") + B[i, k]', "'k' read 'C'"),
    (IKR + '    C[i] = T.cast(T.cast(C[i], "float16"), "float32") + B[i, k]', "'k' read 'C'"),
    (IJ + '    X[i] = T.max(T.cast(T.cast(X[i], "int8"), "int32"), 3)', "differ in 'j' read 'X'"),
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
    IKR + '    C[i] = T.cast(T.cast(C[i], "float64") + T.cast(B[i, k], "float64"), "float32")',
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
    assert parallelizable(func, it) == [Fact("free"), Fact("reduction", ("C",))]
    assert [writes_disjoint(func, it, place) for place in (0, 1)] == [True, False]


def test_a_gpu_may_meet_at_what_is_updated_atomically() -> None:
    """Atomics serve sums and nothing else; threads of a CPU have none."""
    body = 'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n    C[i] = C[i] + A[i, j]\n'
    sch, ref, _ = opened(from_source(source(body)), "it")
    plain = find_iteration(sch.func, "it")
    sch.atomic(ref)
    atomic = find_iteration(sch.func, "it")
    fact = parallelizable(sch.func, atomic)[1]
    assert fact.buffers == ("C",)
    assert not races(atomic, fact, "block") and not races(atomic, fact, "thread")
    assert races(plain, fact, "block") and races(atomic, fact, "cpu")
    assert races(atomic, Fact("reduction", ("C", "D")), "block")


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


Sums = list[list[int]]  # a coefficient per coordinate and a constant, per dimension


def dense(name: str, length: Any) -> Axis:
    return Axis(name=name, kind="dense_fixed", length=_int(length))


def slots(name: str, parent: Axis, length: Any) -> Axis:
    """Fixed lengths: as many coordinates under each parent."""
    indices = tirx.Var("idx", "handle")
    return Axis(
        name=name, kind="sparse_fixed", length=_int(length), parent=parent, nnz_cols=_int("w"),
        indices=indices,
    )  # fmt: skip


def compressed(name: str, parent: Axis, length: Any, unique: bool = True) -> Axis:
    indptr, indices = tirx.Var("ptr", "handle"), tirx.Var("idx", "handle")
    return Axis(
        name=name, kind="sparse_variable", length=_int(length), parent=parent, nnz=_int("nnz"),
        indptr=indptr, indices=indices, unique=unique,
    )  # fmt: skip


def _int(value: Any) -> Any:
    return tirx.Var(value, "int32") if isinstance(value, str) else tirx.IntImm("int32", value)


def iteration(axes: list[Any], kinds: str, *accesses: Sums, wide: bool = False) -> Any:
    """`Y[accesses[0]] = Y[accesses[0]] + Y[accesses[1]] + ...`"""
    coords = [tirx.Var(c, "int32") for c in "ijklm"[: len(kinds)]]
    y = buffer_var([1000] * len(accesses[0]), "float32", "Y")

    def index(coefficients: list[int]) -> Any:
        terms = [tirx.Cast("int64", c) if wide else c for c in coords]
        total: Any = None
        for term, c in zip(terms, coefficients, strict=False):
            if c:
                term = term if c == 1 else term * c
                total = term if total is None else total + term
        last = coefficients[-1]
        if total is None:
            return _int(last)
        return total if last == 0 else total + last

    places = [[index(c) for c in sums] for sums in accesses]
    value = tirx.BufferLoad(y, places[0])
    for place in places[1:]:
        value = value + tirx.BufferLoad(y, place)
    return SparseIteration(
        span=None, axes=axes, kinds=kinds, name="it", vars=coords, init=None,
        body=tirx.BufferStore(y, value, places[0]), annotations={},
    )  # fmt: skip


def random_axes(rng: np.random.Generator) -> tuple[list[Axis], list[Any], list[int]]:
    """Axes; for each the coordinates stored (by parent position if it has one); its level."""
    lengths = [int(n) for n in rng.integers(1, 5, 3)]
    shown = [n if rng.random() < 0.8 else f"n{axis}" for axis, n in enumerate(lengths)]
    axes: list[Axis] = [dense("I", shown[0])]
    stored: list[Any] = [list(range(lengths[0]))]
    levels = [0]
    how = rng.choice(["dense", "slots", "compressed", "coo"])
    n = lengths[1]
    if how == "dense":
        axes.append(dense("J", shown[1]))
        stored.append([list(range(n))] * lengths[0])
    else:
        make = {"slots": slots, "compressed": compressed}.get(how)
        axes.append(make("J", axes[0], shown[1]) if make else compressed("J", axes[0], n, False))
        width = int(rng.integers(0, n + 1))
        sizes = [width if how == "slots" else int(rng.integers(0, n + 1))] * lengths[0]
        repeat = how == "coo"
        stored.append([sorted(rng.choice(n, size=s, replace=repeat)) for s in sizes])
    levels.append(0 if how in ("dense", "slots") else 1)
    axes.append(dense("K", shown[2]))
    stored.append(list(range(lengths[2])))
    levels.append(levels[-1])
    return axes, stored, levels


def random_sums(rng: np.random.Generator, lengths: list[int]) -> Sums:
    """Dimensions that often are numbers in a mixed base."""
    out: Sums = []
    for _ in range(rng.integers(1, 3)):
        chosen = [int(a) for a in rng.permutation(3)[: rng.integers(1, 4)]]
        coefficients, step = [0] * 4, 1
        for axis in chosen:
            coefficients[axis] = step if rng.random() < 0.85 else int(rng.integers(-2, 5))
            step *= lengths[axis]
        coefficients[3] = int(rng.integers(0, 3))
        out.append(coefficients)
    return out


def test_free_loops_are_free() -> None:
    """No two visits at different positions of a free loop meet, whatever loops of its level do."""
    rng = np.random.default_rng(0)
    counts = {"free": 0, "not": 0, "sums": 0}
    for _ in range(1500):
        axes, stored, levels = random_axes(rng)
        lengths = [int(getattr(a.length, "value", 4)) for a in axes]
        sums = random_sums(rng, lengths)
        accesses = [sums]
        if rng.random() < 0.3:
            other = random_sums(rng, lengths)
            accesses.append([*other, *sums][: len(sums)])
        kinds = "".join("SSSR"[n] for n in rng.integers(0, 4, 3))
        it = iteration(axes, kinds, *accesses, wide=bool(rng.random() < 0.5))
        visits = [
            ((i, p, k), (stored[0][i], coordinate, stored[2][k]))
            for i in range(len(stored[0]))
            for p, coordinate in enumerate(stored[1][i])
            for k in range(len(stored[2]))
        ]
        touched = [
            {tuple(int(np.dot(s, (*c, 1))) for s in place) for place in accesses} for _, c in visits
        ]
        free = parallel_units(it)
        for x in free:
            assert kinds[x] == "S"
            counts["sums"] += all(sum(c != 0 for c in s[:3]) > 1 for s in sums)
            fixed = [n for n in range(3) if levels[n] < levels[x]]
            for ((a, _), ta), ((b, _), tb) in product(zip(visits, touched, strict=True), repeat=2):
                if a[x] != b[x] and all(a[n] == b[n] for n in fixed):
                    assert not ta & tb, (it, x, a, b)
        counts["free"] += len(free)
        counts["not"] += 3 - len(free)
    assert min(counts.values()) > 200, counts


I, K = dense("I", "m"), dense("K", "n")
II, ONE = dense("II", 16), dense("O", 1)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("axes", "kinds", "accesses", "free"),
    [
        ([I, II, K], "SSS", [[[16, 1, 0, 0], [0, 0, 1, 0]]], [0, 1, 2]),
        ([I, II, K], "SRS", [[[16, 0, 0, 0], [0, 0, 1, 0]]], [0, 2]),
        ([I, II, K], "SRS", [[[16, 1, 0, 0], [0, 0, 1, 0]]], [2]),  # a reduction in the sum
        ([I, II, K], "SSS", [[[15, 1, 0, 0], [0, 0, 1, 0]]], [2]),  # blocks overlap
        ([I, II, K], "SSS", [[[1, 16, 0, 0], [0, 0, 1, 0]]], [2]),  # how many I is not known
        ([I, II], "SS", [[[-16, 1, 5]]], [0, 1]),
        ([I, ONE], "SS", [[[1, 1, 0]]], [0, 1]),
        ([I, II], "SS", [[[16, 1, 0]], [[16, 1, 1]]], []),  # the next element
        ([I, II], "SS", [[[16, 1, 1]], [[16, 1, 1]]], [0, 1]),
        ([I, II], "SS", [[[16, 1, 0], [1, 0, 0]], [[16, 1, 1], [1, 0, 0]]], [0]),
        ([I, II], "SS", [[[0, 0, 3]]], []),
        ([I, slots("J", I, "n")], "SS", [[[1, 0, 0], [0, 1, 0]]], [0, 1]),
        ([I, slots("J", I, "n")], "RS", [[[0, 1, 0]]], []),  # differ in a row only
        ([ONE, slots("J", ONE, "n")], "RS", [[[0, 1, 0]]], [1]),
        ([I, compressed("J", I, "n")], "RS", [[[0, 1, 0]]], [1]),
        ([I, compressed("J", I, "n", False)], "SS", [[[1, 0, 0], [0, 1, 0]]], [0]),
        ([I, K, AttachedAxis(slots("J", I, "n"), K)], "SRS", [[[0, 0, 1, 0]]], []),
        ([FusedAxis([I, II]), K], "SSR", [[[16, 1, 0, 0]]], [0]),
        ([FusedAxis([I, II]), K], "SRS", [[[1, 0, 0, 0], [0, 0, 1, 0]]], [1]),
    ],
)
def test_which_loops_are_free(
    axes: list[Any], kinds: str, accesses: list[Sums], free: list[int], wide: bool
) -> None:
    assert parallel_units(iteration(axes, kinds, *accesses, wide=wide)) == free


def test_what_is_a_sum() -> None:
    """Casts keep the number of a coordinate; divisions and products of coordinates are no sums."""
    it = iteration([I, II], "SS", [[16, 1, 0]])
    i, ii = it.vars
    narrow = tirx.Cast("int32", tirx.Cast("int64", i) * 16 + tirx.Cast("int64", ii))
    size = tirx.Var("m", "int32")
    for index, free in (
        (narrow, [0, 1]), ((i - 1) * 16 - (ii - i * 2) + i * -2, [0, 1]), (i * ii, []),
        (tirx.floordiv(i * 16, 2) + ii, []), (size * i, []), (size * i + ii, []), (i * 16 - i, [0]),
        (i * 16 + ii + size, [0, 1]),
    ):  # fmt: skip
        body = tirx.BufferStore(it.body.buffer, tirx.const(1.0, "float32"), [index])
        other = SparseIteration(
            span=None, axes=list(it.axes), kinds="SS", name="it", vars=list(it.vars), init=None,
            body=body, annotations={},
        )  # fmt: skip
        assert parallel_units(other) == free, index
