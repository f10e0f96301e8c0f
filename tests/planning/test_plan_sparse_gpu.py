"""Plans of sparse results for GPUs: their CUDA text on a CPU, with the checks for races."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsetir
from csr_zoo import ZOO
from cuda_plans import run_plans
from cuda_runner import CudaFunction, requires_cuda_text
from gpu_runner import cuda_source, nvcc_compile, requires_nvcc
from pairs import by_default
from planning.test_plan_sparse import by_method, matrix, pair
from refusals import refuse
from sparsetir import SparseMatrix
from sparsetir.planning import sparse_plan
from sparsetir.planning.sparse_plan import RowTablesPlan, ValuesPlan
from sparsetir.reductions import SEMIRINGS
from sparsetir.runtime.arrays import to_numpy
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.gpu import row_tables
from sparsetir.schedules.gpu.row_tables import BINS, Bin, RowTables, dtypes_of, rows_program
from sparsetir.schedules.gpu.sparse_results import ElementThreads, TermLanes, apply, share_terms
from sparsetir.schedules.operators.registry import OF_MATRICES
from sparsetir.schedules.operators.sparse_results import SparseResult

CUDA = {"kind": "cuda", "arch": "sm_90"}


def check(monkeypatch: pytest.MonkeyPatch, op: str, *each: SparseMatrix, **options: Any) -> None:
    """Values of the matrices, and others, give what is assembled of them on the CPU."""
    run_plans(monkeypatch)
    config = options.pop("config", None)
    run = sparsetir.plan(op, *each, target=CUDA, config=config, **options)
    assert isinstance(run, ValuesPlan)
    others = [x.with_values(x.values[::-1].copy()) for x in each]
    for matrices in (each, others):
        expected = by_method(op, *matrices, **options)
        np.testing.assert_array_equal(run.pattern.columns, expected.pattern.columns)
        np.testing.assert_array_equal(run.pattern.indptr, expected.pattern.indptr)
        result = run(*(torch.from_numpy(x.values) for x in matrices))
        np.testing.assert_array_equal(result.numpy(), expected.values)


@requires_cuda_text
@pytest.mark.parametrize("op", OF_MATRICES)
@pytest.mark.default("mul", "minimum")
def test_operators(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    check(monkeypatch, op, *pair(op, 23, 9, 40, "float32"))


@requires_cuda_text
@pytest.mark.parametrize("semiring", by_default(SEMIRINGS, "plus_times", "min_plus"))
@pytest.mark.default("min_plus")
def test_semirings_and_masks(monkeypatch: pytest.MonkeyPatch, semiring: str) -> None:
    a, b, m = matrix((13, 9), 0), matrix((9, 11), 1), matrix((13, 11), 2)
    check(monkeypatch, "spgemm", a, b, mask=m, semiring=semiring, config=ElementThreads(32))


@requires_cuda_text
@pytest.mark.parametrize("lanes", by_default([1, 2, 8, 32], 1, 8))
@pytest.mark.default("8")
def test_listed_terms(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """Threads of a group add up the terms of an element; of a product without a mask, too."""
    a, b, m = matrix((13, 40), 0, density=0.8), matrix((40, 11), 1), matrix((13, 11), 2)
    config = TermLanes(lanes, 64)
    for semiring in ("plus_times", "max_plus"):
        check(monkeypatch, "spgemm", a, b, mask=m, semiring=semiring, config=config)
    check(monkeypatch, "spgemm", a, b, config=config)
    check(monkeypatch, "inner", a, b.T, mask=m, config=config)


@requires_cuda_text
@pytest.mark.slow
def test_many_operands_and_far_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    each = [matrix((7, 9), n, "int64", 0.1 * n) for n in range(4)]
    check(monkeypatch, "add", *each)
    far = 2**31 + 5
    a = SparseMatrix(([0, 2], [1, 0]), shape=(3, 2)).astype("float32")
    b = SparseMatrix(([0, 0, 1], [3, far - 1, 1]), shape=(2, far)).astype("float32")
    check(monkeypatch, "spgemm", a, b)


@requires_cuda_text
def test_what_is_not_stored_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 x inf is NaN where both are stored alone; nothing is stored, nothing is launched."""
    a = SparseMatrix(([0, 0, 1], [0, 1, 1]), values=np.array([0.0, 1.0, 2.0]), shape=(3, 2))
    b = SparseMatrix(([0, 1], [0, 1]), values=np.array([np.inf, np.nan]), shape=(2, 3))
    check(monkeypatch, "spgemm", a, b)
    check(monkeypatch, "spgemm", a, matrix((2, 3), 0, density=0.0))


