"""Plans whose result is sparse: values that change, what they keep, refusals, records."""

from __future__ import annotations

import pickle
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from csr_zoo import ZOO
from fake_measurer import install
from refusals import refusals
from sparsetir import SparseMatrix
from sparsetir.planning import sparse_plan, sparse_results
from sparsetir.planning.sparse_plan import SparsePlan
from sparsetir.reductions import SEMIRINGS
from sparsetir.schedules.operators.registry import OF_MATRICES
from sparsetir.schedules.operators.sparse_results import ELEMENTWISE
from sparsetir.schedules.templates.sparse_results import Assembled
from sparsetir.tuning.case import SparseCase

PRODUCTS = {"spgemm": "matmul", "inner": "inner"}


def matrix(shape: Any, seed: int, dtype: str = "float64", density: float = 0.3) -> SparseMatrix:
    """Values are small integers, so that all sums are exact."""
    rng = np.random.default_rng(seed)
    data = sp.random_array(shape, density=density, format="csr", rng=rng)
    data.data = rng.integers(-4, 5, data.nnz).astype("float64")
    return SparseMatrix(data).astype(dtype)


def plan(op: str, *matrices: Any, **options: Any) -> SparsePlan:
    planned = sparsetir.plan(op, *matrices, **options)
    assert isinstance(planned, SparsePlan)
    return planned


def pair(op: str, m: int, n: int, more: int, *types: Any) -> list[SparseMatrix]:
    """Two operands of an operator, the first (m, n), the second with more columns or rows."""
    second = {"spgemm": (n, more), "inner": (more, n)}.get(op, (m, n))
    return [matrix(s, q, *types) for q, s in enumerate(((m, n), second))]


def same(result: SparseMatrix, expected: SparseMatrix, rtol: float = 0) -> None:
    np.testing.assert_array_equal(result.pattern.indptr, expected.pattern.indptr)
    np.testing.assert_array_equal(result.pattern.columns, expected.pattern.columns)
    values = (np.float64(x.values) for x in (result, expected))
    np.testing.assert_allclose(*values, rtol=rtol, atol=0)
    assert result.dtype == expected.dtype and result.shape == expected.shape


def by_method(op: str, *matrices: SparseMatrix, **options: Any) -> SparseMatrix:
    """The same by what assembles each time."""
    if op in ("spgemm", "inner"):
        return getattr(matrices[0], PRODUCTS[op])(matrices[1], **options)
    if op == "sub":
        return matrices[0] - matrices[1]
    return getattr(matrices[0], ELEMENTWISE.get(op, op))(*matrices[1:], **options)


@pytest.mark.parametrize("op", OF_MATRICES)
def test_values_that_change(op: str) -> None:
    """The first call, the values planned with again, and others, of all or of some operands."""
    a, b = pair(op, 23, 9, 70)
    others = a * 3, b.with_values(b.values[::-1].copy())
    run = plan(op, a, b)
    for _ in range(2):
        same(run(), by_method(op, a, b))
    first = run()
    same(run(*(x.values for x in others)), by_method(op, *others))
    same(run(None, others[1].values), by_method(op, a, others[1]))
    same(run(), first)
    assert run().pattern is run.pattern is first.pattern
    out = np.full(first.nnz, np.nan)
    result = run(others[0].values, out=out)
    assert result.values is out
    same(result, by_method(op, others[0], b))


@pytest.mark.parametrize("semiring", SEMIRINGS)
@pytest.mark.default("plus_times", "max_times")
def test_semirings_and_masks(semiring: str) -> None:
    a, b, m = matrix((13, 9), 0), matrix((9, 11), 1), matrix((13, 11), 2)
    ways = [(None, {}), (m, {}), (m, {"listed": True}), (m, {"dotted": True})]
    for (mask, how), op in product(ways, PRODUCTS):
        right = b if op == "spgemm" else b.T
        run = plan(op, a, right, semiring=semiring, mask=mask, config=Assembled(**how))
        for factor in (1, 1, 3):
            expected = by_method("spgemm", factor * a, b, semiring=semiring, mask=mask)
            same(run((factor * a).values), expected)
        changed = 2 * right, by_method("spgemm", a, 2 * b, semiring=semiring, mask=mask)
        same(run(a.values, changed[0].values), changed[1])
    same(plan("add", a, a, mask=a)(), 2 * a)


