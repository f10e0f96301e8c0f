"""Inputs of relational gather-matmul-scatter, and its exact result; what its GPU tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.schedules.targets import resolve_target

__all__ = ["GPU", "MASKS", "SEEDS", "UNITS", "arguments", "exact"]

GPU = resolve_target({"kind": "cuda", "arch": "sm_80"})
SEEDS = (0, 1)  # orders of warps
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # that inner sums are rounded to


def masks() -> dict[str, np.ndarray]:
    """Relations by rows by columns: sizes that divide nothing, and the extremes."""
    rng = np.random.default_rng(1)
    mixed = rng.random((5, 70, 30)) < 0.1
    mixed[2] = mixed[3] = False
    mixed[3, 7, 7] = True  # a relation of one element, and one of none
    mixed[1, 4] = mixed[4, 69] = True  # rows in pieces
    one_each = np.zeros((9, 45, 40), bool)
    for offset in range(9):  # as of a convolution
        rows = np.flatnonzero(rng.random(45) < 0.6)
        one_each[offset, rows, rng.integers(0, 40, len(rows))] = True
    return {
        "mixed": mixed,
        "one in each row": one_each,
        "nothing stored": np.zeros((3, 5, 7), bool),
        "one relation": rng.random((1, 33, 12)) < 0.3,
        "one element": np.ones((1, 1, 1), bool),
        "no relations": np.zeros((0, 4, 5), bool),
        "no columns": np.zeros((2, 4, 0), bool),
    }


MASKS = masks()


def arguments(
    rng: np.random.Generator, mask: np.ndarray, k: int, feat: int, dtype: str = "float32",
    idtype: str = "int32", weighted: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Expected result of the plain program; `mask` is (relations, m, n)."""
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
    """Expected result, computed with a dense tensor."""
    a = np.zeros(mask.shape)
    a[mask] = args.get("a", 1.0)
    return np.einsum("rij,jk,rkl->il", a, args["x"].astype(float), args["w"].astype(float))
