"""Rules that decode values from others, and the format `QuantisedRows`, beside NumPy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from conversions import patterns, run, spmm_arguments
from hypothesis import strategies as st
from zoo import DTYPES, MATRICES

import sparsetir
from drawing import examples
from programs import PROGRAMS, tolerance
from programs.common import scatter_sum
from refusals import refusals
from small import small
from sparsetir import formats as F

BITS = (4, 8)
TINY = float(np.finfo("float32").tiny)


def dequantised(pattern: F.Pattern, stored: Any, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Values as the format has them, in float64, and the scale of each one's row."""
    most = 2 ** (bits - 1) - 1
    exact, scale = np.asarray(stored, "float64"), np.zeros(pattern.nnz)
    for row in range(pattern.shape[0]):
        of = pattern.coords[0] == row
        scale[of] = np.float32(max(np.abs(exact[of]).max(initial=0) / most, TINY))
    return np.round(exact / scale) * scale, scale


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.default(*(f"{n}-{b}" for n, b in zip(MATRICES, BITS * 8, strict=True)))
def test_products(name: str, bits: int) -> None:
    """On the zoo, interpreted and as kernels; the dense operand holds infinities and NaN."""
    pattern = MATRICES[name]
    for build in (False, True):
        args = spmm_arguments(pattern, 3)
        func = PROGRAMS["spmm"].make("float32", pattern.idtype)
        exact, _ = dequantised(pattern, args["a"], bits)
        with np.errstate(all="ignore"):
            terms = exact[:, None] * args["b"][pattern.coords[1]].astype(float)
            want = scatter_sum(args["c"].shape, pattern.coords[0], terms)
        run(F.QuantisedRows(bits), pattern, func, args, build)
        np.testing.assert_allclose(args["c"], want, **tolerance("float32"))


@examples(
    20, 300,
    pattern=patterns(), bits=st.sampled_from(BITS), seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.0, 1e-44, 1e-38, 1e-6, 1.0, 1e30, 2.0**127]),
)  # fmt: skip
def test_errors_are_at_most_half_a_scale(
    pattern: F.Pattern, bits: int, seed: int, dtype: str, size: float
) -> None:
    """In a product with the identity, whose sums have one term; and sizes are what is said."""
    size, (m, n) = min(size, 60000.0) if dtype == "float16" else size, pattern.shape
    stored = np.random.default_rng(seed).uniform(-size, size, pattern.nnz).astype(np.dtype(dtype))
    want, scale = dequantised(pattern, stored, bits)
    assert (np.abs(want - stored.astype(float)) <= scale * 0.50001).all()
    args = spmm_arguments(pattern, n)
    args |= {"a": stored, "b": np.eye(n, dtype=dtype), "c": np.full((m, n), 7, dtype)}
    run(F.QuantisedRows(bits), pattern, PROGRAMS["spmm"].make(dtype, pattern.idtype), args, False)
    digits = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-6)
    have, tiny = args["c"][(*pattern.coords,)], 6e-8 if dtype == "float16" else 0
    np.testing.assert_allclose(have.astype(float), want, rtol=digits, atol=tiny)
    converted = F.QuantisedRows(bits).convert(pattern, F.Operand({"A": dtype}))
    arrays = converted.arguments(A=stored).values()
    assert sum(x.nbytes for x in arrays if isinstance(x, np.ndarray)) == converted.nbytes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("names", [["A"], ["A", "OUT"]], ids="+".join)
