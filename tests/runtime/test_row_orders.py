"""Built kernels visit rows in the order that suits a pattern, from the second call on."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from programs import PROGRAMS
from refusals import refuse
from sparsetir.runtime import row_orders as kernels
from sparsetir.schedules.registers import tasks
from sparsetir.schedules.row_orders import row_orders
from sparsetir.schedules.search import shared_columns as rules
from sparsetir.schedules.search import visit_orders
from sparsetir.schedules.search.shared_columns import SHARED, shared_columns
from sparsetir.schedules.targets import pool, resolve_target

LLVM = resolve_target("llvm")


def grouped(m: int, n: int, length: int, group: int, seed: int = 0) -> sp.csr_array:
    """A matrix of rows of one length of which each `group` store the same columns."""
    rng = np.random.default_rng(seed)
    columns = [np.sort(rng.choice(n, length, replace=False)) for _ in range(-(-m // group))]
    indices = np.concatenate([columns[row // group] for row in range(m)]).astype("int32")
    values = rng.integers(1, 9, m * length).astype("float32")
    return sp.csr_array((values, indices, np.arange(m + 1, dtype="int32") * length), (m, n))


@pytest.fixture
def small(monkeypatch):
    """Panels pay for little work."""
    monkeypatch.setattr(kernels, "work_of_threads", lambda: 1)
    monkeypatch.setattr(rules, "LENGTH", 0)


@pytest.fixture(scope="module")
def kernel():
    return sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))


def run(kernel, a: sp.csr_array, feat: int) -> dict[str, np.ndarray]:
    """Call a kernel three times with the same arrays, and check each result; returns them."""
    b = np.random.default_rng(1).integers(0, 9, (a.shape[1], feat)).astype("float32")
    args = {"a": a.data, "b": b, "c": None, "indptr": a.indptr, "indices": a.indices}
    for _ in range(3):
        args["c"] = np.full((a.shape[0], feat), np.nan, "float32")
        kernel(**args)
        np.testing.assert_array_equal(args["c"], a @ b)
    return args


def other(kernel, args: dict[str, np.ndarray]) -> object:
    """The kernel that runs for arguments seen last."""
    (m, feat), n, nnz = args["c"].shape, len(args["b"]), len(args["a"])
    chosen = kernel._seen[0].other
    return None if chosen is None else chosen([*args.values(), m, n, nnz, feat])


@pytest.mark.parametrize("feat", [32, 60, 64, 127, 192])
@pytest.mark.parametrize("m", [2, 41])
def test_rows_in_panels(small, kernel, feat, m):
    args = run(kernel, grouped(m, 30, 20, 4), feat)
    panels = other(kernel, args)
    assert "I_panels" in panels.stages["I"].script()
    tiles = -(-feat // (32 if feat < 64 else 64))
    assert panels.numbers["blocks"] == tasks(pool(), tiles)
    assert panels.compute(panels.completed(args))["blocks"] == panels.numbers["blocks"]
    assert other(kernel, run(kernel, grouped(m, 30, 20, 1), feat)) in (None, panels)


def test_rows_without_columns_in_common_and_few_features(small, kernel):
    assert other(kernel, run(kernel, grouped(40, 400, 10, 1), 64)) is None
    assert other(kernel, run(kernel, grouped(40, 30, 20, 4), 24)) is None  # less than a tile
    assert other(kernel, run(kernel, grouped(40, 30, 20, 4), 90)) is None  # tiles would overlap


@pytest.mark.parametrize("feat", [1, 24, 32])
def test_many_short_rows_by_length(small, kernel, monkeypatch, feat):
    monkeypatch.setattr(visit_orders, "ROWS", 50)
    a = sp.random_array((60, 300), density=0.01, format="csr", rng=np.random.default_rng(feat))
    a = sp.csr_array((np.arange(a.nnz, dtype="float32"), a.indices, a.indptr), a.shape)
    args = run(kernel, a, feat)
    chosen = other(kernel, args)
    assert "I_sorted" in chosen.stages["I"].script() and chosen.numbers["blocks"] == pool()
    assert other(kernel, run(kernel, a, 40)) is None
    assert other(kernel, run(kernel, a[:40], feat)) is None
    assert other(kernel, run(kernel, a * 0, feat)) is not None


def test_sums_of_many_short_rows_in_slices(monkeypatch):
    monkeypatch.setattr(visit_orders, "ROWS", 50)
    kernel, rng = (
        sparsetir.build(PROGRAMS["spmv"].make("float32", "int32")),
        np.random.default_rng(0),
    )
    lengths, x = rng.integers(0, 9, 90), np.arange(300, dtype="float32")
    lengths[7] = 200
    for lengths_of in (lengths // 2, lengths * 3):
        a = sp.csr_array(np.where(np.arange(300) < lengths_of[:, None], 1.0, 0).astype("float32"))
        args = {"a": a.data, "x": x, "y": None, "indptr": a.indptr, "indices": a.indices}
        for _ in range(3):
            args["y"] = np.full(90, np.nan, "float32")
            kernel(**args)
            np.testing.assert_array_equal(args["y"], a @ x)
        chosen = kernel.chosen_for(args)
        assert (chosen is not kernel) == (lengths_of.sum() <= 6 * 90)


@pytest.mark.parametrize("size", [1 << 10, 1 << 13])
def test_sums_on_diagonals(size):
    """Full ones, with the edges of the matrix in other slices; few elements keep their order."""
    kernel = sparsetir.build(PROGRAMS["spmv"].make("float32", "int32"))
    offsets, rng = (-40, -1, 0, 1, 40), np.random.default_rng(0)
    diagonals = [rng.integers(1, 9, size - abs(at)).astype("float32") for at in offsets]
    a = sp.csr_array(sp.diags_array(diagonals, offsets=offsets))
    x = rng.integers(-8, 9, size).astype("float32")
    args = {"a": a.data, "x": x, "y": None, "indptr": a.indptr, "indices": a.indices}
    for _ in range(3):
        args["y"] = np.full(size, np.nan, "float32")
        kernel(**args)
        np.testing.assert_array_equal(args["y"], a @ x)
    chosen = kernel.chosen_for(args)
    assert ("diagonals" in chosen.stages["I"].script()) == (size > 1 << 10)


def test_values_beyond_the_caches_keep_the_order(small, kernel, monkeypatch):
    monkeypatch.setattr(visit_orders, "ROWS", 50)
    of_row = np.arange(61, dtype="int32")
    for bytes, sorted_rows in ((100, False), (200, True)):
        monkeypatch.setattr(rules, "l2_bytes", lambda bytes=bytes: bytes)
        a = sp.csr_array((np.ones(60, "float32"), of_row[:60] % 10, of_row.copy()), (60, 10))
        assert (other(kernel, run(kernel, a, 4)) is not None) == sorted_rows


def test_panels_are_prepared_by_the_second_call(small, kernel, monkeypatch):
    monkeypatch.setattr(kernels, "kept_kernel", None)
    fresh, a = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32")), grouped(40, 30, 20, 4)
    args = [
        a.data,
        np.ones((30, 64), "float32"),
        np.empty((40, 64), "float32"),
        a.indptr,
        a.indices,
    ]
    fresh(*args)
    with pytest.raises(TypeError, match="not callable"):
        fresh(*args)


def test_little_work_and_short_rows_stay(kernel):
    assert other(kernel, run(kernel, grouped(40, 40, 30, 4), 64)) is None
    assert other(kernel, run(kernel, grouped(4096, 4096, 8, 4), 64)) is None


def test_torch_and_refusals_are_those_of_the_kernel(small, kernel):
    a = grouped(41, 30, 20, 4)
    args = run(kernel, a, 64)
    tensors = {name: torch.from_numpy(x) for name, x in args.items()}
    for _ in range(2):
        tensors["c"].zero_()
        before = tensors["c"]._version
        kernel(**tensors)
        np.testing.assert_array_equal(tensors["c"], a @ args["b"])
        assert tensors["c"]._version == before + 1
    bad = {**args, "b": args["b"][:, ::2]}
    wide = {**args, "a": args["a"].astype("float64")}
    locked = {**args, "c": args["c"].copy()}
    locked["c"].flags.writeable = False
    refuse(
        """
        kernel(**wide)  # TypeError: 'a': expected dtype float32
        kernel(**bad)  # ValueError: spmm: argument 'b'
        kernel(**locked)  # ValueError: 'c': it is written, but the array is read-only
        """,
        globals(),
        locals(),
    )


def test_expressions_in_panels(small):
    """Orders serve other values, too, and gradients in torch."""
    a, rng = grouped(41, 30, 20, 4), np.random.default_rng(2)
    text, x = "C[i,k] = A[i,j] * X[j,k]", np.ones((30, 64), "float32")
    plan = sparsetir.plan(text, A=sparsetir.SparseMatrix(a), X=x)
    for _ in range(4):
        a.data = rng.integers(1, 9, a.nnz).astype("float32")
        x = rng.integers(0, 9, x.shape).astype("float32")
        np.testing.assert_array_equal(plan(A=a.data, X=x), a @ x)
        values, features = (torch.from_numpy(v).requires_grad_() for v in (a.data, x))
        result = plan(A=values, X=features)
        np.testing.assert_array_equal(result.detach(), a @ x)
        result.sum().backward()
        np.testing.assert_array_equal(features.grad, a.T @ np.ones((41, 64), "float32"))
    bound, _ = plan._expression._whole
    assert "I_panels" in bound.kernel.stages["I"].script()


def test_what_is_kept_goes_with_the_matrix(small, kernel):
    args = run(kernel, grouped(41, 30, 20, 4), 64)
    panels, indices = other(kernel, args), weakref.ref(args["indices"])
    assert panels._seen
    args.clear()
    gc.collect()
    assert indices() is None and not panels._seen


def test_programs_of_other_shapes_and_schedules():
    spmm = PROGRAMS["spmm"].make("float32", "int32")
    assert row_orders(spmm, LLVM).features == "feat"
    assert row_orders(PROGRAMS["spmv"].make("float32", "int32"), LLVM).features is None
    assert row_orders(PROGRAMS["sddmm"].make("float32", "int32"), LLVM) is None
    assert sparsetir.build(spmm, schedule=lambda sch: None).by_pattern is None
    assert sparsetir.build(spmm, check=False).by_pattern is None


@pytest.mark.parametrize(("m", "n", "length"), [(400, 300, 30), (9000, 200_000, 30), (3, 5, 2)])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_columns_in_common(m, n, length, group):
    a = grouped(m, n, length, group)
    panels = [a[row : row + 4].indices for row in range(0, m, 4)]
    exact = a.nnz / sum(len(np.unique(columns)) for columns in panels)
    assert shared_columns(a.indptr, a.indices, n, 4) == pytest.approx(exact, rel=0.05)
    assert (exact >= SHARED) == (group > 1) or m == 3


def test_columns_in_common_of_nothing():
    assert shared_columns(np.zeros(9, "int32"), np.zeros(0, "int32"), 5, 4) == 0
