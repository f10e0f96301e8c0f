"""What the interpreter says about wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest

from programs import PROGRAMS, tolerance
from sparsetir.sparse_ir.interpret import interpret


def spmm():
    return PROGRAMS["spmm"].make("float32", "int32")


def spmm_args():
    return PROGRAMS["spmm"].inputs(np.random.default_rng(0), "small", "float32", "int32")


def test_arguments_by_order():
    func, args = spmm(), spmm_args()
    expected = PROGRAMS["spmm"].oracle(args)["c"]
    interpret(func, [args[p.name] for p in func.params])
    np.testing.assert_allclose(args["c"], expected, **tolerance("float32"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"b": None}, TypeError, "spmm: argument 'b': expected a NumPy array, got NoneType"),
        (
            {"a": np.zeros(3)},
            TypeError,
            "spmm: argument 'a': buffer 'A': expected dtype float32, got float64",
        ),
        (
            {"a": np.zeros(3, "float32")},
            ValueError,
            r"spmm: argument 'a': buffer 'A': expected \d+ elements, got shape \(3,\)",
        ),
        (
            {"indptr": np.zeros(3, "int32")},
            ValueError,
            r"spmm: argument 'indptr': axis 'J': expected 14 elements, got shape \(3,\)",
        ),
        (
            {"c": np.zeros((7, 13), "float32").T},
            ValueError,
            "spmm: argument 'c': buffer 'C': expected a C-contiguous array",
        ),
        ({"m": 13.0}, TypeError, "spmm: argument 'm': expected a number of type int32, got 13.0"),
        (
            {"m": 2**40},
            ValueError,
            "spmm: argument 'm': expected a number of type int32, got 10995",
        ),
        ({"q": 1}, TypeError, "spmm: unknown argument 'q'"),
    ],
)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=message):
        interpret(spmm(), {**spmm_args(), **change})


def test_missing_arguments():
    args = spmm_args()
    del args["b"]
    with pytest.raises(TypeError, match="spmm: argument 'b' is missing"):
        interpret(spmm(), args)
    with pytest.raises(TypeError, match="spmm: expected 9 arguments .*, got 1"):
        interpret(spmm(), [1])
