"""Errors of the polynomials that the default schedule has for exp, tanh and sigmoid."""

import numpy as np
import pytest

import sparsetir
from small import text_of

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
    found = np.empty_like(SPECIAL)
    kernel(SPECIAL, found)
    np.testing.assert_array_equal(found, np.array(special, "float32"))


def test_other_types_stay():
    kernel, x = built("tanh", "float64"), np.linspace(-3, 3, 33)
    assert "T.tanh" in kernel.stages["II scheduled"].script()
    y = np.empty_like(x)
    kernel(x, y)
    np.testing.assert_allclose(y, np.tanh(x), rtol=1e-12)
