"""Arrays whose features are in rows of their own: copied where more is visited than copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from small import arguments_of, small
from sparsetir.schedules.passes.features_last import features_last, result_last
from sparsetir.sparse_ir.nodes import sparse_iterations

PRODUCT = """
with T.sp_iter([I, J, K], "SRS", "f") as [i, j, k]:
    with T.init():
        OUT[i, k] = 1.0
    OUT[i, k] = OUT[i, k] + A[i, j] * X[k, j]
"""
UPDATE = """
with T.sp_iter([I, J, K], "SRS", "f") as [i, j, k]:
    if A[i, j] > 0.0:
        OUT[i, k] = T.max(OUT[i, k], A[i, j] * X[k, j] - Y[k, i])
"""
SAMPLED = """
with T.sp_iter([I, J, K], "SSR", "f") as [i, j, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[i, j] * Y[i, k] * X[k, j]
"""
ACROSS = """
with T.sp_iter([I, J, K], "SRS", "f") as [i, j, k]:
    with T.init():
        OUT[k, i] = 0.0
    OUT[k, i] = OUT[k, i] + A[i, j] * X[k, j]
"""
# By name: the body, axes of buffers, and the copied operands.
PROGRAMS = {
    "a product": (PRODUCT, {"X": "K N", "OUT": "I K"}, "X"),
    "an update of two operands": (UPDATE, {"X": "K N", "Y": "K I", "OUT": "I K"}, "XY"),
    "sampled": (SAMPLED, {"X": "K N", "Y": "I K", "OUT": "I J"}, "X"),
    "a result across": (ACROSS, {"X": "K N", "OUT": "K I"}, "X"),
}


def arguments(program: Any, nnz: int, feat: int) -> dict[str, Any]:
    where = np.zeros((12, 30), bool)
    where.flat[np.random.default_rng(feat).permutation(where.size)[:nnz]] = True
    return arguments_of(program, where, {"K": feat, "H": 3}, feat=feat)


def check(program: Any, sizes: Any) -> None:
    """Compare the kernel with the interpreter, for numbers of elements and of features."""
    kernel = sparsetir.build(program)
    for nnz, feat in sizes:
        expected = arguments(program, nnz, feat)
        result = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in expected.items()}
        sparsetir.interpret(program, expected)
        kernel(**result)
        np.testing.assert_array_equal(result["out"], expected["out"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_copies(name: str) -> None:
    """With few elements what is there is read, with many the copies; features of all widths."""
    body, over, operands = PROGRAMS[name]
    program = small("f", body, A="I J", **over)
    copied = features_last(program)
    assert copied is not None
    assert [it.name for it in sparse_iterations(copied[0])] == [
        f"{x}_ws_copy" for x in operands
    ] + ["f"]
    check(program, ((0, 3), (5, 4), (29, 1), (150, 0), (150, 1), (150, 21)))


WHOLE, PARTLY = {"X": "N K", "OUT": "K I"}, {"X": "N K", "OUT": "K N"}
IN_PLACE = ACROSS.replace("X[k, j]", "X[j, k]")
SLICES = IN_PLACE.replace("K]", "H, K]").replace("SRS", "SRSS").replace("k]:", "h, k]:")
SLICES = SLICES.replace("OUT[k, i]", "OUT[k, h, i]").replace("X[j, k]", "X[j, k] * Y[h]")
RESULTS = {
    "a result across": (IN_PLACE, WHOLE),
    "and an operand": (ACROSS, {"X": "K N", "OUT": "K I"}),
    "of three axes": (SLICES, {**WHOLE, "OUT": "K H I", "Y": "H"}),
    "an extremum": (IN_PLACE.replace("OUT[k, i] + A", "T.max(OUT[k, i], A") + ")", WHOLE),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_across(name: str) -> None:
    """Copied after the iteration, for enough elements; sums and rows of all lengths."""
    body, over = RESULTS[name]
    program = small("f", body, "H = T.dense_fixed(3)", A="I J", **over)
    copied = result_last(program)
    assert copied is not None
    assert [it.name for it in sparse_iterations(copied.func)] == ["f", "OUT_ws_copy"]
    check(program, ((0, 3), (5, 4), (47, 7), (150, 0), (150, 1), (150, 21)))


def test_results_in_place() -> None:
    update = "\n".join(IN_PLACE.splitlines()[:2] + IN_PLACE.splitlines()[-1:])
    for body, over in (
        (PRODUCT.replace("X[k, j]", "X[j, k]"), {"X": "N K", "OUT": "I K"}),
        (IN_PLACE.replace("SRS", "RRR").replace("OUT[k, i]", "OUT[()]"), {"X": "N K", "OUT": ""}),
        (update, WHOLE),
        (IN_PLACE, PARTLY),
    ):
        assert result_last(small("f", body, A="I J", **over)) is None


def test_copies_are_made_on_as_many_threads() -> None:
    sch = sparsetir.Schedule(small("f", PRODUCT, A="I J", X="K N", OUT="I K"))
    sch.annotate(sch.get_sparse_iteration("f"), "threads", 1)
    assert "T.parallel" not in sparsetir.lower(sch)["II scheduled"].script()
    assert "X_ws_copy" in sparsetir.lower(sch)["II scheduled"].script()


STAY = {
    "features last": (PRODUCT.replace("X[k, j]", "X[j, k]"), {"X": "N K", "OUT": "I K"}),
    "read at two places": (
        PRODUCT.replace("X[k, j]", "X[k, j] * X[k, i]"), {"X": "K N", "OUT": "I K"}
    ),
    "nothing is stored sparsely": (
        PRODUCT.replace("J", "N").replace("A[i, j]", "2.0"), {"X": "K N", "OUT": "I K"}
    ),
    "no reduction": (
        'with T.sp_iter([I, J, K], "SSS", "f") as [i, j, k]:\n'
        "    OUT[i, j, k] = A[i, j] * X[k, j]", {"X": "K N", "OUT": "I J K"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name: str) -> None:
    body, over = STAY[name]
    assert features_last(small("f", body, **({"A": "I J"} if "A[" in body else {}), **over)) is None