class Emulated:
    """A kernel as :class:`RowTablesPlan` calls it: by name, writing to its arguments."""

    def __init__(self, stages: Any) -> None:
        self.function = CudaFunction(stages["III"])
        self.names = [str(p.name) for p in stages["III"].params]

    def __call__(self, **inputs: Any) -> None:
        arrays = {x: to_numpy(y) if hasattr(y, "shape") else y for x, y in inputs.items()}
        results = self.function({x: arrays[x.lower()] for x in self.names})
        for x in self.names:
            if x.lower() in ("counts", "c_indices", "c"):
                arrays[x.lower()][...] = results[x]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let hash tables run; the bins that kernels were made for."""
    run_plans(monkeypatch)
    kernels: dict[Any, Emulated] = {}
    bins: list[Any] = []

    def compiled(key: Any, target: Any, stages: Any) -> Emulated:
        bins.append(key[1])
        if key not in kernels:
            kernels[key] = Emulated(stages())
        return kernels[key]

    monkeypatch.setattr(sparse_plan, "compiled", compiled)
    return bins


def check_tables(A: SparseMatrix, B: SparseMatrix, **options: Any) -> RowTablesPlan:
    """The pattern and values, and other values, are what the CPU assembles."""
    run = sparsetir.plan("spgemm", A, B, target=CUDA, config=RowTables(), **options)
    assert isinstance(run, RowTablesPlan)
    for factor in (1, 3):
        expected = (factor * A).matmul(B, **options)
        result = run(torch.from_numpy((factor * A).values), torch.from_numpy(B.values))
        np.testing.assert_array_equal(run.pattern.indptr, expected.pattern.indptr)
        np.testing.assert_array_equal(run.pattern.columns, expected.pattern.columns)
        np.testing.assert_array_equal(result.numpy(), expected.values)
    return run


@requires_cuda_text
@pytest.mark.parametrize("dtype", by_default(["float32", "float64", "int32"], "float32"))
def test_hash_tables(tables: list[Any], monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Rows without terms, for each bin's threads, and so long that threads take ranges of them."""
    bins = (Bin(8, 16), Bin(32, 64), Bin(128, 128))
    monkeypatch.setattr(row_tables, "BINS", bins)
    rng = np.random.default_rng(0)
    lengths, eight = [0, 1, 3, 7, 40, 0, 2, 8, 1], np.full(40, 8)  # times 8 terms
    columns = [np.sort(rng.permutation(40)[:n]) for n in lengths]
    A = SparseMatrix((np.repeat(np.arange(9), lengths), np.concatenate(columns)), shape=(9, 40))
    columns = [np.sort(rng.permutation(400)[:n]) for n in eight]
    B = SparseMatrix((np.repeat(np.arange(40), eight), np.concatenate(columns)), shape=(40, 400))
    run = check_tables(A.astype(dtype), B.astype(dtype))
    M = matrix((9, 400), 3, density=0.2)
    check_tables(A.astype(dtype), B.astype(dtype), mask=M)
    assert [size for size, _ in run._bins] == [*bins, bins[-1]] and set(tables) == set(bins)
    assert run.launches == 4 and run._bins[-1][1]["ranges"] == 4


SMALL = (Bin(8, 16), Bin(32, 64), Bin(128, 128))


@requires_cuda_text
@pytest.mark.parametrize("semiring", by_default(SEMIRINGS, "min_plus"))
@pytest.mark.parametrize("dtype", by_default(["float32", "int32", "float64"], "float32"))
def test_hash_tables_of_semirings(
    tables: list[Any], monkeypatch: pytest.MonkeyPatch, semiring: str, dtype: str
) -> None:
    """Masks, some rows of which are empty, and some long; negative values and zeros."""
    monkeypatch.setattr(row_tables, "BINS", SMALL[:1])
    if dtype not in dtypes_of(semiring):
        return
    long = SparseMatrix.from_dense(np.tril(np.ones((7, 150)), 60))
    a, b = matrix((7, 30), 0, dtype, 0.2), matrix((30, 150), 1, dtype, 0.1)
    for mask in (None, matrix((7, 150), 3, density=0.05), long, long * 0):
        check_tables(a, b, semiring=semiring, **({} if mask is None else {"mask": mask}))