def test_elements_by_themselves_where_there_are_few() -> None:
    """Two long rows for each of few elements; products of all terms where there are many."""
    a, b = matrix((40, 300), 0, "float64", 0.5), matrix((50, 300), 1, "float64", 0.5)
    for density, dotted in ((0.02, True), (1.0, False)):
        mask = matrix((40, 50), 2, "float64", density)
        for op, right in (("inner", b), ("spgemm", b.T)):
            run = plan(op, a, right, mask=mask)
            assert run.config.dotted is dotted
            same(run(), by_method(op, a, right, mask=mask))


@pytest.mark.parametrize(("threads", "few"), [(1, 0), (1, 99), (3, 0), (3, 99)])
@pytest.mark.default("3-99")
def test_listed_terms(monkeypatch: pytest.MonkeyPatch, threads: int, few: int) -> None:
    """Terms by element of the result or in turn, of all patterns and types, a few at a time; with
    a mask, also one that keeps none, and without."""
    monkeypatch.setattr(sparse_results, "TERMS", 7)
    monkeypatch.setattr(sparse_plan, "FEW", few)
    config = Assembled(listed=True)
    for a in map(SparseMatrix, ZOO.values()):
        for mask in (matrix((a.shape[0], a.shape[0]), 5), None):
            run = plan("spgemm", a, a.T, mask=mask, config=config, threads=threads)
            for factor in (1, 2, 3):
                same(run((factor * a).values), (factor * a).matmul(a.T, mask=mask), 1e-5)
    for dtype, semiring in (("float32", "plus_times"), ("float16", "max_plus"), ("bool", "or_and")):
        a, b, nothing = (matrix((9, 9), n, dtype, d) for n, d in enumerate((0.3, 0.3, 0)))
        how: Any = {"semiring": semiring, "config": config, "threads": threads}
        for mask in (a, nothing, None):
            expected = a.matmul(b, mask=mask, semiring=semiring)
            for op, right in (("spgemm", b), ("inner", b.T)):
                run = plan(op, a, right, mask=mask, **how)
                for _ in range(2):
                    same(run(None, right.values), expected, 2e-3)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "float64", "int64"])
@pytest.mark.default("float64-3")
def test_products_by_element_keep_the_places_of_factors(threads: int, dtype: str) -> None:
    """Up to three operands, with nothing in common, and with NaN and infinity."""
    for a in map(SparseMatrix, ZOO.values()):
        a = a.astype(dtype)
        others = matrix(a.shape, 5, dtype), matrix(a.shape, 6, dtype, 0.6)
        for operands in ((a, a), (a, *others), (a, matrix(a.shape, 7, dtype, 0))):
            run = plan("mul", *operands, threads=threads)
            assert run.config.listed
            for factor in (1, 2, 3):
                expected = (factor * operands[0]).multiply(*operands[1:])
                same(run((factor * a).values), expected)
    a = SparseMatrix(([0, 0, 1], [0, 2, 1]), (2, 3), np.array([np.inf, -0.0, np.nan]))
    run = plan("mul", a, a.with_values(np.array([0.0, 1.0, 1.0])))
    for _ in range(2):
        np.testing.assert_array_equal(run().values, [np.nan, -0.0, np.nan])
        assert np.signbit(run().values[1])


def test_many_operands_empty_ones_and_the_zoo() -> None:
    for a in map(SparseMatrix, ZOO.values()):
        run = plan("spgemm", a, a.T)
        for _ in range(2):
            same(run(), a @ a.T)
        same(plan("add", a, *[a] * 7)(), a.add(*[a] * 7))


