"""Every format on real matrices: is the result right, how large is it, how long does it take?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from bench.convert import least_of
from bench.graphs import graphs, pattern_of, pruned, relations, values_of
from bench.harness import finish, geomean, refuse_bad
from bench.programs import RELATIONAL, SDDMM, SPMM
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir.formats import CSF, ConvertedFormat, Format, Hyb, Operand, Pattern, RelationalHyb
from sparsetir.formats.library import library, refusal

FEATURES = 32
RELATIONAL_FEATURES = 16
RELATIONAL_K = 5  # of the paper, section 4.4.1
TOLERANCE = 1e-5  # of the sum of the absolute values of what is added up
CHUNK = 100_000  # elements of an SDDMM that are checked at a time
RELATIONAL_FORMATS = (CSF((0, 1, 2)), CSF((1, 0, 2)), RelationalHyb(RELATIONAL_K))
PROGRAMS = {
    "spmm": "SpMM, 32 features, the matrix in the format",
    "sddmm": "SDDMM, 32 features, the result in the format and back",
    "relational": "Sum over relations of A[r] X W[r], 16 by 16 features, A in the format",
}


@dataclass
class Task:
    """A program on a pattern, and what it has to give.

    stored : of the buffers in the format the values; None for one that the program writes
    given : the other arguments by name
    output : the one of these that holds the result
    exact : the result in float64
    scale : of the same shape, the sum of the absolute values of what is added up
    peer : the same by scipy, if it can
    """

    name: str
    func: Any
    pattern: Pattern
    stored: dict[str, np.ndarray | None]
    given: dict[str, np.ndarray]
    output: str
    exact: np.ndarray
    scale: np.ndarray
    peer: Callable[[], Any] | None = None


class Kernels:
    """Decomposed kernels, one for each program and format; they serve every pattern."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._built: dict[tuple[str, Format], Any] = {}

    def get(self, task: Task, fmt: Format, converted: ConvertedFormat) -> Any:
        key = (task.func.name, fmt)
        if key not in self._built:
            start = time.perf_counter()
            func = converted.decompose(task.func, drop_full_masks=False)
            if all(v is not None for v in task.stored.values()):
                func = sparsetir.extract_preprocess(func)[1]
            self._built[key] = sparsetir.build(func)
            self.seconds[f"{task.func.name} {fmt.name}"] = time.perf_counter() - start
        return self._built[key]


def run(args: argparse.Namespace) -> None:
    seconds = 0.0 if args.quick else 0.05
    kernels, cells, matrices = Kernels(), [], {}
    spmm, sddmm, relational = (sparsetir.from_source(t) for t in (SPMM, SDDMM, RELATIONAL))
    plain = {**graphs(args.graph), **pruned(args.pruned, args.layers)}
    related = relations(args.hetero)
    for name, matrix in plain.items():
        matrices[name] = {"shape": matrix.shape, "nnz": int(matrix.nnz)}
        for task in (spmm_task(name, spmm, matrix), sddmm_task(name, sddmm, matrix)):
            for fmt in chosen(library(task.pattern), args.format):
                cells.append(measure(task, fmt, kernels, seconds))
    for name, pattern in related.items():
        matrices[name] = {"shape": pattern.shape, "nnz": pattern.nnz}
        task = relational_task(name, relational, pattern)
        for fmt in chosen(list(RELATIONAL_FORMATS), args.format):
            cells.append(measure(task, fmt, kernels, seconds))
    progress("")
    show(cells, matrices, kernels)
    results = {"matrices": matrices, "cells": cells, "compile_seconds": kernels.seconds}
    finish(args, "formats", results)
    refuse_bad(cells, [c for c in cells if "wrong" in c or "failed" in c])


def chosen(formats: list[Format], names: list[str] | None) -> list[Format]:
    """Those that were asked for, by their names in tables; all by default."""
    return [f for f in formats if names is None or label(f) in names]


def _random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("float32")


def spmm_task(name: str, func: Any, matrix: Any) -> Task:
    """C = A B."""
    matrix, b = matrix.copy(), _random(1, matrix.shape[1], FEATURES)
    matrix.data = values_of(matrix)
    given = {"b": b, "c": np.empty((matrix.shape[0], FEATURES), "float32")}
    return Task(
        name, func, pattern_of(matrix), {"A": matrix.data}, given, "c",
        exact=matrix.astype("float64") @ b.astype("float64"), scale=abs(matrix) @ np.abs(b),
        peer=lambda: matrix @ b,
    )  # fmt: skip


