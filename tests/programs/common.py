"""Parts of test programs: the record, random patterns, and their storage.

Patterns are boolean masks; :func:`csr` and :func:`csf` store them. Nothing here uses sparsetir.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from small import making

Arrays = dict[str, Any]
Inputs = Callable[[np.random.Generator, str, str, str], Arrays]
CASES = ("small", "empty", "dense_row", "single_row", "single_column", "nonfinite")
FINITE = CASES[:-1]
FEATURES = dict(zip(CASES, (7, 3, 5, 4, 1, 6), strict=True))
_SHAPES = dict(zip(CASES, ((13, 11), (7, 5), (9, 17), (1, 13), (11, 1), (10, 9)), strict=True))


@dataclass(frozen=True)
class Program:
    """A stage-I program with its inputs and its oracle.

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
    inputs: Inputs
    oracle: Callable[[Arrays], dict[str, np.ndarray]]
    outputs: tuple[str, ...]
    gpu: bool = True
    scatter: bool = False
    cases: tuple[str, ...] = field(default=CASES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "make", functools.cache(self.make))


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
    """Arguments with copied arrays, for functions that write to them."""
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


def program(
    name: str, body: str, axes: str, base: Inputs, oracle: Callable[[Arrays], np.ndarray],
    first: str = "", gpu: bool = True, scatter: bool = False, cases: tuple[str, ...] = CASES,
    **how: str,
) -> Program:  # fmt: skip
    """A program of :func:`small.making`, and its inputs: what it takes of `base`, and more.

    oracle : the output, of arguments whose arrays of floats are float64
    how : by names in capitals, the axes of buffers; by others, how arguments are filled, and
        their sizes: "fill n feat", "values m", "below relations nnz" for integers, "out m feat"
    """
    make = making(name, body, axes, first, **{k: v for k, v in how.items() if k.isupper()})
    filled = {k: v.split() for k, v in how.items() if not k.isupper()}
    (output,) = (k for k, (how, *_) in filled.items() if how == "out")

    def inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
        args = {"feat": FEATURES[case], "feat_in": 3, "relations": 3}
        args |= base(rng, case, dtype, idtype)
        for one, (how, *sizes) in filled.items():
            shape = tuple(int(x) if x.isdigit() else args[x] for x in sizes)
            if how == "below":
                args[one] = rng.integers(0, shape[0], shape[1:]).astype(idtype)
            else:
                args[one] = {
                    "fill": lambda: fill(rng, case, shape, dtype),
                    "values": lambda: values(rng, shape, dtype),
                    "out": lambda: garbage(shape, dtype),
                }[how]()
        return {str(p.name): args[str(p.name)] for p in make(dtype, idtype).params}

    def outputs(args: Arrays) -> dict[str, np.ndarray]:
        wide = {k: v.astype("f8") if _is_float(v) else v for k, v in args.items()}
        return {output: oracle({**wide, "dtype": args[output].dtype})}

    return Program(name, make, inputs, outputs, (output,), gpu, scatter, cases)


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "fV"


def csr_arrays(
    mask: np.ndarray, idtype: str, ptr: str = "indptr", idx: str = "indices", nnz: str = "nnz",
    m: str = "m", n: str = "n",
) -> Arrays:  # fmt: skip
    """A pattern in CSR, by these names."""
    indptr, indices = csr(mask, idtype)
    return {ptr: indptr, idx: indices, nnz: len(indices), m: mask.shape[0], n: mask.shape[1]}


def rows_of(args: Arrays, ptr: str = "indptr") -> np.ndarray:
    return parents_of(args[ptr])


def product(args: Arrays, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """A B from the stored elements of A."""
    return scatter_sum(args["c"].shape, rows, args["a"][:, None] * args["b"][cols])