def test_sampled_products_and_gradients(names: list[str], bits: int) -> None:
    """Results in the order of the matrix, or stored as the format stores elements."""
    pattern, rng = MATRICES["empty rows"], np.random.default_rng(0)
    (m, n), (i, j) = pattern.shape, pattern.coords
    a, x, y = (rng.standard_normal(s).astype("float32") for s in (pattern.nnz, (m, 5), (n, 5)))
    exact, _ = dequantised(pattern, a, bits)
    func = PROGRAMS["sddmm"].make("float32", "int32")
    converted = F.QuantisedRows(bits).convert(pattern, F.Operand.of(func, *names))
    args = converted.arguments(A=a, **({"OUT": None} if "OUT" in names else {}))
    args |= {"x": x, "y": y, "out": np.zeros(pattern.nnz, "float32"), "indptr": pattern.indptr,
             "indices": j, "m": m, "n": n, "nnz": pattern.nnz, "feat": 5}  # fmt: skip
    program = converted.decompose(func)
    sparsetir.build(program)(**{str(p.name): args[str(p.name)] for p in program.params})
    np.testing.assert_allclose(args["out"], exact * (x[i] * y[j]).sum(1), rtol=1e-4, atol=1e-5)

    if names == ["A"]:
        of_x, args["grad_out"] = sparsetir.gradient(program, "X"), a
        args["grad_x"] = np.zeros((m, 5), "float32")
        sparsetir.build(of_x)(**{str(p.name): args[str(p.name)] for p in of_x.params})
        want = scatter_sum((m, 5), i, (exact * a)[:, None] * y[j])
        np.testing.assert_allclose(args["grad_x"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_plans(bits: int) -> None:
    """The default schedule's versions, beside a format that is exact, with other values later."""
    rng = np.random.default_rng(0)
    matrix = sp.random(60, 90, 0.2, "csr", "float32", rng)
    matrix.sort_indices()
    some = sparsetir.SparseMatrix(matrix)
    pieces = F.Mixture("m", (F.QuantisedRows(bits), F.CSR()), F.by_row_length(17))
    for feat, fmt in [(None, F.QuantisedRows(bits)), (1, pieces), (70, F.QuantisedRows(bits))]:
        op, sizes = ("spmv", {}) if feat is None else ("spmm", {"feat": feat})
        plan = sparsetir.plan(op, some, format=fmt, **sizes)
        x = rng.standard_normal(90 if feat is None else (90, feat)).astype("float32")
        for a in (matrix.data, rng.standard_normal(matrix.nnz).astype("float32")):
            near = dequantised(some.pattern, a, bits)[0]
            lengths = np.diff(matrix.indptr)[some.pattern.coords[0]]
            near = np.where(lengths > 17, a, near) if fmt is pieces else near
            want = sp.csr_matrix((near, matrix.indices, matrix.indptr), matrix.shape) @ x
            np.testing.assert_allclose(plan(x, values=a), want, rtol=1e-4, atol=1e-4)


FUNC = PROGRAMS["spmm"].make("float32", "int32")
STORE = small("f", 'with T.sp_iter([I, J], "SS", "f") as [i, j]:\n    A[i, j] = 1.0', A="I J")
ELSEWHERE = small(
    "f", 'with T.sp_iter([I, J], "SS", "f") as [i, j]:\n    OUT[i, j] = A[j, i]', A="I J", OUT="I J"
)
EIGHT = F.QuantisedRows(8).rules(F.Operand.default(2))
ONES = np.ones(10, "float32")
PAIR = F.QuantisedRows(8).convert(MATRICES["diagonal"])

with_rule = partial(replace, EIGHT[0])

test_refusals = refusals(
    """
F.QuantisedRows(3)  # ValueError: QuantisedRows: argument 'bits': expected 4 or 8, got 3
PAIR.arguments(A=ONES * np.float32(np.nan))
    # ValueError: QuantisedRows: expected finite values of at most 2^127
PAIR.arguments(A=ONES * np.float32(-np.inf))  # ValueError: finite values of at most 2^127
PAIR.arguments(A=ONES * np.float32(2e38))  # ValueError: expected finite values of at most 2^127
PAIR.arguments(A=None)
    # ValueError: rule 'quantised_rows_8' stores no values of 'A': those .. can only be read
PAIR.restore("A", {})  # ValueError: stores no values of 'A': .. and do not come back exactly
F.RuleFormat(with_rule(encode=lambda *_: {"X": 1})).convert(PAIR.pattern).arguments(A=ONES)
    # KeyError: no buffer 'X'; there are ['A', 'Q', 'SCALE']
F.decompose_format(STORE, EIGHT)
    # LoweringError: 'f' writes 'A', whose values rule 'quantised_rows_8' decodes from others
F.decompose_format(ELSEWHERE, EIGHT)
    # LoweringError: accesses ['A'] at [j, i]; rule 'quantised_rows_8' decodes values only at
sparsetir.gradient(PAIR.decompose(FUNC), "A")
    # ValueError: argument 'wrt': expected one of ['b', 'B', 'scale_quantised_rows_8'
with_rule(decode=None)  # ValueError: argument 'decode': expected a function, got None
with_rule(encode=3)  # ValueError: argument 'encode': expected a function, got 3
with_rule(decode=lambda q, scale, i, j: q[i, j])
    # ValueError: argument 'decode': expected an expression of type float32, got Q[
with_rule(decode=lambda q, i, j: q[i, j])
    # ValueError: expected a function of ['Q', 'SCALE'] and 2 coordinates, got TypeError
with_rule(decode=lambda q, scale, i, j: 3.0)  # ValueError: expected an expression of type float32
with_rule(new_format_desc=F.CSR().rules(F.Operand.default(2))[0].new_format_desc)
    # ValueError: 'decode': expected a rewritten buffer that the description allocates, got ['A']
""",
    globals(),
)
