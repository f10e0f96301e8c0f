"""Rows in vectors by default: reductions to one number, pointwise values, and what fills none."""

import numpy as np
import pytest

import sparsetir
from small import small
from sparsetir.schedules.operators import spmm
from sparsetir.schedules.operators.problems import Spmm

LENGTHS = [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 0]
M, N, NNZ = len(LENGTHS), 120, sum(LENGTHS)
INDPTR = np.cumsum([0, *LENGTHS]).astype("int32")
INDICES = np.concatenate([np.sort((np.arange(n) * 7 + n) % N) for n in LENGTHS]).astype("int32")


def ran(body, out, dtype, **given):
    """What a program makes of a row's values `A`, of its divisor `D` and the columns' `X`."""
    over = {"A": "I J", "D": "I", "X": "N", "OUT": out}
    program = small("rows", body, dtype=dtype, **over)
    arguments = {"indptr": INDPTR, "indices": INDICES, "m": M, "n": N, "nnz": NNZ, **given}
    shape = (NNZ,) if "J" in out else (M,)
    kernel, expected = sparsetir.build(program), np.full(shape, 7, dtype)
    sparsetir.interpret(program, {**arguments, "out": expected})
    found = np.full(shape, 7, dtype)
    kernel(**arguments, out=found)
    return found, expected


def operands(dtype, seed=0):
    made = np.random.default_rng(seed)
    whole = dtype.startswith("int")
    draw = (lambda n: made.integers(1, 9, n)) if whole else made.standard_normal
    return {"a": draw(NNZ).astype(dtype), "d": draw(M).astype(dtype), "x": draw(N).astype(dtype)}


ITERATION = 'with T.sp_iter([I, J], "SR", "rows") as [i, j]:'
BETTER = "T.Select(T.Or({x} > OUT[i], T.isnan({x})), {x}, OUT[i])"
TERMS = {"stored": "A[i, j]", "divided": "A[i, j] / D[i]", "gathered": "A[i, j] * X[j]"}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_sums(dtype, term):
    if dtype.startswith("int") and term == "divided":
        pytest.skip("a division of integers is not this one")
    body = f"""
    {ITERATION}
        with T.init():
            OUT[i] = T.{dtype}(3)
        OUT[i] = OUT[i] + {TERMS[term]}
    """
    found, expected = ran(body, "I", dtype, **operands(dtype))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at", [None, 0, 5, -1])
@pytest.mark.parametrize("term", TERMS)
def test_extrema_keep_nan(term, at):
    given = operands("float32")
    if at is not None:
        given["a"][INDPTR[:-1][np.diff(INDPTR) > 7] + (at % 8)] = np.nan
    body = f"""
    {ITERATION}
        with T.init():
            OUT[i] = T.float32("-inf")
        OUT[i] = {BETTER.format(x=f"({TERMS[term]})")}
    """
    found, expected = ran(body, "I", "float32", **given)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(found).any() == (at is not None)


def test_conditions_and_products_are_as_they_were():
    body = """
    with T.sp_iter([I, J], "SR", "rows") as [i, j]:
        with T.init():
            OUT[i] = T.float64(1)
        if A[i, j] > X[j]:
            OUT[i] = OUT[i] * A[i, j]
    """
    found, expected = ran(body, "I", "float64", **operands("float64"))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


POINTWISE = {
    "a store": "OUT[i, j] = T.exp(A[i, j] - D[i])",
    "a gather": "OUT[i, j] = T.exp(X[j]) * A[i, j]",
    # Which is not to be done twice.
    "an update": "OUT[i, j] = OUT[i, j] * A[i, j] + D[i]",
}


@pytest.mark.parametrize("body", POINTWISE)
def test_values_of_each_nonzero(body):
    text = f"""
    with T.sp_iter([I, J], "SS", "rows") as [i, j]:
        {POINTWISE[body]}
    """
    found, expected = ran(text, "I J", "float32", **operands("float32"))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_a_sum_without_terms_is_not_multiplied():
    """Rows without nonzeros are 0, whatever factors would be multiplied to their sums."""
    body = """
    with T.sp_iter([I, J, K], "SRS", "rows") as [i, j, k]:
        with T.init():
            OUT[i, k] = T.float32(0)
        OUT[i, k] = OUT[i, k] + Y[i, k] * X[j, k]
    """
    program = small("rows", body, Y="I K", X="N K", OUT="I K")
    kernel = sparsetir.build(program)
    scheduled = sparsetir.Schedule(program)
    i, _, k = scheduled.get_sp_iters(scheduled.get_sparse_iteration("rows"))
    scheduled.precompute("OUT", i, [k], scope="global", hoist=True)
    for run in (kernel, sparsetir.build(scheduled)):
        for feat in (1, 7, 16, 40, 130):
            y, x = np.ones((M, feat), "float32"), np.ones((N, feat), "float32")
            y[0], y[-1], out = np.nan, np.inf, np.full((M, feat), 7, "float32")
            run(y=y, x=x, out=out, indptr=INDPTR, indices=INDICES, m=M, n=N, nnz=NNZ, feat=feat)
            np.testing.assert_array_equal(out, np.tile(np.float32(LENGTHS)[:, None], feat))


def test_what_is_finite_needs_no_look_for_terms():
    """A mean's factors are: its sums are multiplied as they are."""
    sch = sparsetir.Schedule(spmm.program(Spmm(reduce="mean")))
    i, _, k = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    sch.precompute("C", i, [k], scope="global", hoist=True)
    assert "C_ws[k] * ROW[i]" in sch.func.script() and "_any" not in sch.func.script()