def sddmm_task(name: str, func: Any, matrix: Any) -> Task:
    """OUT = X Y^T where the matrix has elements."""
    pattern = pattern_of(matrix)
    x, y = _random(1, matrix.shape[0], FEATURES), _random(2, matrix.shape[1], FEATURES)
    exact, scale = np.empty(pattern.nnz), np.empty(pattern.nnz)
    for start in range(0, pattern.nnz, CHUNK):
        at = slice(start, start + CHUNK)
        i, j = (c[at] for c in pattern.coords)
        terms = x[i].astype("float64") * y[j]
        exact[at], scale[at] = terms.sum(axis=1), np.abs(terms).sum(axis=1)
    given = {
        "x": x, "y": y, "out": np.empty(pattern.nnz, "float32"),
        "indptr": matrix.indptr, "indices": matrix.indices,
    }  # fmt: skip
    return Task(name, func, pattern, {"OUT": None}, given, "out", exact, scale)


def relational_task(name: str, func: Any, pattern: Pattern) -> Task:
    """Y = sum over relations of A[r] X W[r]."""
    count, rows, cols = pattern.shape
    x = _random(1, cols, RELATIONAL_FEATURES)
    w = _random(2, count, RELATIONAL_FEATURES, RELATIONAL_FEATURES)
    values = _random(3, pattern.nnz)
    ends = np.searchsorted(pattern.coords[0], np.arange(count + 1))
    parts = []
    for start, stop in zip(ends[:-1], ends[1:], strict=True):
        i, j = (c[start:stop] for c in pattern.coords[1:])
        stored, at = np.unique(i, return_inverse=True)
        a = sp.csr_array((values[start:stop], (at, j)), shape=(len(stored), cols))
        parts.append((stored, a))

    def product() -> np.ndarray:
        y = np.zeros((rows, RELATIONAL_FEATURES), "float32")
        for (stored, a), weight in zip(parts, w, strict=True):
            y[stored] += (a @ x) @ weight
        return y

    exact, scale = (np.zeros((rows, RELATIONAL_FEATURES)) for _ in range(2))
    for (stored, a), weight in zip(parts, w.astype("float64"), strict=True):
        exact[stored] += (a.astype("float64") @ x) @ weight
        scale[stored] += (abs(a) @ np.abs(x)) @ np.abs(weight)
    given = {"x": x, "w": w, "y": np.empty(exact.shape, "float32")}
    return Task(name, func, pattern, {"A": values}, given, "y", exact, scale, product)


def measure(task: Task, fmt: Format, kernels: Kernels, seconds: float) -> dict[str, Any]:
    """One format for one task; what goes wrong is part of the result."""
    pattern = task.pattern
    progress(f"{task.name}: {task.func.name}, {fmt.name}")
    cell = {
        "program": task.func.name, "matrix": task.name, "format": fmt.name, "label": label(fmt)
    }  # fmt: skip
    reason = refusal(pattern, fmt.places(pattern))
    if reason:
        return {**cell, "skipped": reason}
    try:
        return {**cell, **_measure(task, fmt, kernels, seconds)}
    except Exception as error:  # told at the end, with all others
        return {**cell, "failed": f"{type(error).__name__}: {error}"}


def _measure(task: Task, fmt: Format, kernels: Kernels, seconds: float) -> dict[str, Any]:
    operand = Operand.of(task.func, *task.stored)
    converted = fmt.convert(task.pattern, operand)
    kernel = kernels.get(task, fmt, converted)
    arguments = {**task.given, **converted.arguments(False, **task.stored)}
    result = arguments[task.output]
    result.fill(np.nan)
    kernel(**arguments)
    errors = [_errors(task, result)]
    # The other way back, of buffers that the program writes.
    errors += [
        _errors(task, converted.restore(n, arguments)) for n, v in task.stored.items() if v is None
    ]
    out: dict[str, Any] = {
        "padding": round(converted.padding, 4), "bytes": converted.nbytes,
        "error": float(f"{max(e.max(initial=0.0) for e in errors):.1e}"),
    }  # fmt: skip
    for right in (e <= TOLERANCE for e in errors):
        if not right.all():
            at = [int(n) for n in np.unravel_index(int(right.argmin()), right.shape)]
            out["wrong"] = f"{(~right).sum()} of {right.size} elements, the first at {at}"
            out["error"] = None
    calls: dict[str, Callable[[], Any]] = {"sparsetir": lambda: kernel(**arguments)}
    if task.peer is not None:
        calls["scipy"] = task.peer
    times = interleaved(calls, seconds, least=2)
    times["convert"] = least_of(
        lambda: fmt.convert(task.pattern, operand).arguments(False, **task.stored), seconds
    )
    # There are many of them: four digits, no number of rounds.
    out["seconds"] = {
        who: {k: float(f"{t[k]:.4g}") for k in ("min", "median")} for who, t in times.items()
    }
    return out