def test_wide_columns_and_int64() -> None:
    """Columns that nothing is in are left out, also of masks; int32 that does not do is left."""
    far = 2**31 + 5
    a = SparseMatrix(([0, 2], [1, 0]), shape=(3, 2))
    b = SparseMatrix(([0, 0, 1], [3, far - 1, 1]), shape=(2, far))
    mask = SparseMatrix(([0, 2, 2], [1, 7, far - 1]), shape=(3, far))
    run, masked = plan("spgemm", a, b), plan("spgemm", a, b, mask=mask)
    for _ in range(2):
        same(run(), a @ b)
        np.testing.assert_array_equal(masked().values, [1, 0, 1])


def test_more_elements_than_int32_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = matrix((40, 40), 0), matrix((40, 40), 1)
    run = plan("spgemm", a, b, config=Assembled())
    monkeypatch.setattr(run._assembling, "most", 5)
    for _ in range(2):
        same(run(), a @ b)
    assert run.problem.idtype == "int64"


def test_what_is_written_later_changes_nothing() -> None:
    a, b = matrix((9, 9), 0), matrix((9, 9), 1)
    expected, run = a @ b, plan("spgemm", a, b)
    a.values[:] = 0
    b.pattern.columns[:] = 0
    same(run(), expected)
    run().pattern.columns[:] = 1 << 30  # which is the result's: calls do not read it
    np.testing.assert_array_equal(run().values, expected.values)


Q, R, S = matrix((9, 9), 0), matrix((9, 9), 1), matrix((8, 9), 0)
RUN = plan("add", Q, R)
NNZ, BOTH = RUN().nnz, np.zeros(99)
LISTED = Assembled(listed=True)
WIDE = sparsetir.SparseMatrix(([0], [7]), (1, 2**32))
test_refusals = refusals(
    """
sparsetir.plan("spgemm", Q)  # TypeError: argument 'feat': expected the second matrix
sparsetir.plan("spgemm", Q, S)  # ValueError: argument 'feat': expected 9 rows
sparsetir.plan("spgemm", Q, R, R)  # TypeError: expected two matrices for 'spgemm', got 3
sparsetir.plan("spgemm", Q, R, semiring="min")  # ValueError: 'semiring': expected one of
sparsetir.plan("spgemm", Q, R, semiring=[])  # ValueError: argument 'semiring': expected one of
sparsetir.plan("spgemm", Q, R, dtype="x")  # ValueError: argument 'dtype': expected one of float16
sparsetir.plan("add", Q, R, dtype="complex64")  # ValueError: 'dtype': expected one of float16
sparsetir.plan("spgemm", Q, R, heads=2)  # ValueError: 'heads': expected None for 'spgemm'
sparsetir.plan("spgemm", Q, R, target="cuda")  # RuntimeError: there is no cuda device
sparsetir.plan("spgemm", Q, R, threads=0)  # ValueError: argument 'threads': expected 1 or more
sparsetir.plan("maximum", Q, R, semiring="or_and")  # ValueError: 'semiring': expected 'plus_times'
sparsetir.plan("spgemm", Q, R, config=3)  # TypeError: argument 'config': expected Assembled
sparsetir.plan("spgemm", Q, R, config=Assembled(listed=True, kept=False))  # ValueError: listed=Fals
sparsetir.plan("mul", Q, R, mask=Q, config=LISTED)  # ValueError: expected listed=False
sparsetir.plan("add", Q, R, config=LISTED)  # ValueError: expected listed=False
sparsetir.plan("inner", Q, R, config=Assembled(dotted=True))  # ValueError: expected dotted=False
sparsetir.plan("inner", Q, S, mask=Q)  # ValueError: argument 'mask': expected shape
sparsetir.plan("inner", Q, R, R)  # TypeError: expected two matrices for 'inner', got 3
sparsetir.plan("kron", Q, R, R)  # TypeError: expected two matrices for 'kron', got 3
sparsetir.plan("kron", Q, R, mask=Q)  # ValueError: 'mask': expected None for 'kron'
sparsetir.plan("kron", WIDE, WIDE)  # ValueError: 'feat': expected .. less than 2**63 .. got 1 x 1
WIDE.kron(WIDE)  # ValueError: SparseMatrix.kron: argument 'other': expected a result of less than
sparsetir.ops.kron(WIDE, WIDE)  # ValueError: kron: argument 'B': expected a result of less
sparsetir.plan("spmm", Q, R, R)  # TypeError: expected one matrix for 'spmm'
RUN(Q.values, R.values, Q.values)  # TypeError: values of 2 matrices, got 3
RUN([1.0])  # TypeError: argument 'values[0]': expected an array of NumPy
RUN(None, R.values[1:])  # ValueError: argument 'values[1]': expected shape
RUN(Q.values.astype("float32"))  # TypeError: expected dtype float64
RUN(out=np.empty(NNZ + 1))  # ValueError: argument 'out': expected shape
RUN(out=np.empty(2 * NNZ)[::2])  # ValueError: 'out': expected a contiguous
RUN(BOTH[: Q.nnz], out=BOTH[:NNZ])  # ValueError: 'out' shares memory with 'values
""",
    globals(),
)


