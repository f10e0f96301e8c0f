"""Inputs, exact results and scipy's way for `thesis_schedules.py` and `python -m bench mttkrp`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

COLUMNS = 32  # of the dense operands of MTTKRP: "all input tensors other than B have 32 columns"


def csf(coords: Any, shape: tuple[int, ...], idtype: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """The order of a tensor's elements in CSF, and (ptr, idx) of each level but the first.

    coords : (order, nnz) integers, no element twice
    """
    order = np.lexsort(coords[::-1])
    found = coords[:, order]
    nnz = len(order)
    begins = np.zeros(nnz, bool)
    begins[:1] = True
    begins[1:] = found[0, 1:] != found[0, :-1]
    above, count = found[0], shape[0]  # which parent each element has, and how many there are
    levels = []
    for axis in found[1:]:
        begins[1:] |= axis[1:] != axis[:-1]
        first = np.flatnonzero(begins)
        ptr = np.concatenate([[0], np.cumsum(np.bincount(above[first], minlength=count))])
        levels.append((ptr.astype(idtype), axis[first].astype(idtype)))
        above, count = np.cumsum(begins) - 1, len(first)
    return order, levels


def mttkrp_arguments(
    coords: Any, shape: tuple[int, ...], dtype: str, idtype: str, rng: Any
) -> tuple[dict[str, Any], Any]:
    """Arrays by name, with random values, and the exact result."""
    order, levels = csf(coords, shape, idtype)
    args = {"a": np.full((shape[0], COLUMNS), np.nan, dtype)}
    args["b"] = rng.random(coords.shape[1]).astype(dtype)
    for name, size in zip("cdef", shape[1:], strict=False):
        args[name] = rng.standard_normal((size, COLUMNS)).astype(dtype)
    for name, (ptr, idx) in zip("klmn", levels, strict=False):
        args |= {f"{name}_ptr": ptr, f"{name}_idx": idx}
    terms = args["b"].astype("float64")[:, None]
    for name, axis in zip("cdef", coords[1:, order], strict=False):
        terms = terms * args[name][axis]
    exact = np.zeros((shape[0], COLUMNS))
    np.add.at(exact, coords[0, order], terms)
    return args, exact


def mttkrp_sizes(args: dict[str, Any]) -> dict[str, int]:
    """The numbers that the shapes of the arrays imply, by name."""
    found = {"size_i": len(args["a"]), "columns": args["a"].shape[1]}
    for name, factor in zip("klmn", "cdef", strict=True):
        if factor in args:
            found |= {f"size_{name}": len(args[factor]), f"nnz_{name}": len(args[f"{name}_idx"])}
    return found


def mttkrp_scipy(args: dict[str, Any]) -> Callable[[], Any]:
    """The same from the leaves up: a sparse product for each level, rows by NumPy between."""
    names = [name for name in "klmn" if f"{name}_ptr" in args]
    last, ptr = names[-1], args[f"{names[-1]}_ptr"]
    factors = dict(zip(names, "cdef", strict=False))
    shape = (len(ptr) - 1, len(args[factors[last]]))
    leaves = sp.csr_array((args["b"], args[f"{last}_idx"], ptr), shape)
    sums = []
    for name in reversed(names[:-1]):
        idx, ptr = args[f"{name}_idx"], args[f"{name}_ptr"]
        ones = np.ones(len(idx), args["b"].dtype)
        total = sp.csr_array((ones, np.arange(len(idx)), ptr), (len(ptr) - 1, len(idx)))
        sums.append((total, args[factors[name]], idx))

    def run() -> Any:
        found = leaves @ args[factors[last]]
        for total, rows, idx in sums:
            found = total @ (found * rows[idx])
        return found

    return run


def problem(
    program: str, scale: float, dtype: str = "float32", idtype: str = "int32", seed: int = 0,
    columns: int = 37,
) -> tuple[dict[str, Any], str, Any, Callable[[], Any]]:  # fmt: skip
    """(arguments, name of the result, exact result, scipy) of a random input with empty rows.

    columns : of the dense operand of SpMM
    """
    rng = np.random.default_rng(seed)
    if program in ("spmv", "spmm"):
        m, n = int(20011 * scale) + 3, int(17011 * scale) + 5
        matrix = sp.random_array((m, n), density=min(1, 20 / n), format="csr", rng=rng, dtype=dtype)
        matrix = sp.csr_array(sp.diags_array((np.arange(m) % 3 > 0).astype(dtype)) @ matrix)
        matrix.eliminate_zeros()
        matrix.sort_indices()
        args = {"indptr": matrix.indptr.astype(idtype), "indices": matrix.indices.astype(idtype)}
        right = rng.random(n if program == "spmv" else (n, columns)).astype(dtype)
        names = ("x", "y") if program == "spmv" else ("b", "c")
        exact = matrix.astype("float64") @ right
        args |= {"a": matrix.data, names[0]: right, names[1]: np.full(exact.shape, np.nan, dtype)}
        return args, names[1], exact, lambda: matrix @ right
    order = int(program.removeprefix("mttkrp"))
    shape = (int(5003 * scale) + 3, int(211 * scale) + 2, 53, 13, 7)[:order]
    coords = np.unique([rng.integers(s, size=int(2e5 * scale) + 40) for s in shape], axis=1)
    coords = coords[:, coords[0] % 3 > 0]
    args, exact = mttkrp_arguments(coords, shape, dtype, idtype, rng)
    return args, "a", exact, mttkrp_scipy(args)


def best(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The shortest time of each call in seconds, of many that take turns."""
    found = {name: float("inf") for name in calls}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
        rounds += 1
    return found
