"""Statements and operations of bodies: kernels do what the interpreter does, or both refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from refusals import refuse
from small import small

# Bodies of a loop over q, of which TVM makes no vectors, or wrong ones, and others.
LANES = """
C[i, q] = B[i, q] + B[i, q + 1]

n = T.alloc_buffer((1,), "int32")
n[0] = 0
while n[0] < q:
    n[0] = n[0] + 1
C[i, q] = T.cast(n[0], "float32")

if A[q] > 1:
    C[i, q] = A[i]
else:
    C[i, q] = 2.0

v: T.let[T.float32] = A[q] * A[q]
C[i, q] = v * v

for u in T.vectorized(4):
    D[i, q, u] = A[q]

for u in range(q):
    C[i, q] = C[i, q] + A[u]
"""


def in_rows(body: str) -> str:
    return 'with T.sp_iter([I], "S", "f") as [i]:\n    ' + body.strip().replace("\n", "\n    ")


def in_loop(kind: str, body: str) -> str:
    return in_rows(f"for q in T.{kind}:\n    " + body.strip().replace("\n", "\n    "))


@pytest.mark.parametrize("lanes", ["4", "m"])
@pytest.mark.parametrize("body", LANES.strip().split("\n\n"))
def test_loops_of_lanes(body: str, lanes: str) -> None:
    func = small("f", in_loop(f"vectorized({lanes})", body), A="I", B="I J", C="I N", D="I N K")
    outs = []
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        c, d = np.zeros((4, 9), "float32"), np.zeros((4, 9, 9), "float32")
        run(func, {
            "a": np.arange(4, dtype="float32"), "b": np.arange(1, 6, dtype="float32"), "c": c,
            "d": d, "indptr": np.array([0, 2, 2, 4, 5], "int32"),
            "indices": np.array([0, 2, 1, 3, 0], "int32"), "m": 4, "n": 9, "nnz": 5,
            "feat": 9,
        })  # fmt: skip
        outs.append((c, d))
    for got, wanted in zip(*outs, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_parallel_loops_are_proven() -> None:
    """Or refused, or the author's word is taken."""
    proven = {"C[i, q] = A[i]", "C[i, 3 - q * 2] = A[i]", "C[i, q + i] = C[i, q + i] + A[i]"}
    for kind in ("parallel", "vectorized"):
        for body in proven:
            small("f", in_loop(f"{kind}(4)", body), A="I", C="I N")
        for body in ("A[i] = A[i] + 1.0", "C[i, q] = C[i, q - 1]", "C[i, q // 2] = A[i]"):
            refuse(
                f"small('f', in_loop('{kind}(4)', '{body}'), A='I', C='I N')  # ParseError: in "
                "function 'f': loop 'q' is not proven free of races (scatter: .. ): expected visits"
                ' that each write elements of their own .. annotations={"race": "ignore"}',
                globals(),
            )
            said = f'{kind}(4, annotations={{"race": "ignore"}})'
            func = small("f", in_loop(said, body), A="I", C="I N")
            assert sparsetir.from_source(func.script()).script() == func.script()
    one = small("f", in_loop("parallel(1)", "A[i] = A[i] + 1.0"), A="I")
    assert "T.parallel(1)" in one.script()


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (', "positive"', AssertionError, "f: positive"),
        ("", AssertionError, r"f: expected A\[i\] > 0"),
        (', ("ValueError", ["pos", "itive"])', ValueError, "f: positive"),
    ],
)
def test_asserts(said: str, error: Any, message: str) -> None:
    """They raise from workers, too; a GPU raises nothing."""
    func = small("f", in_rows(f"assert A[i] > 0{said}\nY[i] = A[i]"), A="I", Y="I")
    kernel = sparsetir.build(func)
    for n, at in ((5, 3), (300_000, 299_999)):
        a, y = np.ones(n, "float32"), np.zeros(n, "float32")
        kernel(a, y)
        np.testing.assert_array_equal(y, a)
        a[at] = -1
        with pytest.raises(
            (error, RuntimeError), match=message
        ):  # TVM's own workers say the latter
            kernel(a, y)
        if n < 10:
            with pytest.raises(error, match=message):
                sparsetir.interpret(func, {"a": a, "y": y, "m": n})
    with pytest.raises(sparsetir.ScheduleError, match="'f' asserts in loops over threads"):
        sparsetir.build(func, target={"kind": "cuda", "arch": "sm_80"})