@requires_cuda_text
def test_hash_tables_of_int64(tables: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results with more elements than int32 numbers, as if; operands with more are refused."""
    monkeypatch.setattr(row_tables, "BINS", SMALL[1:2])
    a, b = matrix((14, 30), 0, "float32", 0.2), matrix((30, 150), 1, "float32", 0.02)
    mask = matrix((14, 150), 3, "float32", 0.2)
    monkeypatch.setattr(sparse_plan, "INT32", 160)
    for options in ({}, {"mask": mask}):
        assert check_tables(a, b, **options)._how[-1]
    monkeypatch.setattr(sparse_plan, "INT32", 140)
    with pytest.raises(OverflowError, match="spgemm: expected numbers of rows, columns and elem"):
        check_tables(a, b)


@requires_cuda_text
@pytest.mark.slow
def test_hash_tables_of_patterns(tables: list[Any]) -> None:
    """The zoo, with NaN and infinity, columns far apart, and empty results."""
    for x in map(SparseMatrix, ZOO.values()):
        a = x.astype("float32").with_values(np.arange(x.nnz, dtype="float32") % 5)
        check_tables(a, a.T)
    far = SparseMatrix(([0, 0, 1], [3, 2**31 + 4, 1]), shape=(2, 2**31 + 5)).astype("float32")
    a = SparseMatrix(([0, 0, 2], [0, 1, 0]), shape=(3, 2)).astype("float32")
    check_tables(a, far)
    check_tables(a.with_values(np.array([0, np.nan, 1], "float32")), far * np.float32(np.inf))


@requires_cuda_text
@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_hash_tables_of_random_matrices(
    tables: list[Any], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(row_tables, "BINS", SMALL)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        m, l, n = rng.choice([1, 5, 40, 300], 3)
        each = zip(((m, l), (l, n), (m, n)), rng.choice([0.0, 0.01, 0.1, 0.6], 3), strict=True)
        a, b, mask = (matrix(x, seed + q, "float32", d) for q, (x, d) in enumerate(each))
        check_tables(a, b)
        check_tables(a, b, mask=mask, semiring=str(rng.choice([*SEMIRINGS])))


KINDS: list[tuple[Any, ...]] = [
    (None,), *((x,) for x in dtypes_of("plus_times")), ("float64", "plus_times", False, True),
    ("int32", "max_times"), ("float32", "max_plus", True), ("float32", "min_plus", True, True),
]  # fmt: skip


@requires_nvcc
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("how", by_default(KINDS, KINDS[1], KINDS[-1]))
@pytest.mark.default(1)
def test_hash_tables_compile(how: tuple[Any, ...], arch: str) -> None:
    for size in BINS[-1:] if how[0] else BINS:
        stages = lower(rows_program(size, *how), target={"kind": "cuda", "arch": arch})
        assert nvcc_compile(cuda_source(stages["III"], arch), arch)


def test_refusals(tables: list[Any]) -> None:
    a, wide, double, half, yes = (
        matrix((9, 9), 0, x) for x in ("float32", "int64", "float64", "float16", "bool")
    )
    nothing = matrix((9, 9), 1, "float32", 0.0)

    def planned(op: str, x: Any, y: Any, **options: Any) -> Any:
        return sparsetir.plan(op, x, y, target=CUDA, **options)

    refuse(
        """
        planned("inner", a, a, config=RowTables())  # ValueError: ElementThreads or TermLanes for 'i
        planned("add", a, a, config=RowTables())  # ValueError: expected ElementThreads for 'add'
        planned("kron", a, a, config=RowTables())  # ValueError: expected ElementThreads for 'kron'
        planned("spgemm", wide, wide, config=RowTables())
            # ValueError: TermLanes but for float32, float64, int32 with 'plus_times'
        planned("spgemm", double, double, semiring="min_plus", config=RowTables())
            # ValueError: float32, int32 with 'min_plus'
        planned("spgemm", a, nothing, config=RowTables())(a.values)
            # TypeError: spgemm: expected values of 2 matrices, got 1
        planned("spgemm", a, nothing, config=RowTables())(torch.zeros(3), torch.zeros(0))
            # ValueError: 'values[0]': expected float32 of shape
        planned("spgemm", half, half)  # ValueError: 'dtype': expected one of float32
        planned("spgemm", yes, yes)  # ValueError: 'dtype': expected one of float32, .. got bool
        planned("mul", a, a, mask=a)  # ValueError: argument 'mask': expected None for 'mul' on a GP
        planned("mul", a, a, config=3)  # TypeError: argument 'config': expected ElementThreads
        planned("mul", a, a, config=TermLanes())  # ValueError: ElementThreads for 'mul', got TermLa
        sparsetir.tune("mul", a, a, target=CUDA, records="")
            # ValueError: tune: argument 'target': expected a CPU for 'mul'
        """,
        globals(),
        locals(),
    )


@requires_nvcc
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("how", by_default(["plus_times", "add"], "plus_times"))
def test_nvcc(how: str, arch: str) -> None:
    problem = SparseResult(how, "float32", "float32", "float32")
    ways: list[Any] = [(problem.values_program(), apply, ElementThreads())]
    if problem.is_product:
        ways.append((problem.terms_program(), share_terms, TermLanes()))
    for way in ways:
        stages = lower(*way, CUDA)
        assert nvcc_compile(cuda_source(stages["III"], arch), arch)
