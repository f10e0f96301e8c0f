"""Every format on real matrices: is the result right, how large is it, how long does it take?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from bench.harness import each, finish, geomean, refuse_bad
from bench.problems import graphs, pattern_of, pruned, relations
from bench.report import table
from bench.timing import interleaved
from sparsetir.formats import CSF, ConvertedFormat, Format, Hyb, Operand, Pattern, RelationalHyb
from sparsetir.formats.library import library, refusal
from sparsetir.schedules.operators import rgms, sddmm, spmm
from sparsetir.schedules.operators.problems import Sddmm, Spmm
from sparsetir.schedules.operators.rgms import Rgms

FEATURES = 32
RELATIONAL_FEATURES = 16
RELATIONAL_K = 5  # of the paper, section 4.4.1
TOLERANCE = 1e-5  # of the sum of the absolute values of what is added up
CHUNK = 100_000  # elements of an SDDMM that are checked at a time
RELATIONAL_FORMATS = (CSF((0, 1, 2)), CSF((1, 0, 2)), RelationalHyb(RELATIONAL_K))
PROGRAMS = {
    "spmm": "SpMM, 32 features, the matrix in the format",
    "sddmm": "SDDMM, 32 features, the result in the format and back",
    "rgms": "Sum over relations of A[r] X W[r], 16 by 16 features, A in the format",
}
LEGEND = """
right: matrices with a right result, of those that were tried. error: the largest,
in units of the sum of absolute values. padding: median. most: the largest padding.
ns/nnz: of the conversion, median. x first: kernel time over that of the first format,
geometric mean. compile: the slowest of the format."""


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

    def error(self, result: np.ndarray) -> np.ndarray:
        """Of each element, in units of the sum of the absolute values that it is made of."""
        return np.abs(result.astype("float64") - self.exact) / (self.scale + 0.1)


class Kernels:
    """Decomposed kernels, one for each program and format; they serve every pattern."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._built: dict[tuple[str, Format], Any] = {}

    def get(self, task: Task, fmt: Format, converted: ConvertedFormat) -> Any:
        """The kernel, which is built for the first task."""
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
    """The command; status 1 if a result was wrong or something failed."""
    kernels, matrices = Kernels(), {}
    seconds = 0.0 if args.quick else 0.05
    cells = each(
        (
            f"{task.name}: {task.func.name}, {fmt.name}",
            partial(measure, task, fmt, kernels, seconds),
        )
        for task, formats in tasks(args, matrices)
        for fmt in formats
        if args.format is None or label(fmt) in args.format
    )
    show(cells, matrices, kernels)
    results = {"matrices": matrices, "cells": cells, "compile_seconds": kernels.seconds}
    finish(args, "formats", results)
    refuse_bad(cells, [c for c in cells if "wrong" in c or "failed" in c])


def tasks(
    args: argparse.Namespace, matrices: dict[str, Any]
) -> Iterator[tuple[Task, list[Format]]]:
    """Programs on matrices of the command line, and formats; sizes are noted in `matrices`."""
    for name, matrix in (graphs(args.graph) | pruned(args.pruned, args.layers)).items():
        matrices[name] = {"shape": matrix.shape, "nnz": int(matrix.nnz)}
        for task in (spmm_task(name, matrix), sddmm_task(name, matrix)):
            yield task, library(task.pattern)
    for name, pattern in relations(args.hetero).items():
        matrices[name] = {"shape": pattern.shape, "nnz": pattern.nnz}
        yield relational_task(name, pattern), list(RELATIONAL_FORMATS)


def _random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("float32")


def spmm_task(name: str, matrix: Any) -> Task:
    """C = A B."""
    b = _random(1, matrix.shape[1], FEATURES)
    func = spmm.program(Spmm())
    given = {"b": b, "out": np.empty((matrix.shape[0], FEATURES), "float32")}
    exact, scale = matrix.astype("float64") @ b.astype("float64"), abs(matrix) @ np.abs(b)
    stored: dict[str, Any] = {"A": matrix.data}
    pattern = pattern_of(matrix)
    return Task(name, func, pattern, stored, given, "out", exact, scale, lambda: matrix @ b)


def sddmm_task(name: str, matrix: Any) -> Task:
    """OUT = X Y^T where the matrix has elements."""
    pattern = pattern_of(matrix)
    x, y = _random(1, matrix.shape[0], FEATURES), _random(2, matrix.shape[1], FEATURES)
    exact, scale = np.empty(pattern.nnz), np.empty(pattern.nnz)
    for start in range(0, pattern.nnz, CHUNK):
        at = slice(start, start + CHUNK)
        i, j = (c[at] for c in pattern.coords)
        terms = x[i].astype("float64") * y[j]
        exact[at], scale[at] = terms.sum(axis=1), np.abs(terms).sum(axis=1)
    given = {"x": x, "y": y, "out": np.empty(pattern.nnz, "float32")}
    given |= {"indptr": matrix.indptr, "indices": matrix.indices}
    # Formats are of programs whose loops are not fused.
    text = sddmm.program(Sddmm()).script().replace("T.fuse(I, J)", "I, J")
    func = sparsetir.from_source(text)
    return Task(name, func, pattern, {"OUT": None}, given, "out", exact, scale)


