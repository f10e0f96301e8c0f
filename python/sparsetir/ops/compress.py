"""Stable counting sorts of elements by rows or columns."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tvm.script import tirx as T

from sparsetir.planning.run_plan import compiled
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import lower, name_of
from sparsetir.schedules.targets import resolve_target

LARGE, INT32_MAX = 2**62, 2**31 - 1
FOUND = 5  # statistics of pairs: see sorted_pairs
# Elements, plus EACH per call, that a process leaves to torch's sort. A fixed graph is sorted two
# or three times. More sorts mean that edges are new in each step: then counting kernels take a
# tenth of the time, and their compilation is one of many in the first steps.
LEFT_TO_TORCH, EACH = 1 << 21, 1 << 19
_left = LEFT_TO_TORCH


def transpose(
    rowptr: Tensor, col: Tensor, n: int, places: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row pointers, columns and positions of the elements of the transposed (n, m) matrix.

    rowptr, col : (m + 1,) and (nnz,), of one type on a CPU
    places : (nnz,) int64 positions of the elements in another order, which the result then refers
        to; by default positions are those in `col`
    """
    m = len(rowptr) - 1
    if _count(col):
        in_order = places is None
        positions = col.new_empty(0, dtype=torch.int64) if places is None else places.contiguous()
        arrays = _results(n, col, max(m, n))
        kernel = _row_kernel(dtype_name(col), dtype_name(arrays[0]), in_order)
        sizes = m, n, len(col), len(positions)
        kernel.run((rowptr.contiguous(), col.contiguous(), positions, *arrays, *sizes))
        return arrays
    rows = torch.repeat_interleave(rowptr[1:] - rowptr[:-1])
    order = torch.argsort(col, stable=True)
    dtype = _index_type(len(col), max(m, n), col.dtype)
    starts, cols = _starts(col, n).to(dtype), rows[order].to(dtype)
    return starts, cols, order if places is None else places[order]


class Order(NamedTuple):
    """A known sorting order; places : the positions, None if keys are sorted."""

    places: Tensor | None


