"""Loops moved into each step of an iteration, and tiles of steps that begin earlier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from positions_common import SOFTMAX
from schedule_common import opened
from sparsetir.sparse_ir.schedule import distribute as documented

M, HEADS = 4, 6


softmax = sparsetir.from_source(SOFTMAX)


def arguments() -> dict[str, Any]:
    indptr = np.array([0, 3, 3, 4, 9], "int32")
    x = np.random.default_rng(0).uniform(-2, 2, (9, HEADS)).astype("float32")
    return {"x": x, "y": np.full_like(x, np.nan), "indptr": indptr, "m": M, "nnz": 9,
            "heads": HEADS}  # fmt: skip


def expected() -> np.ndarray:
    given = arguments()
    out = np.exp(given["x"].astype(float))
    for a, b in zip(given["indptr"], given["indptr"][1:], strict=False):
        out[a:b] /= out[a:b].sum(0)
    return out


def check(sch: Any) -> str:
    """The interpreter and the kernel give the softmax; what is compiled."""
    assert sparsetir.from_source(sch.func.script()).script() == sch.func.script()
    given = arguments()
    sparsetir.interpret(sch.func, given | {"y": (y := given["y"].copy())})
    kernel = sparsetir.build(sch)
    kernel(**given)
    for found in (y, given["y"]):
        np.testing.assert_allclose(found, expected(), rtol=1e-5)
    return str(kernel.stages["III"].script())


def test_the_docstring_shows_what_happens() -> None:
    sch, _, (_, h) = opened(softmax, "rows")
    _, lanes = sch.split(h, [None, 16], tail="exact")
    steps = sch.distribute([lanes])
    assert [s.name for s in steps] == ["top", "powers", "total", "rows_step", "divide"]
    doc = (documented.__doc__ or "").split("After ")[1]
    lines = [line.strip() for line in doc.split("\n\n")[1].splitlines()]
    text = sch.func.script().replace("T.exp", "exp").replace("T.max(", "max(")
    have = {line.strip() for line in text.splitlines()}
    assert len(lines) == 8
    assert [line for line in lines if line not in have and "-inf" not in line] == [
        'TOP_each = T.alloc_sparse_buffer((H1,), "float32", "local")'
    ]


@pytest.mark.parametrize("tail", ["guard", "shift"])
@pytest.mark.parametrize("factors", [[None, 4], [None, 1, 2]])
def test_steps_of_tiles(tail: str, factors: list[Any]) -> None:
    sch, _, (_, h) = opened(softmax, "rows")
    _, *inner = sch.split(h, factors, tail=tail)
    sch.distribute(inner)
    check(sch)


def test_tiles_that_set_what_they_change_have_no_conditions_and_take_turns() -> None:
    sch, it, (i, h) = opened(softmax, "rows")
    blocks, i = sch.divide(i, 2, by="work")
    tiles, lanes = sch.split(h, [None, 4], tail="shift")
    sch.sparse_reorder(it, [blocks, i, tiles, lanes])
    sch.distribute(lanes)
    sch.parallelize(blocks)
    assert "likely" not in check(sch)
    assert '"vh0": "scatter: Y"' in sparsetir.lower_sparse_iter(sch.func).script()


def test_tiles_on_several_threads_keep_their_conditions() -> None:
    sch, it, (i, h) = opened(softmax, "rows")
    tiles, lanes = sch.split(h, [None, 4], tail="shift")
    sch.sparse_reorder(it, [tiles, i, lanes])
    sch.distribute(lanes)
    sch.parallelize(tiles)
    assert "likely" in check(sch)


def test_tiles_that_change_what_others_have_set_keep_their_conditions() -> None:
    """`twice` changes what no visit sets: to come by twice would double it twice."""
    text = softmax.script().replace("T.exp(X[i, j, h] - TOP[()])", "Y[i, j, h] * 2.0")
    sch, _, (_, h) = opened(sparsetir.from_source(text), "rows")
    _, lanes = sch.split(h, [None, 4], tail="shift")
    sch.distribute(lanes)
    assert "likely" in sparsetir.lower_sparse_iter(sch.func).script()


@pytest.mark.parametrize("place", ["j + 1", "0"])
def test_tiles_that_read_elsewhere_keep_their_conditions(place: str) -> None:
    """What is read there was set by no step of this visit."""
    text = softmax.script().replace("TOTAL[()] + Y[i, j, h]", f"TOTAL[()] + Y[i, {place}, h]")
    sch, _, (_, h) = opened(sparsetir.from_source(text), "rows")
    _, lanes = sch.split(h, [None, 4], tail="shift")
    sch.distribute(lanes)
    assert "likely" in sparsetir.lower_sparse_iter(sch.func).script()