def relational_task(name: str, pattern: Pattern) -> Task:
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

    def product(x: np.ndarray, w: np.ndarray, how: Callable[[Any], Any]) -> np.ndarray:
        y = np.zeros((rows, RELATIONAL_FEATURES), x.dtype)
        for (stored, a), weight in zip(parts, w, strict=True):
            y[stored] += (how(a) @ x) @ weight
        return y

    exact = product(x.astype("float64"), w.astype("float64"), lambda a: a.astype("float64"))
    scale = product(np.abs(x), np.abs(w), abs)
    given = {"x": x, "w": w, "out": np.empty(exact.shape, "float32")}
    peer = partial(product, x, w, lambda a: a)
    return Task(
        name, rgms.program(Rgms()), pattern, {"A": values}, given, "out", exact, scale, peer
    )


def measure(task: Task, fmt: Format, kernels: Kernels, seconds: float) -> dict[str, Any]:
    """One format for one task; what goes wrong is part of the result."""
    cell = {"program": task.func.name, "matrix": task.name}
    cell |= {"format": fmt.name, "label": label(fmt)}
    if reason := refusal(task.pattern, fmt.places(task.pattern)):
        return {**cell, "skipped": reason}
    try:
        return {**cell, **_measure(task, fmt, kernels, seconds)}
    except Exception as error:  # told at the end, with all others
        return {**cell, "failed": f"{type(error).__name__}: {error}"}


def _measure(task: Task, fmt: Format, kernels: Kernels, seconds: float) -> dict[str, Any]:
    operand = Operand.of(task.func, *task.stored)

    def convert() -> dict[str, np.ndarray]:
        return fmt.convert(task.pattern, operand).arguments(False, **task.stored)

    converted = fmt.convert(task.pattern, operand)
    kernel = kernels.get(task, fmt, converted)
    arguments = {**task.given, **convert()}
    result = arguments[task.output]
    result.fill(np.nan)
    kernel(**arguments)
    # The other way back, of buffers that the program writes.
    back = [converted.restore(n, arguments) for n, v in task.stored.items() if v is None]
    errors = [task.error(x) for x in (result, *back)]
    out: dict[str, Any] = {"padding": round(converted.padding, 4), "bytes": converted.nbytes}
    out["error"] = float(f"{max(e.max(initial=0.0) for e in errors):.1e}")
    for right in (e <= TOLERANCE for e in errors):
        if not right.all():
            at = [int(n) for n in np.unravel_index(int(right.argmin()), right.shape)]
            out["wrong"] = f"{(~right).sum()} of {right.size} elements, the first at {at}"
            out["error"] = None
    calls: dict[str, Callable[[], Any]] = {"sparsetir": lambda: kernel(**arguments)}
    if task.peer is not None:
        calls["scipy"] = task.peer
    times = interleaved(calls, seconds, least=2)
    times |= interleaved({"convert": convert}, seconds, least=2, warm_up=0)
    # There are many of them: four digits, no number of rounds.
    out["seconds"] = {
        who: {k: float(f"{t[k]:.4g}") for k in ("min", "median")} for who, t in times.items()
    }
    return out


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
    print(LEGEND)
    for what in ("skipped", "failed", "wrong"):
        for cell in (c for c in cells if what in c):
            where = f"{cell['matrix']}, {cell['program']}, {cell['format']}"
            print(f"{what}: {where}: {cell[what]}")


def _least(cell: dict[str, Any], who: str = "sparsetir") -> float:
    return cell["seconds"][who]["min"]


def _show_formats(
    title: str, cells: list[dict[str, Any]], matrices: dict[str, Any], kernels: Kernels
) -> None:
    measured = [c for c in cells if "seconds" in c]
    first = {c["matrix"]: _least(c) for c in measured if c["label"] == cells[0]["label"]}
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
        times = [_least(c) / first[c["matrix"]] for c in done if c["matrix"] in first]
        built = [kernels.seconds.get(f"{c['program']} {c['format']}", 0.0) for c in done]
        per = [_least(c, "convert") / max(1, matrices[c["matrix"]]["nnz"]) for c in done]
        row += [f"{max(c['error'] for c in done):.0e}", f"{statistics.median(paddings):.1%}"]
        row += [f"{max(paddings):.1%}", f"{statistics.median(per) * 1e9:.0f}"]
        rows.append([*row, f"{geomean(times):.2f}", f"{max(built):.2f}"])
    head = ["", "right", "skipped", "error", "padding", "most", "ns/nnz", "x first", "compile (s)"]
    table(title, head, rows)


def _show_matrices(cells: list[dict[str, Any]], matrices: dict[str, Any]) -> None:
    rows = []
    for name in dict.fromkeys(c["matrix"] for c in cells):
        mine = [c for c in cells if c["matrix"] == name and "seconds" in c and "wrong" not in c]
        if not mine:
            continue
        best = min(mine, key=_least)
        peers = [_least(c, "scipy") for c in mine if "scipy" in c["seconds"]]
        row = [name, "x".join(map(str, matrices[name]["shape"])), matrices[name]["nnz"]]
        row.append(f"{min(peers) * 1e3:.3f}" if peers else "-")
        for cell in (mine[0], best):
            row += [f"{_least(cell) * 1e3:.3f}", cell["format"]]
        rows.append(row)
    table("ms, minimum", ["", "shape", "nnz", "scipy", "first", "", "best", ""], rows)