def _errors(task: Task, result: np.ndarray) -> np.ndarray:
    """Of each element, in units of the sum of the absolute values that it is made of."""
    return np.abs(result.astype("float64") - task.exact) / (task.scale + 0.1)


def label(fmt: Format) -> str:
    """The name of a format in tables, where k depends on the matrix."""
    return f"hyb_{fmt.c}_k" if isinstance(fmt, Hyb) else fmt.name


def show(cells: list[dict[str, Any]], matrices: dict[str, Any], kernels: Kernels) -> None:
    """Two tables for each program, and all that was skipped, failed or is wrong."""
    for program, title in PROGRAMS.items():
        mine = [c for c in cells if c["program"] == program]
        if mine:
            _show_formats(title, mine, matrices, kernels)
            _show_matrices(mine, matrices)
    print("\nright: matrices with a right result, of those that were tried. error: the largest,")
    print("in units of the sum of absolute values. padding: median. most: the largest padding.")
    print("ns/nnz: of the conversion, median. x first: kernel time over that of the first format,")
    print("geometric mean. compile: the slowest of the format.")
    for what in ("skipped", "failed", "wrong"):
        for cell in cells:
            if what in cell:
                where = f"{cell['matrix']}, {cell['program']}, {cell['format']}"
                print(f"{what}: {where}: {cell[what]}")


def _show_formats(
    title: str, cells: list[dict[str, Any]], matrices: dict[str, Any], kernels: Kernels
) -> None:
    first = {
        c["matrix"]: c["seconds"]["sparsetir"]["min"]
        for c in cells if c["label"] == cells[0]["label"] and "seconds" in c
    }  # fmt: skip
    rows = []
    for name in dict.fromkeys(c["label"] for c in cells):
        mine = [c for c in cells if c["label"] == name]
        tried = [c for c in mine if "skipped" not in c]
        done = [c for c in tried if "wrong" not in c and "failed" not in c]
        row = [name, f"{len(done)}/{len(tried)}", len(mine) - len(tried)]
        if not done:
            rows.append([*row, *["-"] * 6])
            continue
        paddings = [c["padding"] for c in done]
        times = [
            c["seconds"]["sparsetir"]["min"] / first[c["matrix"]]
            for c in done if c["matrix"] in first
        ]  # fmt: skip
        built = [kernels.seconds.get(f"{c['program']} {c['format']}", 0.0) for c in done]
        each = [c["seconds"]["convert"]["min"] / max(1, matrices[c["matrix"]]["nnz"]) for c in done]
        rows.append([
            *row, f"{max(c['error'] for c in done):.0e}", f"{statistics.median(paddings):.1%}",
            f"{max(paddings):.1%}", f"{statistics.median(each) * 1e9:.0f}",
            f"{geomean(times):.2f}" if times else "-",
            f"{max(built):.2f}",
        ])  # fmt: skip
    head = ["", "right", "skipped", "error", "padding", "most", "ns/nnz", "x first", "compile (s)"]
    table(title, head, rows)


def _show_matrices(cells: list[dict[str, Any]], matrices: dict[str, Any]) -> None:
    rows = []
    for name in dict.fromkeys(c["matrix"] for c in cells):
        mine = [c for c in cells if c["matrix"] == name and "seconds" in c and "wrong" not in c]
        if not mine:
            continue
        best = min(mine, key=lambda c: c["seconds"]["sparsetir"]["min"])
        peers = [c["seconds"]["scipy"]["min"] for c in mine if "scipy" in c["seconds"]]
        rows.append([
            name, "x".join(map(str, matrices[name]["shape"])), matrices[name]["nnz"],
            f"{min(peers) * 1e3:.3f}" if peers else "-",
            f"{mine[0]['seconds']['sparsetir']['min'] * 1e3:.3f}", mine[0]["format"],
            f"{best['seconds']['sparsetir']['min'] * 1e3:.3f}", best["format"],
        ])  # fmt: skip
    table("ms, minimum", ["", "shape", "nnz", "scipy", "first", "", "best", ""], rows)
