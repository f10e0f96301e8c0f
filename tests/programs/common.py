"""What every test program is made of: the record, random patterns, and their storage.

Patterns are boolean masks; :func:`csr` and :func:`csf` store them. Nothing here uses sparsetir.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, Any]
CASES = ("small", "empty", "dense_row", "single_row", "single_column", "nonfinite")
FINITE = CASES[:-1]
FEATURES = {
    "small": 7,
    "empty": 3,
    "dense_row": 5,
    "single_row": 4,
    "single_column": 1,
    "nonfinite": 6,
}
_SHAPES = {
    "small": (13, 11),
    "empty": (7, 5),
    "dense_row": (9, 17),
    "single_row": (1, 13),
    "single_column": (11, 1),
    "nonfinite": (10, 9),
}


@dataclass(frozen=True)
class Program:
    """One stage-I program with its inputs and its oracle.

    make : (value_dtype, idtype) -> SparseFunc, the same each time, as parsing takes a while
    inputs : (rng, case, value_dtype, idtype) -> every argument by parameter name; arrays in their
        natural shape, sizes as int, outputs filled with garbage
    oracle : (inputs) -> what the outputs must be, computed in float64
    outputs : the parameters that the program writes
    gpu : whether the program is worth running on a GPU
    scatter : whether visits that differ in spatial coordinates or in a reduction above them write
        one element, so that its loops are parallel only with atomics
    cases : the members of CASES that make sense
    """

    name: str
    make: Callable[[str, str], Any]
    inputs: Callable[[np.random.Generator, str, str, str], Arrays]
    oracle: Callable[[Arrays], dict[str, np.ndarray]]
    outputs: tuple[str, ...]
    gpu: bool = True
    scatter: bool = False
    cases: tuple[str, ...] = field(default=CASES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "make", functools.cache(self.make))


# Whose oracle does not say where infinities go.
finite = functools.partial(Program, cases=FINITE)


def tolerance(value_dtype: str) -> dict[str, float]:
    """Keyword arguments of `np.testing.assert_allclose` for results of that type."""
    bound = {"bfloat16": 1e-1, "float16": 2e-2, "float32": 1e-5, "float64": 1e-12}[value_dtype]
    return {"rtol": bound, "atol": bound}


def mask2(rng: np.random.Generator, case: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """A random pattern; "small" and "nonfinite" have empty first, middle and last rows."""
    m, n = shape or _SHAPES[case]
    mask = rng.random((m, n)) < 0.35
    if case == "empty":
        mask[:] = False
    elif case == "dense_row":
        mask &= rng.random((m, n)) < 0.3
        mask[m // 2] = True
    elif m > 2:
        mask[[0, m // 2, m - 1]] = False
    return mask


def mask3(rng: np.random.Generator, case: str) -> np.ndarray:
    """A random pattern of order three, of the shape of :func:`mask2` and a third axis of 6."""
    rows = mask2(rng, case)
    mask = (rng.random((*rows.shape, 6)) < 0.4) & rows[..., None]
    if case == "dense_row":
        mask[rows.shape[0] // 2] = True
    return mask


def ragged(rng: np.random.Generator, case: str, rows: int, longest: int = 5) -> np.ndarray:
    """Random lengths of `rows` rows, some of them zero."""
    lengths = rng.integers(0, longest, rows)
    if case == "empty":
        lengths[:] = 0
    elif case == "single_column":
        lengths[:] = 1
    elif rows:
        lengths[0] = longest if case == "dense_row" else 0
    return lengths


def copied(args: Arrays) -> Arrays:
    """Arguments with arrays of their own, for what writes to them."""
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in args.items()}


def compress(lengths: np.ndarray, idtype: str) -> np.ndarray:
    """indptr of rows of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(idtype)


def csr(mask: np.ndarray, idtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(indptr, indices) of a pattern."""
    return compress(mask.sum(axis=1), idtype), np.nonzero(mask)[1].astype(idtype)


def csf(mask: np.ndarray, idtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(indptr, indices) of the second and of the third level of a pattern of order three."""
    fibers = mask.any(axis=2)
    return *csr(fibers, idtype), *csr(mask[fibers], idtype)


def values(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray:
    """Random values in (-1, 1); the first one is zero, as stored values may be."""
    out = rng.uniform(-1, 1, shape).astype(dtype)
    if out.size > 1:
        out.reshape(-1)[0] = 0
    return out


def fill(rng: np.random.Generator, case: str, shape: Any, dtype: str) -> np.ndarray:
    """A dense operand: as :func:`values`; "nonfinite" has its first row NaN, its last infinite."""
    out = rng.uniform(-1, 1, shape).astype(dtype)
    if case == "nonfinite":
        out[0], out[-1] = np.nan, np.inf
        out[len(out) // 2].flat[0] = -np.inf
    return out


def garbage(shape: Any, dtype: str) -> np.ndarray:
    """An output before the program ran."""
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 77, dtype)


def parents_of(indptr: np.ndarray) -> np.ndarray:
    """The parent of each stored element."""
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def scatter_sum(shape: Any, where: Any, terms: np.ndarray) -> np.ndarray:
    """Zeros of `shape` (float64) with each term added at its place."""
    out = np.zeros(shape)
    np.add.at(out, where, terms.astype(np.float64))
    return out
