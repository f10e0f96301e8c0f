"""Relational gather-matmul-scatter: the plain program on inputs of all kinds."""

from typing import Any

import numpy as np
import pytest

import sparsetir
from sparsetir.schedules.operators.rgms import Rgms, program


def arguments(
    rng: np.random.Generator, mask: np.ndarray, k: int, feat: int, dtype: str = "float32",
    idtype: str = "int32", weighted: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Of the plain program; `mask` is (relations, m, n)."""
    relations, m, n = mask.shape
    stored = mask.any(axis=2)
    args = {
        "a": rng.uniform(-1, 1, int(mask.sum())).astype(dtype),
        "x": rng.uniform(-1, 1, (n, k)).astype(dtype),
        "w": rng.uniform(-1, 1, (relations, k, feat)).astype(dtype),
        "out": np.full((m, feat), np.nan, dtype),
        "row_ptr": np.append(0, np.cumsum(stored.sum(axis=1))).astype(idtype),
        "rows": stored.nonzero()[1].astype(idtype),
        "indptr": np.append(0, np.cumsum(mask.sum(axis=2)[stored])).astype(idtype),
        "indices": mask.nonzero()[2].astype(idtype),
        "m": m, "n": n,
    }  # fmt: skip
    return args if weighted else {k: v for k, v in args.items() if k != "a"}


def exact(mask: np.ndarray, args: dict[str, Any]) -> np.ndarray:
    """By a dense tensor."""
    a = np.zeros(mask.shape)
    a[mask] = args.get("a", 1.0)
    return np.einsum("rij,jk,rkl->il", a, args["x"].astype(float), args["w"].astype(float))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_plain_program(dtype: str, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    problem = Rgms(dtype, "int64" if weighted else "int32", weighted)
    func = program(problem)
    kernel = sparsetir.build(func)
    for relations, m, n, density in [(3, 5, 4, 0.4), (1, 1, 1, 1.0), (4, 3, 6, 0.0)]:
        mask = rng.random((relations, m, n)) < density
        args = arguments(rng, mask, 3, 5, dtype, problem.idtype, weighted)
        kernel(**args)
        np.testing.assert_allclose(
            args["out"], exact(mask, args), rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2
        )


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Rgms: argument 'dtype'"):
        Rgms("int8")
    with pytest.raises(ValueError, match="Rgms: argument 'out': expected None, 'float16' or"):
        Rgms("float16", out="float64")