def test_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plans of the same patterns take what a search found, and others do not."""
    install(monkeypatch)
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "records.sqlite"))
    a, b = matrix((60, 50), 0, "float32"), matrix((50, 40), 1, "float32")
    mask = matrix((60, 40), 2, "float32")
    tuned = sparsetir.tune("spgemm", a, b, threads=1, trials=3, semiring="max_times")
    assert tuned.counts.keys() <= {"ok", "pruned"} and len(tuned.trials) == 3
    assert isinstance(tuned.plan(), SparsePlan) and "max_times" in tuned.task.title()
    options = {"threads": 1, "semiring": "max_times"}
    assert plan("spgemm", 2 * a, b, **options).chosen_by == "record"
    for matrices, more in (
        ((a, b), {"semiring": "plus_times"}), ((a, b), {"mask": mask}), ((a, b), {"threads": 2}),
        ((a, b), {"dtype": "float64"}), ((matrix((60, 50), 3, "float32"), b), {}),
    ):  # fmt: skip
        assert plan("spgemm", *matrices, **{**options, **more}).chosen_by == "default"


def test_workers_know_what_is_right() -> None:
    """Workers compute the result from their input; a wrong value or another pattern is reported."""
    a, mask = matrix((20, 20), 0, "float32"), matrix((20, 20), 1, "float32")
    for operands, options in (
        (("spgemm", a, a), {"semiring": "min_plus", "mask": mask}), (("add", a, a, mask), {}),
    ):  # fmt: skip
        request = sparsetir.planning.plan.requested(*operands, threads=1, **options)
        sent = pickle.loads(pickle.dumps(request))
        case = SparseCase(sent)
        assert sent.key() == request.key() == case.request.key()
        prepared = case.prepared(request.chosen())
        prepared.call()
        assert prepared.wrong() is None
        right = case.expected
        wrong = right.values.copy()
        wrong[3] += 1
        assert "1 of" in str(case.error(right.with_values(wrong)))
        assert "other elements are stored" in str(case.error(a.T.add(a, mask)))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.slow
def test_workers_know_integers(dtype: str) -> None:
    """Integers wrap around, without infinity where a mask meets no term; not all are zero."""
    a, mask = matrix((20, 20), 0, "float64", 0.1).astype(dtype), matrix((20, 20), 1)
    ops = {"spgemm": {"semiring": "min_plus", "mask": mask}, "add": {}, "sub": {}}
    for op, options in list(ops.items())[: 2 if dtype == "bool" else 3]:
        request = sparsetir.planning.plan.requested(op, a, a, threads=1, **options)
        case = SparseCase(request)
        prepared = case.prepared(request.chosen())
        prepared.call()
        assert prepared.wrong() is None and case.expected.values.any()


@pytest.mark.slow
def test_a_search() -> None:
    a = matrix((60, 60), 0, "float32")
    tuned = sparsetir.tune("add", a, a.T, a, threads=1, records="")
    assert tuned.counts.keys() <= {"ok", "pruned"} and tuned.configs == len(tuned.trials)
