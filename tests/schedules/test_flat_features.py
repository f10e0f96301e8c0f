"""Features in several dense axes: one axis where nothing tells them apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from programs import copied
from small import arguments_of, small
from sparsetir.schedules.passes.flat_features import flat_features
from sparsetir.sparse_ir.nodes import sparse_iterations

AXES = "H = T.dense_fixed(heads)\nG = T.dense_fixed(2)"
PRODUCT = """
with T.sp_iter([I, J, H, K], "SRSS", "f") as [i, j, h, k]:
    with T.init():
        OUT[i, h, k] = 1.0
    OUT[i, h, k] = OUT[i, h, k] + A[i, j] * X[j, h, k]
"""
APART = """
with T.sp_iter([I, K, H], "SSS", "zero") as [i, k, h]:
    OUT[i, h, k] = 0.0
with T.sp_iter([I, J, K, H], "SRSS", "f") as [i, j, k, h]:
    if A[i, j] > 0.0:
        OUT[i, h, k] = T.max(OUT[i, h, k], A[i, j] * X[j, h, k] - Y[h, k])
"""
SAMPLED = """
with T.sp_iter([I, J, H, K], "SSRR", "f") as [i, j, h, k]:
    with T.init():
        OUT[i, j] = 0.0
    OUT[i, j] = OUT[i, j] + A[i, j] * Y[i, h, k] * X[j, h, k]
"""
THREE = """
with T.sp_iter([I, J, G, H, K], "SRSSS", "f") as [i, j, g, h, k]:
    OUT[i, g, h, k] = OUT[i, g, h, k] + X[j, g, h, k]
"""
NESTED = """
W = T.alloc_sparse_buffer((H, K), "float32")
with T.sp_iter([I], "S", "f") as [i]:
    with T.sp_iter([H, K], "SS", "zero") as [h, k]:
        W[h, k] = 0.0
    with T.sp_iter([J, H, K], "RSS", "sum") as [j, h, k]:
        W[h, k] = W[h, k] + A[i, j] * X[j, h, k]
    with T.sp_iter([H, K], "SS", "last") as [h, k]:
        OUT[i, h, k] = W[h, k] * 2.0
"""
# By name: the body, the axes of buffers, and the loops of each iteration afterwards.
FLAT: dict[str, Any] = {
    "a product": (PRODUCT, {"X": "N H K", "OUT": "I H K"}, [["I", "J", "H_K"]]),
    "an init apart, and loops in another order": (
        APART, {"X": "N H K", "Y": "H K", "OUT": "I H K"}, [["I", "H_K"], ["I", "J", "H_K"]],
    ),
    "sampled": (SAMPLED, {"X": "N H K", "Y": "I H K", "OUT": "I J"}, [["I", "J", "H_K"]]),
    "three axes": (THREE, {"X": "N G H K", "OUT": "I G H K"}, [["I", "J", "G_H_K"]]),
    "nested": (
        NESTED, {"X": "N H K", "OUT": "I H K"}, [["I"], ["H_K"], ["J", "H_K"], ["H_K"]],
    ),
}  # fmt: skip


def program(body: str, buffers: dict[str, str]) -> Any:
    over = {"A": "I J", "OUT": "I H K", "X": "N H K", **buffers}
    used = {name: axes for name, axes in over.items() if f"{name}[" in body}
    return small("f", body, AXES, **used)


def loops(func: Any) -> list[list[str]]:
    return [[str(axis.name) for axis in it.axes] for it in sparse_iterations(func)]


def arguments(func: Any, heads: int, feat: int) -> dict[str, Any]:
    where = np.random.default_rng(feat).random((9, 20)) < 0.3
    where[2], where[5] = False, True
    return arguments_of(func, where, {"K": feat, "H": heads, "G": 2}, heads=heads, feat=feat)


@pytest.mark.parametrize("name", FLAT)
def test_one_axis(name: str) -> None:
    body, buffers, expected = FLAT[name]
    func = program(body, buffers)
    assert loops(flat_features(func)) == expected
    kernel = sparsetir.build(func)
    for heads, feat in ((1, 1), (3, 5), (2, 16), (0, 4), (7, 9)):
        args = arguments(func, heads, feat)
        expected = copied(args)
        sparsetir.interpret(func, expected)
        kernel(**args)
        np.testing.assert_array_equal(args["out"], expected["out"])


def test_one_axis_has_coordinates_for_the_product() -> None:
    """A product of open lengths may pass 32 bits, and so may one with an axis of 64."""
    fixed = "H = T.dense_fixed(8)\nK = T.dense_fixed({})"
    for axes, idtype in (
        (AXES, "int64"),
        (fixed.format(16), "int32"),
        (fixed.format(1 << 29), "int64"),
    ):
        func = small("f", PRODUCT, axes, A="I J", X="N H K", OUT="I H K")
        assert flat_features(func).axis("H_K").idtype == idtype