def compress(
    edges: Tensor, m: int, n: int, known: Order | None = None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Compress (2, nnz) edges, columns first, to rows; return None if one is out of range.

    known : an order that may sort the rows, which is checked

    Returns row pointers (m + 1,), columns (nnz,), both in int32 if it suffices, and the position
    of each element among the edges, None if they are sorted already. The order is stable.
    """
    col, row = edges.contiguous()
    rowptr, cols, order, (low, high, first, last, falls) = sorted_pairs(row, col, m, n, known)
    if len(row) and (low < 0 or high >= m or first < 0 or last >= n):
        return None
    return rowptr, cols, order if falls else None


def sorted_by(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The start of each key (size + 1,), and the elements' positions (int64) sorted by key.

    keys : (nnz,) from 0 to size - 1
    """
    starts, _, order, _ = sorted_pairs(keys, keys, size, size)
    return starts, torch.arange(len(keys), device=keys.device) if order is None else order


def sorted_pairs(
    keys: Tensor, others: Tensor, size: int, n: int, known: Order | None = None
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """The start of each key, others and positions sorted by key, and statistics of both.

    The statistics are the least and the greatest key, the least and the greatest of the others, and
    whether keys ever decrease. The arrays are meaningless if keys or others are out of range.
    """
    if known is None and _count(keys):
        arrays = _results(size, keys, max(size, n))
        statistics = torch.empty(FOUND, dtype=torch.int64)
        kernel = _pair_kernel(dtype_name(keys), dtype_name(arrays[0]))
        arguments = keys.contiguous(), others.contiguous(), *arrays, statistics, size, n, len(keys)
        kernel.run(arguments)
        return *arrays, statistics.tolist()
    bounds = [0, -1, 0, -1, 0]
    if len(keys):
        results = [*torch.aminmax(keys), *torch.aminmax(others), (keys[1:] < keys[:-1]).any()]
        bounds = [int(x) for x in results]
    if bounds[0] < 0 or bounds[1] >= size:
        return keys, others, keys, bounds
    dtype = _index_type(len(keys), max(size, n), keys.dtype)
    starts = _starts(keys, size).to(dtype)
    if not bounds[4]:
        return starts, others.to(dtype, copy=True), None, bounds
    if known is not None and known.places is not None and _sorts(known.places, keys):
        order = known.places.to(torch.int64, copy=True)
    else:
        order = torch.argsort(keys, stable=True)
    return starts, others[order].to(dtype), order, bounds


def _sorts(order: Tensor, keys: Tensor) -> bool:
    """Whether `order` is a permutation that sorts the keys."""
    if order.shape != keys.shape or order.device != keys.device or order.is_floating_point():
        return False
    low, high = (int(x) for x in torch.aminmax(order))
    if low < 0 or high >= len(keys):
        return False
    is_present = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    is_present[order] = True
    ordered = keys[order]
    return bool(is_present.all()) and not bool((ordered[1:] < ordered[:-1]).any())


def _count(keys: Tensor) -> bool:
    """Whether to sort by our counting kernels."""
    global _left
    if keys.device.type != "cpu":
        return False
    _left -= min(_left, len(keys) + EACH)
    return not _left


def _results(size: int, like: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty arrays for starts, others and positions; largest : the largest size"""
    nnz, dtype = len(like), _index_type(len(like), largest, like.dtype)
    starts, others = (like.new_empty(n, dtype=dtype) for n in (size + 1, nnz))
    return starts, others, like.new_empty(nnz, dtype=torch.int64)


def _index_type(nnz: int, size: int, dtype: torch.dtype) -> torch.dtype:
    """int32 if it suffices, which halves the memory; else the given type."""
    return torch.int32 if max(nnz, size) < INT32_MAX else dtype


def _starts(rows: Tensor, m: int) -> Tensor:
    """(m + 1,) row pointers of elements with these rows."""
    counts = torch.bincount(rows, minlength=m)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(rows.dtype)


# Counters first hold the end of each key. Elements are placed from the last to the first, each
# decrementing its key's counter, which ends as the key's start: so the sort is stable.


@cache
def _pair_kernel(dtype: str, out: str) -> Kernel:
    """The kernel that sorts keys and others, and reports their ranges."""

    @T.prim_func(s_tir=True)
    def sort_pairs(
        keys: T.handle, others: T.handle, starts: T.handle, sorted: T.handle, order: T.handle,
        found: T.handle, size: T.int64, n: T.int64, nnz: T.int64,
    ):  # fmt: skip
        K = T.match_buffer(keys, (nnz,), dtype)
        V = T.match_buffer(others, (nnz,), dtype)
        S = T.match_buffer(starts, (size + T.int64(1),), out)
        C = T.match_buffer(sorted, (nnz,), out)
        ORDER = T.match_buffer(order, (nnz,), "int64")
        F = T.match_buffer(found, (FOUND,), "int64")
        F[0] = T.int64(LARGE)
        F[1] = T.int64(-1)
        F[2] = T.int64(LARGE)
        F[3] = T.int64(-1)
        F[4] = T.int64(0)
        for p in T.serial(nnz):
            F[0] = T.min(F[0], T.Cast("int64", K[p]))
            F[1] = T.max(F[1], T.Cast("int64", K[p]))
            F[2] = T.min(F[2], T.Cast("int64", V[p]))
            F[3] = T.max(F[3], T.Cast("int64", V[p]))
        for p in T.serial(nnz - T.int64(1)):
            F[4] = T.bitwise_or(F[4], T.Cast("int64", K[p + T.int64(1)] < K[p]))
        if F[0] >= T.int64(0) and F[1] < size and F[2] >= T.int64(0) and F[3] < n:
            for k in T.serial(size + T.int64(1)):
                S[k] = T.Cast(out, 0)
            for p in T.serial(nnz):
                S[T.Cast("int64", K[p])] += T.Cast(out, 1)
            for k in T.serial(size):
                S[k + T.int64(1)] += S[k]
            for p in T.serial(nnz):
                at = nnz - T.int64(1) - p
                S[T.Cast("int64", K[at])] -= T.Cast(out, 1)
                C[T.Cast("int64", S[T.Cast("int64", K[at])])] = T.Cast(out, V[at])
                ORDER[T.Cast("int64", S[T.Cast("int64", K[at])])] = at

    return _compiled(sort_pairs, dtype, out)


@cache
def _row_kernel(dtype: str, out: str, in_order: bool) -> Kernel:
    """The kernel that sorts compressed rows by columns, which are known to be in range."""

    @T.prim_func(s_tir=True)
    def sort_rows(
        rowptr: T.handle, col: T.handle, places: T.handle, starts: T.handle, sorted: T.handle,
        order: T.handle, m: T.int64, size: T.int64, nnz: T.int64, given: T.int64,
    ):  # fmt: skip
        R = T.match_buffer(rowptr, (m + T.int64(1),), dtype)
        K = T.match_buffer(col, (nnz,), dtype)
        P = T.match_buffer(places, (given,), "int64")
        S = T.match_buffer(starts, (size + T.int64(1),), out)
        C = T.match_buffer(sorted, (nnz,), out)
        ORDER = T.match_buffer(order, (nnz,), "int64")
        for k in T.serial(size + T.int64(1)):
            S[k] = T.Cast(out, 0)
        for p in T.serial(nnz):
            S[T.Cast("int64", K[p])] += T.Cast(out, 1)
        for k in T.serial(size):
            S[k + T.int64(1)] += S[k]
        for i in T.serial(m):
            for p in T.serial(T.Cast("int64", R[m - i] - R[m - T.int64(1) - i])):
                at = T.Cast("int64", R[m - i]) - T.int64(1) - p
                S[T.Cast("int64", K[at])] -= T.Cast(out, 1)
                C[T.Cast("int64", S[T.Cast("int64", K[at])])] = T.Cast(out, m - T.int64(1) - i)
                ORDER[T.Cast("int64", S[T.Cast("int64", K[at])])] = at if in_order else P[at]

    return _compiled(sort_rows, dtype, out, in_order)


def _compiled(func: Any, *key: Hashable) -> Kernel:
    """The compiled kernel of a function, counted by :func:`sparsetir.compilations`."""
    target = resolve_target("llvm")
    return compiled((name_of(func), *key), target, lambda: lower(func, target=target))
