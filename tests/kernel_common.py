"""A small SpMM to call: its kernel, its arguments, its result."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from programs import PROGRAMS

linker = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("gcc") or shutil.which("clang++")),
    reason="no linker: TVM calls a C++ compiler to write a shared library",
)


@functools.cache
def kernel(name: str = "spmm", dtype: str = "float32", idtype: str = "int32") -> Any:
    """The compiled program; tests that count checks build their own."""
    return sparsetir.build(PROGRAMS[name].make(dtype, idtype))


def arguments(
    feat: int = 16, dtype: Any = "float32", m: int = 20, n: int = 30, seed: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of SpMM by name, the output full of NaN."""
    rng = np.random.default_rng(seed)
    mask = rng.random((m, n)) < 0.2
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype("int32")
    indices = np.nonzero(mask)[1].astype("int32")
    return {
        "a": rng.uniform(-1, 1, len(indices)).astype(dtype),
        "b": rng.uniform(-1, 1, (n, feat)).astype(dtype),
        "c": np.full((m, feat), np.nan).astype(dtype),
        "indptr": indptr,
        "indices": indices,
    }


def expected(args: dict[str, Any]) -> np.ndarray:
    """The expected C, in float64."""
    m = len(args["indptr"]) - 1
    dense = np.zeros((m, len(args["b"])))
    rows = np.repeat(np.arange(m), np.diff(args["indptr"]))
    dense[rows, args["indices"]] = args["a"].astype(np.float64)
    return dense @ args["b"].astype(np.float64)


def check(args: dict[str, Any], bound: float = 1e-5) -> None:
    """The output is right."""
    np.testing.assert_allclose(
        np.asarray(args["c"], np.float64), expected(args), rtol=bound, atol=bound
    )


def right(call: Callable[..., object], args: dict[str, Any] | None = None, **more: object) -> None:
    """A call with these arguments, or those of the small SpMM, computes what it must."""
    args = arguments() if args is None else args
    args["c"][:] = np.nan
    call(**args, **more)
    check(args)
