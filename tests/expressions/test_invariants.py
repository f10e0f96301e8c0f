"""Costly parts of terms are computed once for the indices they depend on."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir

RNG = np.random.default_rng(0)
A = sp.random_array((60, 50), density=0.2, format="csr", rng=0)
X, x, d = RNG.random((50, 16)), RNG.random(50), RNG.random(50) + 0.5
rows = RNG.random(60) + 0.5
D = A.toarray()

CASES = {
    # expression: its value, and the step or the loops that show where the costly part is
    "y[i] = 0.85 * A[i,j] * x[j] / d[j] + 0.15": (0.85 * D @ (x / d) + 0.15, "T0[j] = x[j] / d[j]"),
    "y[i] = -(A[i,j] * x[j]) / d[j]": (-D @ (x / d), "T0[j] = x[j] / d[j]"),
    "y[i,k] = A[i,j] * X[j,k] / d[j]": (D @ (X / d[:, None]), "A[i, j] / d[j] * X[j, k]"),
    "y[i,k] = A[i,j] * X[j,k] / r[i]": (D @ X / rows[:, None], "A[i, j] / r[i] * X[j, k]"),
    "y[i] = A[i,j] * exp(x[j])": (D @ np.exp(x), "T0[j] = T.exp(x[j])"),
    "y[i,k] = A[i,j] * sigmoid(X[j,k])": (D @ (1 / (1 + np.exp(-X))), "T0[j, k] = T.sigmoid"),
    "y[i] = max(j, A[i,j] * (2 + exp(x[j])))": (
        np.where(D == 0, -np.inf, D * (2 + np.exp(x))).max(1), "T0[j] = ",
    ),
    # As often as the elements, or for them alone: no step.
    "y[i] = exp(A[i,j]) * x[j]": (np.exp(D) @ x, None),
    "y[i] = A[i,j] * x[j] * exp(r[i] + x[j])": (
        (D * np.exp(rows[:, None] + x)) @ x, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_where_costly_parts_are_computed(text: str) -> None:
    exact, shown = CASES[text]
    operands = {"A": sparsetir.SparseMatrix(A), "X": X, "x": x, "d": d, "r": rows}
    operands = {n: v for n, v in operands.items() if f"{n}[" in text}
    plan = sparsetir.plan(text, **operands)
    np.testing.assert_allclose(plan(), exact, rtol=1e-12)
    (program,) = map(str, plan.programs)
    if shown is None:
        assert "T0" not in program
    else:
        assert shown in program
    whole = sparsetir.einsum(text, **operands, optimize=False)
    np.testing.assert_allclose(whole, exact, rtol=1e-12)


def test_gradients_with_steps() -> None:
    torch = pytest.importorskip("torch")
    at = torch.tensor(x, requires_grad=True), torch.tensor(d, requires_grad=True)
    dense = torch.tensor(D)
    text = "y[i] = A[i,j] * exp(x[j]) / d[j]"

    def of(x: object, d: object) -> object:
        return sparsetir.einsum(text, A=sparsetir.SparseMatrix(A), x=x, d=d)

    expected = torch.autograd.grad((dense @ (at[0].exp() / at[1])).sin().sum(), at)
    got = torch.autograd.grad(of(*at).sin().sum(), at)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_division_of_sparse_results_with_the_pattern_of_an_operand() -> None:
    text = "C[i,j] = A[i,j] * r[i] / d[j]"
    result = sparsetir.einsum(text, A=sparsetir.SparseMatrix(A), r=rows, d=d, like="A")
    np.testing.assert_allclose(result.toarray(), D * rows[:, None] / d)


@pytest.mark.parametrize("text", ["y[i] = b[i] - A[i,j] * x[j]", "y[i] = A[i,j] * x[j] + 0.5"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_row_sums_beside_other_iterations_are_in_slices(text: str, dtype: str) -> None:
    many = sp.random_array((4000, 3000), density=0.003, format="csr", rng=1).astype(dtype)
    b, v = RNG.random(4000).astype(dtype), RNG.random(3000).astype(dtype)
    operands = {"A": sparsetir.SparseMatrix(many), "x": v} | ({"b": b} if "b[" in text else {})
    plan = sparsetir.plan(text, **operands)
    exact = b - many @ v if "b[" in text else many @ v + np.asarray(0.5, dtype)
    np.testing.assert_allclose(plan(), exact, rtol=1e-4)
    ((bound,),) = plan._expression._bound.values()
    assert any("_slots" in name for name in bound.kernel.signature.passed)
