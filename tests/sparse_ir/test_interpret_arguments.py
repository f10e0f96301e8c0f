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


TWISTED = np.zeros((7, 13), "float32").T
WRONG = [  # (argument, value, error, what is expected of it)
    ("b", None, TypeError, "expected a NumPy array, got NoneType"),
    ("a", np.zeros(3), TypeError, "buffer 'A': expected dtype float32, got float64"),
    ("a", np.zeros(3, "float32"), ValueError, r"'A': expected \d+ elements, got shape \(3,\)"),
    ("indptr", np.zeros(3, "int32"), ValueError, "axis 'J': expected 14 elements, got shape .3,"),
    ("c", TWISTED, ValueError, "buffer 'C': expected a C-contiguous array"),
    ("m", 13.0, TypeError, "expected a number of type int32, got 13.0"),
    ("m", 2**40, ValueError, "expected a number of type int32, got 10995"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments(name, value, error, message):
    with pytest.raises(error, match=f"spmm: argument '{name}': .*{message}"):
        interpret(spmm(), {**spmm_args(), name: value})


def test_wrong_names_and_numbers_of_arguments():
    args = spmm_args()
    with pytest.raises(TypeError, match="spmm: unknown argument 'q'"):
        interpret(spmm(), {**args, "q": 1})
    del args["b"]
    with pytest.raises(TypeError, match="spmm: argument 'b' is missing"):
        interpret(spmm(), args)
    with pytest.raises(TypeError, match="spmm: expected 9 arguments .*, got 1"):
        interpret(spmm(), [1])
