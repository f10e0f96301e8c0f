"""The affine form of index expressions, against their values."""

from __future__ import annotations

import math
import random
from typing import Any

from tvm import tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.affine import affine, expr_of
from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.tir import as_dtype

VARS = [tirx.Var(name, "int32") for name in "ijk"]


def drawn(rng: random.Random, depth: int) -> Any:
    """An index of sums, products, casts and divisions."""
    if depth == 0:
        return rng.choice([*VARS, as_dtype(rng.randint(-3, 3), "int32")])
    a, b = (drawn(rng, depth - 1) for _ in range(2))
    kind = rng.choice((tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.Cast))
    if kind is tirx.FloorDiv:
        return tirx.FloorDiv(a, as_dtype(rng.randint(1, 3), "int32"))
    return tirx.Cast("int32", tirx.Cast("int64", a)) if kind is tirx.Cast else kind(a, b)


def value(expr: Any, point: dict[Any, Any]) -> int:
    return int(Analyzer().simplify(substitute(expr, point)))


def test_values_and_steps() -> None:
    rng = random.Random(0)
    for _ in range(100):
        index = drawn(rng, 3)
        form = affine(index)
        point = {v: as_dtype(rng.randint(0, 9), "int32") for v in VARS}
        whole = value(index, point)
        assert whole == sum(
            number * math.prod(value(expr_of(x), point) for x in term)
            for term, number in form.terms.items()
        ), index
        assert affine(index * 2 - index) == form == affine(index + VARS[0] - VARS[0])
        for v in VARS:
            step = form.step(v)
            if step is not None:
                assert value(index, {**point, v: point[v] + 1}) == whole + step, index


def test_steps_and_weights() -> None:
    i, j, k = VARS
    index = i * 16 + tirx.Cast("int32", tirx.Cast("int64", j) * 4) - j + tirx.floordiv(k, 2) * k
    assert [affine(index).step(v) for v in VARS] == [16, 3, None]
    assert affine(index).weights(VARS) is None
    assert affine(i * 16 + j).weights(VARS) == {i: 16, j: 1}
    for other in (i * 16 + j + 1, i * 16 + tirx.Var("m", "int32"), i * j):
        assert affine(other).weights(VARS) is None
    assert affine((i + j) * (i - j)) == affine(i * i - j * j)
