"""Inputs of relational gather-matmul-scatter, and its exact result."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["arguments", "exact"]


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
